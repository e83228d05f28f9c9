// A cell (../../cells/cell.h) over whole sequences. The rows of a batch do not depend on each other, so that a slice of
// them runs through all steps without waiting for another; the recurrent weights are packed once for all of them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "../sequence.h"
#include "math.h"
#include "vectorize.h"

namespace extops::cpu {

template <class C, int kBytes>
struct alignas(kBytes) Vector {
  using Number = C;
  static constexpr int kLanes = kBytes / sizeof(C);
  C at[kLanes];
};

// The library's own allocator calls an operator new for wide alignments, which older C++ libraries lack.
template <class V>
struct AlignedAllocator {
  using value_type = V;

  V* allocate(size_t count) {
    void* const memory = std::aligned_alloc(alignof(V), std::max<size_t>(count, 1) * sizeof(V));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<V*>(memory);
  }
  void deallocate(V* memory, size_t) { std::free(memory); }

  friend bool operator==(const AlignedAllocator&, const AlignedAllocator&) { return true; }
  friend bool operator!=(const AlignedAllocator&, const AlignedAllocator&) { return false; }
};

template <class V>
using Vectors = std::vector<V, AlignedAllocator<V>>;

template <class T, class C>
[[gnu::always_inline]] inline void load_row(const T* __restrict from, C* __restrict to, int64_t count) {
  for (int64_t j = 0; j < count; ++j) to[j] = load(from[j]);
}

template <class T, class C>
[[gnu::always_inline]] inline void store_row(const C* __restrict from, T* __restrict to, int64_t count) {
  for (int64_t j = 0; j < count; ++j) store(to[j], from[j]);
}

// The operands of to[r * to_stride + v * v_stride] = sum over d of a[r * a_stride + d] * b[d * kVectors + v].
template <int kVectors, class C, int kBytes>
struct Gemm {
  int64_t rows;
  int64_t depth;
  const C* a;
  int64_t a_stride;
  const Vector<C, kBytes>* b;
  Vector<C, kBytes>* to;
  int64_t to_stride;
  int64_t v_stride;

  [[gnu::always_inline]] inline void operator()() const;
};

// The terms [begin, end) of kRows rows, added to those before.
template <int kRows, int kVectors, class C, int kBytes>
[[gnu::always_inline]] inline void multiply_tile(
    const Gemm<kVectors, C, kBytes>& gemm, int64_t row, int64_t begin, int64_t end) {
  typedef C V __attribute__((vector_size(kBytes), may_alias));
  const C* const a = gemm.a + row * gemm.a_stride;
  V sums[kRows][kVectors] = {};
  for (int64_t d = begin; d < end; ++d) {
    const V* values = reinterpret_cast<const V*>(gemm.b + d * kVectors);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const C factor = a[r * gemm.a_stride + d];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] += factor * values[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      V& total = *reinterpret_cast<V*>(gemm.to + (row + r) * gemm.to_stride + v * gemm.v_stride);
      total = begin == 0 ? sums[r][v] : total + sums[r][v];
    }
  }
}

template <int kRows, int kVectors, class C, int kBytes>
[[gnu::always_inline]] inline void multiply_tiles(
    const Gemm<kVectors, C, kBytes>& gemm, int64_t row, int64_t begin, int64_t end) {
  for (; row + kRows <= gemm.rows; row += kRows) multiply_tile<kRows>(gemm, row, begin, end);
  if constexpr (kRows > 1) multiply_tiles<kRows / 2>(gemm, row, begin, end);
}

// How many rows of sums, a line of `b` and a factor stay in registers.
constexpr int most_rows(int vectors, int bytes) {
  const int registers = bytes == 64 ? 32 : 16;
  int rows = 1;
  while (2 * rows * vectors + vectors + 1 <= registers) rows *= 2;
  return rows;
}

// All rows pass through as many lines of `b` as stay in the L1 cache before the next ones. The sums of those lines are
// added up, so that the error of long sums stays small, and in the same order for each row, in a tile of any size.
template <int kVectors, class C, int kBytes>
inline void Gemm<kVectors, C, kBytes>::operator()() const {
  constexpr int kMostRows = most_rows(kVectors, kBytes);
  constexpr int64_t kTerms = 128;
  for (int64_t first = 0; first < depth; first += kTerms) {
    multiply_tiles<kMostRows>(*this, 0, first, std::min(first + kTerms, depth));
  }
}

