// The cells of one thread in the persistent kernels that keep states in registers: which cells these are, how their
// values are loaded and stored, and their part of a step.
#pragma once

#include <type_traits>

#include "sequence.cuh"

namespace extops::cuda {

// The cells that a thread computes at all steps, up to two neighbouring units of a sample, and their offsets at the
// current step. Steps are in the order of computation.
struct OwnCells {
  int sample;
  int unit;
  int count;        // how many of them exist
  int64_t state;    // offset in [batch, state_size]
  int64_t step;     // offset of unit 0 in [time, batch, state_size]
  int64_t advance;  // from one step to the next

  __device__ OwnCells(const Steps& steps, int sample, int unit, int cells, bool backward) : sample(sample), unit(unit) {
    const bool descends = steps.is_reverse() != backward;
    count = sample < steps.batch ? max(min(steps.state_size - unit, cells), 0) : 0;
    state = steps.state(sample, unit);
    step = steps.row(descends ? steps.time - 1 : 0, sample) * steps.state_size;
    advance = (descends ? -steps.time_stride : steps.time_stride) * steps.state_size;
  }

  __device__ void move(int steps) { step += steps * advance; }

  // Their offset in [time, batch, width * state_size], `ahead` steps from here.
  __device__ int64_t place(int width, int ahead = 0) const { return (step + ahead * advance) * width + unit; }

  // The offset of a number of the cell state, from that in a tensor of h.
  template <class Cell>
  __device__ int64_t cell(int64_t at, int state_size, int number) const {
    if constexpr (kCellStates<Cell> == 1) return at;
    return (at - unit) * kCellStates<Cell> + unit + number * state_size;
  }
};

// Their offsets at a step, in tensors of one value a cell and of `width` values. A kernel that must not wait for
// address arithmetic keeps one for loads and one for stores.
struct Cursor {
  int64_t state;
  int64_t place;
  int64_t advance;
  int width;

  __device__ Cursor(const OwnCells& own, int width)
      : state(own.step + own.unit), place(own.place(width)), advance(own.advance), width(width) {}

  __device__ void move() {
    state += advance;
    place += width * advance;
  }
};

// ---- how they are loaded and stored ----

// One value or two neighbours, as loaded. Unpacking them waits for the load.
template <class V, int kCount>
using Packed = std::conditional_t<sizeof(V) * kCount <= 4, uint32_t, uint2>;

template <class V, int kCount>
__device__ void unpack(V (&values)[kCount], const Packed<V, kCount>& packed) {
  memcpy(values, &packed, sizeof(values));
}

// Two neighbours that were loaded apart. `byte_perm` hides the packing; otherwise the compiler splits every pair into
// two registers.
__device__ inline uint32_t pack(uint16_t a, int b) { return __byte_perm(a, b, 0x5410); }
__device__ inline uint2 pack(uint32_t a, uint32_t b) { return {a, b}; }

template <class V>
__device__ auto bits_of(const V* from) {
  return *reinterpret_cast<const std::conditional_t<sizeof(V) == 2, uint16_t, uint32_t>*>(from);
}

// An instruction that is executed if operand number `condition` is not zero. The compiler would emit a branch and a
// copy of the loaded value, and the copy waits for the load.
#define EXTOPS_IF(condition, instruction) \
  "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %" condition ", 0;\n@wanted " instruction ";\n}"

template <class V, int kCount>
__device__ void load_if(bool condition, Packed<V, kCount>& packed, const V* from) {
  const uint32_t wanted = condition;
  if constexpr (sizeof(V) * kCount == 2) {
    asm volatile(EXTOPS_IF("1", "ld.global.u16 %0, [%2]") : "+r"(packed) : "r"(wanted), "l"(from));
  } else if constexpr (sizeof(V) * kCount == 4) {
    asm volatile(EXTOPS_IF("1", "ld.global.u32 %0, [%2]") : "+r"(packed) : "r"(wanted), "l"(from));
  } else {
    asm volatile(EXTOPS_IF("2", "ld.global.v2.u32 {%0, %1}, [%3]")
                 : "+r"(packed.x), "+r"(packed.y)
                 : "r"(wanted), "l"(from));
  }
}

__device__ inline void prefetch_if(bool condition, const void* from) {
  asm volatile(EXTOPS_IF("0", "prefetch.global.L2 [%1]")::"r"(static_cast<uint32_t>(condition)), "l"(from));
}

template <class V, int kCount>
__device__ void store_if(uint32_t wanted, V* to, const V (&values)[kCount]) {
  Packed<V, kCount> packed{};
  memcpy(&packed, values, sizeof(values));
  if constexpr (sizeof(values) == 2) {
    asm volatile(EXTOPS_IF("0", "st.global.u16 [%1], %2")::"r"(wanted), "l"(to), "r"(packed) : "memory");
  } else if constexpr (sizeof(values) == 4) {
    asm volatile(EXTOPS_IF("0", "st.global.u32 [%1], %2")::"r"(wanted), "l"(to), "r"(packed) : "memory");
  } else {
    asm volatile(EXTOPS_IF("0", "st.global.v2.u32 [%1], {%2, %3}")::"r"(wanted), "l"(to), "r"(packed.x), "r"(packed.y)
                 : "memory");
  }
}
#undef EXTOPS_IF

// How `kValues` values of a thread's cells are loaded and stored, `stride` apart: by predicated instructions, for one
// cell or an aligned pair. A load from global memory takes longer than a step, so values are prefetched to L2 `kAhead`
// steps before.
template <int kAhead_>
struct PredicatedAccess {
  static constexpr int kAhead = kAhead_;
  uint32_t exists;

