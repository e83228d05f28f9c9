// What the kernels of groups of blocks share: the counters by which blocks wait for each other, and the cells of a
// thread at one step of a tile of samples.
//
// A `Tile` says what is computed: Cell, T (the operands), CellMath, Arguments, kUnits of a block and kCells of a
// thread.
#pragma once

#include "tensor.cuh"

namespace extops::cuda {

constexpr int kCounterBytes = 128;  // one cache line each

#if defined(EXTOPS_TENSOR_CORES)

__device__ inline unsigned* counter_of(unsigned* counters, int64_t number) {
  return counters + number * (kCounterBytes / sizeof(unsigned));
}

__device__ inline void raise(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ inline void wait_for(const unsigned* counter, unsigned count) {
  unsigned seen = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < count);
}

// One of the cells that a thread computes at each step of a tile of `rows` samples.
template <class Tile>
struct OwnCell {
  int row;  // within the tile
  int column;
  int sample;
  int unit;
  int length;
  bool exists;

  __device__ OwnCell() {}
  __device__ OwnCell(const Steps& steps, int rows, int tile, int i) {
    const int item = i * Tile::kWorkers + static_cast<int>(threadIdx.x) % Tile::kWorkers;
    row = item / Tile::kUnits;
    column = item % Tile::kUnits;
    sample = tile * rows + row;
    unit = static_cast<int>(blockIdx.x) * Tile::kUnits + column;
    exists = row < rows && sample < steps.batch && unit < steps.state_size;
    length = exists ? steps.length(sample) : 0;
  }

  // How many cells a thread has at most, the same in all of them.
  __device__ static int count(int rows) { return (rows * Tile::kUnits + Tile::kWorkers - 1) / Tile::kWorkers; }
  // Whether number `i` is the first that no thread has. Asked at every second one, so that two are computed at a time.
  __device__ static bool are_all(int i, int count) { return i % 2 == 0 && i >= count; }

  __device__ int64_t state(const Steps& steps) const { return steps.state(sample, unit); }
};

// Calls put(cell, h) with the initial states of a tile's cells, and sets their cell state in `c`.
template <class Tile, class Put>
__device__ void start_forward(const typename Tile::Arguments& in, float* c, int rows, int tile, const Put& put) {
#pragma unroll 1
  for (int i = 0; i < Tile::kCells; ++i) {
    const OwnCell<Tile> cell(in.steps, rows, tile, i);
    if (!cell.exists) continue;
    const int64_t at = cell.state(in.steps);
    put(cell, in.h_0[at]);
    c[at] = load(in.c_0[at]);
    if (cell.length > 0) continue;
    in.h_n[at] = in.h_0[at];
    in.c_n[at] = in.c_0[at];
  }
}

// The cells of a thread at one step of the forward. What does not depend on other blocks is loaded at once, and not
// looked at before it is needed.
template <class Tile>
class ForwardStep {
  using T = typename Tile::T;
  using Cell = typename Tile::Cell;

 public:
  __device__ ForwardStep(const typename Tile::Arguments& in, float* c, int rows, int step, int tile)
      : in_(in), c_(c), t_(in.steps.time_of(step)), count_(OwnCell<Tile>::count(rows)) {
    const Steps& steps = in.steps;
    // Without a branch of its own for a cell, which would serialise their loads.
#pragma unroll
    for (int i = 0; i < Tile::kCells; ++i) {
      if (OwnCell<Tile>::are_all(i, count_)) break;
      const OwnCell<Tile>& cell = cells_[i] = {steps, rows, tile, i};
      const bool is_valid = cell.exists && t_ < cell.length;
      const float* const input_gates =
          in.input_gates + steps.row(t_, cell.sample) * Cell::kInput * steps.state_size + cell.unit;
#pragma unroll
      for (int g = 0; g < Cell::kInput; ++g) {
        inputs_[i][g] = is_valid ? input_gates[input_place<Cell>(g) * steps.state_size] : 0;
      }
      old_c_[i] = is_valid ? c[cell.state(steps)] : 0;
    }
  }