// A sample of the batch, and how many of its steps are valid.
struct Row {
  int64_t sample;
  int64_t length;
};

// The rows of a slice, the longest first, so that rows for which a step is valid come before the others.
inline std::vector<Row> longest_first(int64_t time, const int64_t* lengths, int64_t begin, int64_t end) {
  std::vector<Row> rows;
  for (int64_t sample = begin; sample < end; ++sample) {
    rows.push_back({sample, lengths == nullptr ? time : std::clamp<int64_t>(lengths[sample], 0, time)});
  }
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.length > b.length; });
  return rows;
}

// The steps of a call, in the order of computation: all, or the one that the sizes name.
struct StepRange {
  int64_t first;
  int64_t end;

  StepRange(const SequenceSizes& sizes, bool is_single)
      : first(is_single ? sizes.step : 0), end(is_single ? sizes.step + 1 : sizes.time) {}
};

// What forward and backward share.
template <class T, int kBytes>
struct Slice {
  using C = typename Compute<T>::type;
  using Vec = Vector<C, kBytes>;
  static constexpr int kLanes = Vec::kLanes;

  const SequenceSizes& sizes;
  int64_t units;    // in a row
  int64_t vectors;  // that hold them, the last one padded with zeros
  std::vector<Row> rows;

  Slice(const SequenceSizes& sizes, const int64_t* lengths, int64_t begin, int64_t end, int64_t group)
      : sizes(sizes),
        units(sizes.state_size),
        vectors((units + group * kLanes - 1) / (group * kLanes) * group),
        rows(longest_first(sizes.time, lengths, begin, end)) {}

  int64_t count_rows(int64_t t) const {
    return std::partition_point(rows.begin(), rows.end(), [t](const Row& row) { return row.length > t; }) -
           rows.begin();
  }

  int64_t offset(int64_t t, const Row& row) const { return t * sizes.time_stride + row.sample * sizes.batch_stride; }

  // A state of [batch, kCount, units], or zeros, by the slice's rows.
  template <int kCount = 1>
  [[gnu::always_inline]] Vectors<Vec> load_state(const void* from) const {
    Vectors<Vec> state(rows.size() * kCount * vectors);
    for (size_t r = 0; from != nullptr && r < rows.size(); ++r) {
      for (int k = 0; k < kCount; ++k) {
        const int64_t row = rows[r].sample * kCount + k;
        load_row(static_cast<const T*>(from) + row * units, state[(r * kCount + k) * vectors].at, units);
      }
    }
    return state;
  }

  template <int kCount = 1>
  [[gnu::always_inline]] void store_state(const Vectors<Vec>& state, void* to) const {
    for (size_t r = 0; r < rows.size(); ++r) {
      for (int k = 0; k < kCount; ++k) {
        const int64_t row = rows[r].sample * kCount + k;
        store_row(state[(r * kCount + k) * vectors].at, static_cast<T*>(to) + row * units, units);
      }
    }
  }

  // Zeros for the steps that are not valid, in a tensor of [time, batch, width].
  void clear_padding(void* tensor, int64_t width) const {
    for (const Row& row : rows) {
      for (int64_t t = row.length; t < sizes.time; ++t) {
        std::fill_n(static_cast<T*>(tensor) + offset(t, row) * width, width, T{});
      }
    }
  }
};

// Vectors of units in a tile of a GEMM.
template <bool kIsBackward>
constexpr int kVectorsOfTile = kIsBackward ? 2 : 1;

// The recurrent weights as GEMMs read them: forward [vectors of units, units, kRecurrent], backward
// [tiles of units, kRecurrent * units, vectors of a tile].
template <class Cell, class T, int kBytes, bool kIsBackward>
class PackedWeights {
 public:
  using Vec = Vector<typename Compute<T>::type, kBytes>;

  // Those at `packed`, or its own if that is null; none without weights.
  [[gnu::always_inline]] PackedWeights(const SequenceSizes& sizes, const void* weights, const void* packed)
      : own_(weights == nullptr || packed != nullptr ? 0 : count(sizes)),
        data_(packed == nullptr ? own_.data() : static_cast<const Vec*>(packed)) {
    if (!own_.empty()) pack(sizes, static_cast<const T*>(weights), own_.data(), 0, sizes.state_size);
  }
  PackedWeights(const PackedWeights&) = delete;

  const Vec* data() const { return data_; }