  // Hides `count` from the compiler. If it knew from a branch before the loop whether there is a cell, it would keep
  // that in a register in place of a predicate, and put stores behind a branch.
  __device__ explicit PredicatedAccess(int count) {
    asm volatile("" : "+r"(count));
    exists = count > 0;
  }

  template <class V, int kCount, int kValues>
  __device__ void load(bool wanted, Packed<V, kCount>* packed, const V* from, int stride) const {
    unrolled<kValues>([&](int j) { load_if<V, kCount>(wanted, packed[j], from + j * stride); });
  }
  template <class V, int kCount, int kValues>
  __device__ void store(bool wanted, V* to, int stride, const V (*values)[kCount]) const {
    unrolled<kValues>([&](int j) { store_if(wanted ? exists : 0, to + j * stride, values[j]); });
  }
};

// Loads and stores a pair of which `count` cells exist: by one access if all pairs are aligned.
struct PairAccess {
  static constexpr int kAhead = 0;
  int count;
  bool aligned;

  template <class V, int kCount, int kValues>
  __device__ void load(bool wanted, Packed<V, 2>* packed, const V* from, int stride) const {
    if (!wanted) return;
    if (aligned) {
      unrolled<kValues>([&](int j) { packed[j] = *reinterpret_cast<const Packed<V, 2>*>(from + j * stride); });
    } else {
      unrolled<kValues>(
          [&](int j) { packed[j] = pack(bits_of(from + j * stride), count > 1 ? bits_of(from + j * stride + 1) : 0); });
    }
  }

  template <class V, int kCount, int kValues>
  __device__ void store(bool wanted, V* to, int stride, const V (*values)[2]) const {
    if (!wanted) return;
    if (aligned) {
      unrolled<kValues>([&](int j) {
        Packed<V, 2> packed;
        memcpy(&packed, values[j], sizeof(packed));
        if (count > 0) *reinterpret_cast<Packed<V, 2>*>(to + j * stride) = packed;
      });
    } else {
      unrolled<kValues>([&](int j) {
        if (count > 0) to[j * stride] = values[j][0];
        if (count > 1) to[j * stride + 1] = values[j][1];
      });
    }
  }
};

// Loads and stores a single cell. One thread may store its gates and another its state. With `kElseZero`, what is not
// loaded becomes zero, so that no register has to keep the old value.
template <bool kElseZero>
struct SingleAccess {
  static constexpr int kAhead = 0;
  bool stores_gates;
  bool stores_state;