  // `recurrent`(i, g) is the recurrent part of gate number g of those that have one. Calls put(cell, h).
  template <class Recurrent, class Put>
  __device__ void compute(const float* biases, const Recurrent& recurrent, const Put& put) {
    // As above.
#pragma unroll
    for (int i = 0; i < Tile::kCells; ++i) {
      if (OwnCell<Tile>::are_all(i, count_)) break;
      float gates[Cell::kGates];
      unrolled<Cell::kGates>([&](int g) {
        float& sum = sums_[i][g] = biases[g * Tile::kUnits + cells_[i].column];
        if (g < Cell::kInput) sum += inputs_[i][g];
        if (g >= kFirstRecurrent<Cell>) sum += recurrent(i, g - kFirstRecurrent<Cell>);
        gates[g] = sum;
      });
      round_to<T>(gates);
      states_[i] = cell_forward<Cell, typename Tile::CellMath>(gates, old_c_[i]);
    }
#pragma unroll
    for (int i = 0; i < Tile::kCells; ++i) {
      if (OwnCell<Tile>::are_all(i, count_)) break;
      const OwnCell<Tile>& cell = cells_[i];
      if (!cell.exists) continue;
      if (t_ < cell.length) {
        T h;
        store(h, states_[i].h);
        put(cell, h);
      } else {
        // Before a sample's first valid step this is its initial state; after its last one nobody reads it.
        put(cell, in_.h_0[cell.state(in_.steps)]);
      }
    }
  }

  // Stores what the other blocks do not wait for.
  __device__ void write() const {
    const Steps& steps = in_.steps;
#pragma unroll
    for (int i = 0; i < Tile::kCells; ++i) {
      if (OwnCell<Tile>::are_all(i, count_)) break;
      const OwnCell<Tile>& cell = cells_[i];
      if (!cell.exists) continue;
      const int64_t place = steps.row(t_, cell.sample);
      if (t_ >= cell.length) {
        store_cell<Cell, T, float>(in_, place, cell.unit);
        continue;
      }
      store_cell(in_, place, cell.unit, sums_[i], states_[i]);
      const int64_t state = cell.state(steps);
      c_[state] = states_[i].c;
      if (t_ != steps.last_time(cell.length)) continue;
      store(in_.h_n[state], states_[i].h);
      store(in_.c_n[state], states_[i].c);
    }
  }

 private:
  const typename Tile::Arguments& in_;
  float* c_;
  int t_;
  int count_;
  OwnCell<Tile> cells_[Tile::kCells];
  float inputs_[Tile::kCells][Cell::kInput];
  float sums_[Tile::kCells][Cell::kGates];
  float old_c_[Tile::kCells];
  CellState<float> states_[Tile::kCells];
};

// The same in the backward, in whose order `step` is. After the last step it computes the gradients of the initial
// state.
template <class Tile>
class BackwardStep {
  using T = typename Tile::T;
  using Cell = typename Tile::Cell;

 public:
  // `c` holds the gradients of the cell state.
  __device__ BackwardStep(const typename Tile::Arguments& in, float* c, int rows, int step, int tile)
      : in_(in),
        c_(c),
        step_(step),
        t_(step < in.steps.time ? in.steps.time_of(in.steps.time - 1 - step) : -1),
        count_(OwnCell<Tile>::count(rows)) {
    const Steps& steps = in.steps;
    T zero;
    store(zero, 0);
    T gates[Tile::kCells][Cell::kGates], saved_c[Tile::kCells], grad_h[Tile::kCells][2];
#pragma unroll
    for (int i = 0; i < Tile::kCells; ++i) {
      if (OwnCell<Tile>::are_all(i, count_)) break;
      const OwnCell<Tile>& cell = cells_[i] = {steps, rows, tile, i};
      const bool is_valid = this->is_valid(cell);
      const int64_t state = cell.state(steps);
      const int64_t place = steps.row(t_, cell.sample) * steps.state_size;
      const T* const from = in.gates + place * Cell::kGates + cell.unit;
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) gates[i][g] = is_valid ? from[g * steps.state_size] : zero;
      saved_c[i] = is_valid ? in.cells[place + cell.unit] : zero;
      grad_h[i][0] = is_valid && in.grad_output != nullptr ? in.grad_output[place + cell.unit] : zero;
      grad_h[i][1] = is_valid && is_first(cell) && in.grad_h_n != nullptr ? in.grad_h_n[state] : zero;
      const bool starts = is_valid ? is_first(cell) : cell.length == 0;
      grad_c_[i] = cell.exists && !starts && step > 0 ? c[state] : 0;
      if (cell.exists && starts) grad_c_[i] = load_if_present(in.grad_c_n, state);
    }
#pragma unroll
    for (int i = 0; i < Tile::kCells; ++i) {
      if (OwnCell<Tile>::are_all(i, count_)) break;
      float of_cell[Cell::kGates];
      unrolled<Cell::kGates>([&](int g) { of_cell[g] = load(gates[i][g]); });
      derivatives_[i] = local_derivatives<Cell, typename Tile::CellMath>(of_cell, load(saved_c[i]));
      grad_h_[i] = load(grad_h[i][0]) + load(grad_h[i][1]);
    }
  }