  static int64_t count(const SequenceSizes& sizes) {
    const int64_t tiles = (sizes.state_size + kTileUnits - 1) / kTileUnits;
    return tiles * kVectorsOfTile<kIsBackward> * Cell::kRecurrent * sizes.state_size;
  }

  // Packs those of the tiles that begin in [begin, end).
  [[gnu::always_inline]] static void pack(
      const SequenceSizes& sizes, const T* weights, Vec* to, int64_t begin, int64_t end) {
    const int64_t units = sizes.state_size;
    for (int64_t unit = (begin + kTileUnits - 1) / kTileUnits * kTileUnits; unit < end; unit += kTileUnits) {
      const int64_t lines = std::min<int64_t>(kTileUnits, units - unit);
      Vec* const tile = to + unit / Vec::kLanes * Cell::kRecurrent * units;
      if constexpr (kIsBackward) {
        for (int64_t d = 0; d < Cell::kRecurrent * units; ++d) {
          typename Vec::Number* const line = tile[d * kVectorsOfTile<true>].at;
          load_row(weights + d * sizes.weights_stride + unit, line, lines);
          std::fill(line + lines, line + kTileUnits, 0);
        }
      } else {
        for (int64_t gate = 0; gate < Cell::kRecurrent; ++gate) {
          transpose(sizes, weights + (gate * units + unit) * sizes.weights_stride, tile + gate, lines);
        }
      }
    }
  }

 private:
  static constexpr int64_t kTileUnits = kVectorsOfTile<kIsBackward> * Vec::kLanes;

  // `lines` of weights into lanes. A cache line of each at a time: those that are written stay in the L1 cache until
  // they are full.
  [[gnu::always_inline]] static void transpose(const SequenceSizes& sizes, const T* from, Vec* to, int64_t lines) {
    for (int64_t first = 0; first < sizes.state_size; first += Vec::kLanes) {
      const int64_t end = std::min<int64_t>(first + Vec::kLanes, sizes.state_size);
      for (int64_t line = 0; line < Vec::kLanes; ++line) {
        const T* const weights = from + line * sizes.weights_stride;
        for (int64_t k = first; k < end; ++k) to[k * Cell::kRecurrent].at[line] = line < lines ? load(weights[k]) : 0;
      }
    }
  }

  Vectors<Vec> own_;
  const Vec* data_;
};

// The pre-activations of unit j, from rows of `stride` units each.
template <class Cell, class C, int... kGate>
[[gnu::always_inline]] inline void load_gates(
    const C* from, int64_t stride, C (&to)[Cell::kGates], std::integer_sequence<int, kGate...>) {
  ((to[kGate] = from[kGate * stride]), ...);
}

template <class Cell, class C, int... kGate>
[[gnu::always_inline]] inline void store_gates(
    const C (&from)[Cell::kGates], C* to, int64_t stride, std::integer_sequence<int, kGate...>) {
  ((to[kGate * stride] = from[kGate]), ...);
}

// The cell state of unit j, likewise.
template <class Cell, class C>
[[gnu::always_inline]] inline StatesOf<Cell, C> load_cell(const C* from, int64_t stride) {
  StatesOf<Cell, C> c;
  for (int k = 0; k < kCellStates<Cell>; ++k) number_of(c, k) = from[k * stride];
  return c;
}

template <class Cell, class C>
[[gnu::always_inline]] inline void store_cell(const StatesOf<Cell, C>& c, C* to, int64_t stride) {
  for (int k = 0; k < kCellStates<Cell>; ++k) to[k * stride] = number_of(c, k);
}

template <class Cell, class C, int kGate = 0, class Between>
[[gnu::always_inline]] inline void activate_rows(C* rows, int64_t padded, const Between& between) {
  between(kGate);
#pragma GCC ivdep
  for (int64_t j = 0; j < padded; ++j) rows[j] = Cell::template activate<Math, kGate>(rows[j]);
  if constexpr (kGate + 1 < Cell::kGates) activate_rows<Cell, C, kGate + 1>(rows + padded, padded, between);
}

// A row's new state from its pre-activations. Each loop computes one function: in a long dependency chain the CPU would
// wait for each result.
template <class Cell, class C, int kBytes>
struct Advance {
  int64_t units;
  int64_t vectors;  // that hold them
  C* gates;
  C* cells;
  C* h;
  const C* next_input_gates;