  template <class V, int kCount, int kValues>
  __device__ void load(bool wanted, Packed<V, 1>* packed, const V* from, int stride) const {
    unrolled<kValues>([&](int j) {
      if (kElseZero) packed[j] = 0;
      if (wanted) packed[j] = *reinterpret_cast<const Packed<V, 1>*>(from + j * stride);
    });
  }
  template <class V, int kCount, int kValues>
  __device__ void store(bool wanted, V* to, int stride, const V (*values)[1]) const {
    if (!(wanted && (kValues > 1 ? stores_gates : stores_state))) return;
    unrolled<kValues>([&](int j) { to[j * stride] = values[j][0]; });
  }
};

// ---- the cells ----

// The cells of a step as they are stored: zeros where the step is not valid.
template <class Cell, class T, int kCount>
struct KeptCells {
  T gates[Cell::kGates][kCount];
  T c[kCellStates<Cell>][kCount];
  T output[kCount];
};

// The forward of a thread's cells, whose states stay in registers.
template <class Cell, class T, class Math, int kCount, class Access>
class ForwardCells {
 public:
  using Kept = KeptCells<Cell, T, kCount>;
  using Gates = float[Cell::kGates][kCount];

  OwnCells own;
  ValidSteps valid;
  float h[kCount] = {};

  __device__ ForwardCells(const SequenceForward<Cell, T>& in, const OwnCells& own, const Access& access)
      : own(own), valid(in.steps, own.count > 0 ? in.steps.length(own.sample) : 0, false), in_(in), access_(access) {
    unrolled<kCount>([&](int i) {
      if (i >= own.count) return;
      h[i] = load(in.h_0[own.state + i]);
      unrolled<kStates>([&](int k) { number_of(c_[i], k) = load(in.c_0[cell(own.state, k) + i]); });
      unrolled<Cell::kGates>([&](int j) { bias_[j][i] = in.bias(j, own.unit + i); });
    });
  }

  // Issues the loads of a step's input GEMM results, `ahead` steps from here or at `from`, if the step is valid.
  __device__ void fetch(int step, int ahead) { fetch(step, in_.input_gates + own.place(Cell::kInput, ahead)); }
  __device__ void fetch(int step, const float* from) {
    access_.template load<float, kCount, Cell::kInput>(valid(step), next_, from, in_.steps.state_size);
    if constexpr (Access::kAhead > 0) {
      const float* const far = from + Access::kAhead * Cell::kInput * own.advance;
      unrolled<Cell::kInput>([&](int j) { prefetch_if(valid(step + Access::kAhead), far + j * in_.steps.state_size); });
    }
  }

  // The pre-activations without their recurrent part.
  __device__ void begin_sums(Gates& sums) const {
    unrolled<Cell::kGates>([&](int j) {
      float input_gates[kCount] = {};
      if (j < Cell::kInput) unpack<float, kCount>(input_gates, next_[input_place<Cell>(j)]);
      unrolled<kCount>([&](int i) { sums[j][i] = j < Cell::kInput ? input_gates[i] + bias_[j][i] : bias_[j][i]; });
    });
  }

  // The same, added to sums that hold the recurrent part. `biases` are those of the unit, `stride` apart; they are read
  // again at each step and take no registers.
  __device__ void end_sums(Gates& sums, const float* biases, int stride) const {
    static_assert(kCount == 1);
    unrolled<Cell::kGates>([&](int j) {
      float input_gate[1] = {};
      if (j < Cell::kInput) unpack<float, 1>(input_gate, next_[input_place<Cell>(j)]);
      sums[j][0] = sums[j][0] + input_gate[0] + biases[j * stride];
    });
  }