  // Whether only the gradients of the initial state are left.
  __device__ bool is_last() const { return step_ == in_.steps.time; }

  // `recurrent`(gradients) sets those of h by the step before. Calls put(cell, gradients) with those of the gates.
  template <class Recurrent, class Put>
  __device__ void compute(const Recurrent& recurrent, const Put& put) {
    const Steps& steps = in_.steps;
    const int previous = step_ > 0 ? steps.time_of(steps.time - step_) : -1;
    float from_previous[Tile::kCells] = {};
    if (step_ > 0) recurrent(from_previous);
#pragma unroll
    for (int i = 0; i < Tile::kCells; ++i) {
      if (OwnCell<Tile>::are_all(i, count_)) break;
      const OwnCell<Tile>& cell = cells_[i];
      if (!cell.exists) continue;
      const int64_t state = cell.state(steps);
      const bool is_valid = this->is_valid(cell);
      const bool has_previous = step_ > 0 && previous < cell.length;
      if (!has_previous) from_previous[i] = 0;
      if (!is_valid && (has_previous || (is_last() && cell.length == 0))) {
        // The backward of this sample is done.
        store(in_.grad_h_0[state], has_previous ? from_previous[i] : load_if_present(in_.grad_h_n, state));
        store(in_.grad_c_0[state], grad_c_[i]);
      }
      if (is_last()) continue;
      unrolled<Cell::kGates>([&](int g) { gradients_[i][g] = 0; });
      if (is_valid) {
        apply_local_derivatives(
            derivatives_[i], grad_h_[i] + (is_first(cell) ? 0.f : from_previous[i]), grad_c_[i], gradients_[i]);
        c_[state] = grad_c_[i];
      }
      put(cell, gradients_[i]);
    }
  }

  __device__ void write() const {
#pragma unroll
    for (int i = 0; i < Tile::kCells; ++i) {
      if (OwnCell<Tile>::are_all(i, count_)) break;
      const OwnCell<Tile>& cell = cells_[i];
      if (!cell.exists) continue;
      const int state_size = in_.steps.state_size;
      T* const to = in_.grad_gates + in_.steps.row(t_, cell.sample) * Cell::kGates * state_size + cell.unit;
      unrolled<Cell::kGates>([&](int g) { store(to[g * state_size], gradients_[i][g]); });
    }
  }

 private:
  __device__ bool is_valid(const OwnCell<Tile>& cell) const { return !is_last() && t_ < cell.length; }
  __device__ bool is_first(const OwnCell<Tile>& cell) const { return t_ == in_.steps.last_time(cell.length); }

  const typename Tile::Arguments& in_;
  float* c_;
  int step_;
  int t_;
  int count_;
  OwnCell<Tile> cells_[Tile::kCells];
  LocalDerivatives<Cell, float> derivatives_[Tile::kCells];
  float grad_h_[Tile::kCells];
  float grad_c_[Tile::kCells];
  float gradients_[Tile::kCells][Cell::kGates];
};

#endif

}  // namespace extops::cuda