  [[gnu::always_inline]] void operator()() const {
    constexpr auto kAll = std::make_integer_sequence<int, Cell::kGates>();
    const int64_t padded = vectors * Vector<C, kBytes>::kLanes;
    activate_rows<Cell>(gates, padded, [&](int gate) __attribute__((always_inline)) { prefetch_input_gates(gate); });
#pragma GCC ivdep
    for (int64_t j = 0; j < padded; ++j) {
      C a[Cell::kGates];
      load_gates<Cell>(gates + j, padded, a, kAll);
      store_cell<Cell>(Cell::template new_c<Math>(a, load_cell<Cell>(cells + j, padded)), cells + j, padded);
    }
#pragma GCC ivdep
    for (int64_t j = 0; j < padded; ++j) {
      C a[Cell::kGates];
      load_gates<Cell>(gates + j, padded, a, kAll);
      h[j] = Cell::template output<Math>(a, load_cell<Cell>(cells + j, padded));
    }
  }

  // The next step's input part of one pre-activation. Not of all at once: the CPU stalls when too many cache lines are
  // under way. Beyond the last step the address is invalid, which a prefetch ignores.
  [[gnu::always_inline]] void prefetch_input_gates(int gate) const {
    if (gate >= Cell::kInput) return;
    constexpr int64_t kCacheLine = 64;
    const C* const input_gates = next_input_gates + gate * units;
    for (int64_t j = 0; j < units; j += kCacheLine / sizeof(C)) __builtin_prefetch(input_gates + j);
  }
};

// The gradients of a row's pre-activations, in their place, and of its state before.
template <class Cell, class C, int kBytes>
struct Retreat {
  int64_t vectors;
  C* gates;
  C* saved_c;
  C* squashed;
  C* grad_h;
  C* grad_cells;

  [[gnu::always_inline]] void operator()() const {
    constexpr auto kAll = std::make_integer_sequence<int, Cell::kGates>();
    const int64_t padded = vectors * Vector<C, kBytes>::kLanes;
    activate_rows<Cell>(gates, padded, [](int) __attribute__((always_inline)) {});
    if constexpr (kCellStates<Cell> > 1) {
#pragma GCC ivdep
      for (int64_t j = 0; j < padded; ++j) {
        C a[Cell::kGates], gradients[Cell::kGates];
        load_gates<Cell>(gates + j, padded, a, kAll);
        const StatesOf<Cell, C> old_c = load_cell<Cell>(saved_c + j, padded);
        const StatesOf<Cell, C> grad_c = load_cell<Cell>(grad_cells + j, padded);
        store_cell<Cell>(
            activated_backward<Cell, Math>(a, old_c, grad_h[j], grad_c, gradients), grad_cells + j, padded);
        store_gates<Cell>(gradients, gates + j, padded, kAll);
      }
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < padded; ++j) {
        C a[Cell::kGates];
        load_gates<Cell>(gates + j, padded, a, kAll);
        squashed[j] = Cell::template squash<Math>(a, saved_c[j]);
      }
#pragma GCC ivdep
      for (int64_t j = 0; j < padded; ++j) {
        C a[Cell::kGates], gradients[Cell::kGates];
        load_gates<Cell>(gates + j, padded, a, kAll);
        const C grad_c = grad_cells[j] + to_c<Cell, Math>(grad_h[j], a, squashed[j]);
        Cell::template to_gates<Math>(grad_h[j], grad_c, a, saved_c[j], squashed[j], gradients);
        store_gates<Cell>(gradients, gates + j, padded, kAll);
        grad_cells[j] = to_old_c<Cell, Math>(grad_c, a, saved_c[j]);
      }
    }
  }
};