  // Computes the cells of a step. Their states change only at valid steps; before a sample's first valid step they are
  // its initial states.
  __device__ Kept compute(const Gates& sums, int step) {
    const bool is_valid = valid(step);
    Kept kept;
    unrolled<kCount>([&](int i) {
      float gates[Cell::kGates];
      unrolled<Cell::kGates>([&](int j) {
        store(kept.gates[j][i], is_valid ? sums[j][i] : 0.f);
        gates[j] = load(kept.gates[j][i]);  // as the backward will see it
      });
      const auto state = cell_forward<Cell, Math>(gates, c_[i]);
      store(kept.output[i], is_valid ? state.h : 0.f);
      unrolled<kStates>([&](int k) {
        const float saved_c = number_of(state.saved_c, k);
        store(kept.c[k][i], is_valid ? saved_c : 0.f);
      });
      if (is_valid) {
        h[i] = load(kept.output[i]);
        c_[i] = state.c;
      }
    });
    return kept;
  }

  __device__ void write(const Kept& kept) const {
    write(kept, in_.gates + own.place(Cell::kGates), in_.cells + own.place(1), in_.output + own.place(1));
  }
  __device__ void write(const Kept& kept, T* gates, T* cells, T* output) const {
    access_.template store<T, kCount, Cell::kGates>(in_.is_training(), gates, in_.steps.state_size, kept.gates);
    T* const to = kStates == 1 ? cells : in_.cells + cell(cells - in_.cells, 0);
    access_.template store<T, kCount, kStates>(in_.is_training(), to, in_.steps.state_size, kept.c);
    access_.template store<T, kCount, 1>(true, output, 0, &kept.output);
  }

  __device__ void write_last_states() const {
    unrolled<kCount>([&](int i) {
      if (i >= own.count) return;
      store(in_.h_n[own.state + i], h[i]);
      unrolled<kStates>([&](int k) { store(in_.c_n[cell(own.state, k) + i], number_of(c_[i], k)); });
    });
  }

 private:
  static constexpr int kStates = kCellStates<Cell>;

  __device__ int64_t cell(int64_t at, int number) const {
    return own.template cell<Cell>(at, in_.steps.state_size, number);
  }

  const SequenceForward<Cell, T>& in_;
  Access access_;
  StatesOf<Cell, float> c_[kCount] = {};
  float bias_[Cell::kGates][kCount] = {};
  Packed<float, kCount> next_[Cell::kInput] = {};  // results of the input GEMM, loading since the step before
};

// The backward of a thread's cells.
template <class Cell, class T, class Math, int kCount, class Access>
class BackwardCells {
 public:
  using Gates = float[Cell::kGates][kCount];

  OwnCells own;
  ValidSteps valid;
  float grad_h[kCount] = {};

  __device__ BackwardCells(const SequenceBackward<Cell, T>& in, const OwnCells& own, const Access& access)
      : own(own), valid(in.steps, own.count > 0 ? in.steps.length(own.sample) : 0, true), in_(in), access_(access) {
    unrolled<kCount>([&](int i) {
      if (i >= own.count) return;
      grad_h[i] = load_if_present(in.grad_h_n, own.state + i);
      unrolled<kStates>(
          [&](int k) { number_of(grad_c_[i], k) = load_if_present(in.grad_c_n, cell(own.state, k) + i); });
    });
  }

  // Issues the loads of what the forward saved for a step, `ahead` steps from here, if the step is valid.
  __device__ void fetch(int step, int ahead) {
    fetch(step, in_.gates + own.place(Cell::kGates, ahead), own.place(1, ahead));
  }
  __device__ void fetch(int step, const T* gates, int64_t state) {
    const int state_size = in_.steps.state_size;
    const T* const saved_c = in_.cells + cell(state, 0);
    const T* const grad_output = in_.grad_output + state;
    access_.template load<T, kCount, Cell::kGates>(valid(step), gates_, gates, state_size);
    access_.template load<T, kCount, kStates>(valid(step), saved_c_, saved_c, state_size);
    if (in_.grad_output != nullptr) access_.template load<T, kCount, 1>(valid(step), &grad_output_, grad_output, 0);
    if constexpr (Access::kAhead > 0) {
      const bool wanted = valid(step + Access::kAhead);
      const int64_t far = Access::kAhead * own.advance;
      unrolled<Cell::kGates>([&](int j) { prefetch_if(wanted, gates + (far * Cell::kGates + j * state_size)); });
      unrolled<kStates>([&](int k) { prefetch_if(wanted, saved_c + (far * kStates + k * state_size)); });
      if (in_.grad_output != nullptr) prefetch_if(wanted, grad_output + far);
    }
  }

  // Computes the local derivatives, which do not need dL/dh, from what was fetched.
  __device__ void prepare() {
    T gates[Cell::kGates][kCount];
    T c[kStates][kCount];
    unrolled<Cell::kGates>([&](int j) { unpack<T, kCount>(gates[j], gates_[j]); });
    unrolled<kStates>([&](int k) { unpack<T, kCount>(c[k], saved_c_[k]); });
    unrolled<kCount>([&](int i) {
      float of_cell[Cell::kGates];
      unrolled<Cell::kGates>([&](int j) { of_cell[j] = load(gates[j][i]); });
      StatesOf<Cell, float> saved_c;
      unrolled<kStates>([&](int k) { number_of(saved_c, k) = load(c[k][i]); });
      derivatives_[i] = local_derivatives<Cell, Math>(of_cell, saved_c);
    });
    upstream_ = grad_output_;
  }

  // The gradients of a step's gates; zero if the step is not valid.
  __device__ void compute(Gates& gradients, int step) {
    T of_output[kCount];
    unpack<T, kCount>(of_output, upstream_);
    unrolled<kCount>([&](int i) {
      float of_cell[Cell::kGates];
      StatesOf<Cell, float> grad_c = grad_c_[i];
      apply_local_derivatives(derivatives_[i], grad_h[i] + load(of_output[i]), grad_c, of_cell);
      if (valid(step)) grad_c_[i] = grad_c;
      unrolled<Cell::kGates>([&](int j) { gradients[j][i] = valid(step) ? of_cell[j] : 0.f; });
    });
  }

  __device__ void write(const Gates& gradients) const { write(gradients, in_.grad_gates + own.place(Cell::kGates)); }
  __device__ void write(const Gates& gradients, T* to) const {
    T rounded[Cell::kGates][kCount];
    unrolled<Cell::kGates>([&](int j) { unrolled<kCount>([&](int i) { store(rounded[j][i], gradients[j][i]); }); });
    access_.template store<T, kCount, Cell::kGates>(true, to, in_.steps.state_size, rounded);
  }

  __device__ void write_first_states() const {
    unrolled<kCount>([&](int i) {
      if (i >= own.count) return;
      store(in_.grad_h_0[own.state + i], grad_h[i]);
      unrolled<kStates>([&](int k) { store(in_.grad_c_0[cell(own.state, k) + i], number_of(grad_c_[i], k)); });
    });
  }

 private:
  static constexpr int kStates = kCellStates<Cell>;

  __device__ int64_t cell(int64_t at, int number) const {
    return own.template cell<Cell>(at, in_.steps.state_size, number);
  }

  const SequenceBackward<Cell, T>& in_;
  Access access_;
  StatesOf<Cell, float> grad_c_[kCount] = {};
  Packed<T, kCount> gates_[Cell::kGates] = {};
  Packed<T, kCount> saved_c_[kStates] = {};
  Packed<T, kCount> grad_output_{};
  Packed<T, kCount> upstream_{};  // of the step whose local derivatives are in derivatives_
  DerivativesOf<Cell, Math, float> derivatives_[kCount];
};

}  // namespace extops::cuda