template <class Cell, class T, int kBytes>
class Forward {
 public:
  [[gnu::always_inline]] Forward(const SequenceArguments& in, int64_t begin, int64_t end)
      : in_(in),
        slice_(in.sizes, in.lengths, begin, end, kVectorsOfTile<false>),
        steps_(in.sizes, in.recurrent != nullptr),
        weights_(in.sizes, in.recurrent == nullptr ? in.weights_h : nullptr, in.workspace),
        bias_(slice_.vectors * Cell::kGates),
        unkept_(in.gates == nullptr ? kStates * slice_.units : 0),
        gates_(slice_.rows.size() * slice_.vectors * Cell::kGates),
        h_(slice_.load_state(steps_.first > 0 ? in.h_n : in.h_0)),
        cells_(slice_.template load_state<kStates>(steps_.first > 0 ? in.c_n : in.c_0)) {
    const int64_t units = slice_.units;
    for (int64_t gate = 0; gate < Cell::kGates; ++gate) {
      C* const bias = bias_[gate * slice_.vectors].at;
      if (gate < Cell::kInput && in.bias_x != nullptr) {
        load_row(static_cast<const T*>(in.bias_x) + input_place<Cell>(gate) * units, bias, units);
      }
      if (gate < kFirstRecurrent<Cell> || in.bias_h == nullptr) continue;
      const T* const bias_h = static_cast<const T*>(in.bias_h) + (gate - kFirstRecurrent<Cell>)*units;
      for (int64_t unit = 0; unit < units; ++unit) bias[unit] += load(bias_h[unit]);
    }
  }

  [[gnu::always_inline]] void run() {
    for (int64_t step = steps_.first; step < steps_.end; ++step) {
      const int64_t t = in_.sizes.reverse ? in_.sizes.time - 1 - step : step;
      const int64_t count = slice_.count_rows(t);
      for (int64_t v = 0; v < slice_.vectors && in_.recurrent == nullptr; ++v) {
        run_with_width<kBytes>(Gemm<Cell::kRecurrent, C, kBytes>{
            count, slice_.units, h_[0].at, slice_.vectors * kLanes,
            weights_.data() + v * slice_.units * Cell::kRecurrent, &gates_[kFirstRecurrent<Cell> * slice_.vectors + v],
            slice_.vectors * Cell::kGates, slice_.vectors});
      }
      if (in_.recurrent != nullptr) load_recurrent();
      for (int64_t r = 0; r < count; ++r) update(t, r);
    }
    slice_.clear_padding(in_.output, slice_.units);
    if (in_.gates != nullptr) {
      slice_.clear_padding(in_.gates, Cell::kGates * slice_.units);
      slice_.clear_padding(in_.cells, kStates * slice_.units);
    }
    slice_.store_state(h_, in_.h_n);
    slice_.template store_state<kStates>(cells_, in_.c_n);
  }

 private:
  using C = typename Compute<T>::type;
  using Vec = Vector<C, kBytes>;
  static constexpr int kLanes = Vec::kLanes;
  static constexpr int kStates = kCellStates<Cell>;
  static constexpr auto kAll = std::make_integer_sequence<int, Cell::kGates>();

  [[gnu::always_inline]] void load_recurrent() {
    for (size_t r = 0; r < slice_.rows.size(); ++r) {
      for (int64_t gate = 0; gate < Cell::kRecurrent; ++gate) {
        load_row(
            static_cast<const C*>(in_.recurrent) + (slice_.rows[r].sample * Cell::kRecurrent + gate) * slice_.units,
            gates_[(r * Cell::kGates + kFirstRecurrent<Cell> + gate) * slice_.vectors].at, slice_.units);
      }
    }
  }

  // Where to write a row of what is kept for a backward.
  T* kept(void* rows, int64_t offset) { return rows == nullptr ? unkept_.data() : static_cast<T*>(rows) + offset; }

  [[gnu::always_inline]] void update(int64_t t, int64_t r) {
    const int64_t units = slice_.units;
    const int64_t padded = slice_.vectors * kLanes;
    const int64_t row = slice_.offset(t, slice_.rows[r]);
    C* const gates = gates_[r * slice_.vectors * Cell::kGates].at;
    add_up(row, gates, padded, kAll);
    C* const cells = cells_[r * kStates * slice_.vectors].at;
    C* const h = h_[r * slice_.vectors].at;
    const int64_t next = slice_.offset(in_.sizes.reverse ? t - 1 : t + 1, slice_.rows[r]);
    T* const saved_c = kept(in_.cells, row * kStates * units);
    for (int k = 0; k < kStates && !Cell::kSavesNewC; ++k) store_row(cells + k * padded, saved_c + k * units, units);
    run_with_width<kBytes>(Advance<Cell, C, kBytes>{
        units, slice_.vectors, gates, cells, h, static_cast<const C*>(in_.input_gates) + next * Cell::kInput * units});
    if constexpr (Cell::kSavesNewC) store_row(cells, saved_c, units);
    store_row(h, static_cast<T*>(in_.output) + row * units, units);
    if constexpr (!std::is_same_v<T, C>) load_row(static_cast<const T*>(in_.output) + row * units, h, units);
  }

  // Adds up the parts of the pre-activations, rounded as the backward will see them.
  template <int... kGate>
  [[gnu::always_inline]] void add_up(int64_t row, C* gates, int64_t padded, std::integer_sequence<int, kGate...>) {
    (add_up<kGate>(row, gates + kGate * padded), ...);
  }

  template <int kGate>
  [[gnu::always_inline]] void add_up(int64_t row, C* sums) {
    const int64_t units = slice_.units;
    const C* const input_gates =
        static_cast<const C*>(in_.input_gates) + (row * Cell::kInput + input_place<Cell>(kGate)) * units;
    const C* const bias = bias_[kGate * slice_.vectors].at;
    T* const to = kept(in_.gates, (row * Cell::kGates + kGate) * units);
#pragma GCC ivdep
    for (int64_t j = 0; j < units; ++j) {
      C sum = bias[j];
      if constexpr (kGate < Cell::kInput) sum = input_gates[j] + sum;
      if constexpr (kGate >= kFirstRecurrent<Cell>) sum = sum + sums[j];
      store(to[j], sum);
      sums[j] = load(to[j]);
    }
  }

  const SequenceArguments& in_;
  Slice<T, kBytes> slice_;
  StepRange steps_;
  PackedWeights<Cell, T, kBytes, false> weights_;
  Vectors<Vec> bias_;      // [kGates, vectors of units]
  std::vector<T> unkept_;  // a row of what no backward reads
  Vectors<Vec> gates_;     // [rows, kGates, vectors of units]
  Vectors<Vec> h_;         // [rows, vectors of units]
  Vectors<Vec> cells_;
};

template <class Cell, class T, int kBytes>
class Backward {
 public:
  [[gnu::always_inline]] Backward(const SequenceBackwardArguments& in, int64_t begin, int64_t end)
      : in_(in),
        slice_(in.sizes, in.lengths, begin, end, kGroup),
        steps_(in.sizes, in.weights_h == nullptr),
        weights_(in.sizes, in.weights_h, in.workspace),
        row_(slice_.vectors * (Cell::kGates + kStates + 1)),
        grad_gates_(slice_.rows.size() * depth()),
        grad_h_(slice_.load_state(steps_.first > 0 ? in.grad_h_0 : in.grad_h_n)),
        grad_cells_(slice_.template load_state<kStates>(steps_.first > 0 ? in.grad_c_0 : in.grad_c_n)) {}

  [[gnu::always_inline]] void run() {
    for (int64_t step = steps_.first; step < steps_.end; ++step) {
      const int64_t t = in_.sizes.reverse ? step : in_.sizes.time - 1 - step;
      const int64_t count = slice_.count_rows(t);
      for (int64_t r = 0; r < count; ++r) update(t, r);
      for (int64_t v = 0; v < slice_.vectors && in_.weights_h != nullptr; v += kGroup) {
        run_with_width<kBytes>(Gemm<kGroup, C, kBytes>{
            count, depth(), grad_gates_.data(), depth(), weights_.data() + v * depth(), &grad_h_[v], slice_.vectors,
            1});
      }
    }
    slice_.clear_padding(in_.grad_gates, Cell::kGates * slice_.units);
    slice_.store_state(grad_h_, in_.grad_h_0);
    slice_.template store_state<kStates>(grad_cells_, in_.grad_c_0);
  }

 private:
  using C = typename Compute<T>::type;
  using Vec = Vector<C, kBytes>;
  static constexpr int kLanes = Vec::kLanes;
  static constexpr int kStates = kCellStates<Cell>;
  static constexpr int kGroup = kVectorsOfTile<true>;

  int64_t depth() const { return Cell::kRecurrent * slice_.units; }

  [[gnu::always_inline]] void update(int64_t t, int64_t r) {
    const int64_t units = slice_.units;
    const int64_t padded = slice_.vectors * kLanes;
    const int64_t row = slice_.offset(t, slice_.rows[r]);
    C* const gates = row_[0].at;
    C* const saved_c = gates + Cell::kGates * padded;
    C* const squashed = saved_c + kStates * padded;
    C* const grad_h = grad_h_[r * slice_.vectors].at;
    C* const grad_cells = grad_cells_[r * kStates * slice_.vectors].at;
    const T* const saved_gates = static_cast<const T*>(in_.gates) + row * Cell::kGates * units;
    for (int64_t k = 0; k < Cell::kGates; ++k) load_row(saved_gates + k * units, gates + k * padded, units);
    const T* const cells = static_cast<const T*>(in_.cells) + row * kStates * units;
    for (int k = 0; k < kStates; ++k) load_row(cells + k * units, saved_c + k * padded, units);
    if (in_.grad_output != nullptr) {
      const T* const grad_output = static_cast<const T*>(in_.grad_output) + row * units;
#pragma GCC ivdep
      for (int64_t j = 0; j < units; ++j) grad_h[j] += load(grad_output[j]);
    }
    run_with_width<kBytes>(Retreat<Cell, C, kBytes>{slice_.vectors, gates, saved_c, squashed, grad_h, grad_cells});
    T* const grad_gates = static_cast<T*>(in_.grad_gates) + row * Cell::kGates * units;
    for (int64_t k = 0; k < Cell::kGates; ++k) store_row(gates + k * padded, grad_gates + k * units, units);
    load_row(grad_gates + (Cell::kGates - Cell::kRecurrent) * units, &grad_gates_[r * depth()], depth());
  }

  const SequenceBackwardArguments& in_;
  Slice<T, kBytes> slice_;
  StepRange steps_;
  PackedWeights<Cell, T, kBytes, true> weights_;
  Vectors<Vec> row_;           // gates or their gradients, saved_c, squashed: [kGates + kStates + 1, vectors of units]
  std::vector<C> grad_gates_;  // of the recurrent ones: [rows, depth]
  Vectors<Vec> grad_h_;        // [rows, vectors of units]
  Vectors<Vec> grad_cells_;
};

template <class Cell, template <class, class, int> class Direction, class Arguments>
Error run(ScalarType dtype, const Arguments& arguments, int64_t begin, int64_t end) {
  return dispatch(dtype, [&](auto scalar) -> Error {
    if (begin >= end || arguments.sizes.state_size == 0) return nullptr;
    return try_vectorize_with_width([&](auto bytes) __attribute__((always_inline)) {
      Direction<Cell, decltype(scalar), bytes>(arguments, begin, end).run();
    });
  });
}

// The bytes of packed weights, or the packing of some units into `packed`, if that is given.
template <class Cell, bool kIsBackward>
Error pack(
    ScalarType dtype, const SequenceSizes& sizes, const void* weights, void* packed, int64_t& bytes, int64_t begin,
    int64_t end) {
  return dispatch(dtype, [&](auto scalar) -> Error {
    return try_vectorize_with_width([&](auto width) __attribute__((always_inline)) {
      using T = decltype(scalar);
      using Packed = PackedWeights<Cell, T, width, kIsBackward>;
      using Vec = typename Packed::Vec;
      bytes = Packed::count(sizes) * static_cast<int64_t>(sizeof(Vec));
      if (packed != nullptr) {
        Packed::pack(sizes, static_cast<const T*>(weights), static_cast<Vec*>(packed), begin, end);
      }
    });
  });
}

// Defines the entry points of a cell.
#define EXTOPS_DEFINE_SEQUENCE_CPU(cell, Cell)                                                          \
  Error extops_##cell##_sequence_cpu(                                                                   \
      ScalarType dtype, const SequenceArguments& arguments, int64_t begin, int64_t end) {               \
    return extops::cpu::run<Cell, extops::cpu::Forward>(dtype, arguments, begin, end);                  \
  }                                                                                                     \
                                                                                                        \
  Error extops_##cell##_sequence_backward_cpu(                                                          \
      ScalarType dtype, const SequenceBackwardArguments& arguments, int64_t begin, int64_t end) {       \
    return extops::cpu::run<Cell, extops::cpu::Backward>(dtype, arguments, begin, end);                 \
  }                                                                                                     \
                                                                                                        \
  Error extops_##cell##_sequence_pack_cpu(                                                              \
      ScalarType dtype, const SequenceSizes& sizes, bool backward, const void* weights_h, void* packed, \
      int64_t& bytes, int64_t begin, int64_t end) {                                                     \
    const auto pack = backward ? &extops::cpu::pack<Cell, true> : &extops::cpu::pack<Cell, false>;      \
    return pack(dtype, sizes, weights_h, packed, bytes, begin, end);                                    \
  }

}  // namespace extops::cpu
