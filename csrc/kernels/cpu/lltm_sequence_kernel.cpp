// The LLTM over whole sequences. The rows of a batch do not depend on each other, so that a slice of them runs through
// all steps without waiting for another; the recurrent weights are packed once for all steps.
#include <algorithm>
#include <vector>

#include "../lltm_sequence.h"
#include "lltm_pointwise.h"
#include "vectorize.h"

namespace extops::cpu {
namespace {

constexpr int kGates = 3;

template <int kBytes>
constexpr int kTileRows = kBytes == 64 ? 8 : 4;  // as many as leave the sums in registers

template <class C, int kBytes>
struct alignas(kBytes) Vector {
  static constexpr int kLanes = kBytes / sizeof(C);
  C at[kLanes];
};

// The first `count` elements; the others are zero.
template <class Vec, class T>
[[gnu::always_inline]] inline Vec load_vector(const T* from, int64_t count) {
  Vec result = {};
  if (count >= Vec::kLanes) {
    for (int j = 0; j < Vec::kLanes; ++j) result.at[j] = load(from[j]);
  } else {
    for (int j = 0; j < count; ++j) result.at[j] = load(from[j]);
  }
  return result;
}

template <class Vec, class T>
[[gnu::always_inline]] inline void store_vector(const Vec& from, T* to, int64_t count) {
  if (count >= Vec::kLanes) {
    for (int j = 0; j < Vec::kLanes; ++j) store(to[j], from.at[j]);
  } else {
    for (int j = 0; j < count; ++j) store(to[j], from.at[j]);
  }
}

// Stores the elements and leaves what is read back.
template <class Vec, class T>
[[gnu::always_inline]] inline void round_and_store(Vec& values, T* to, int64_t count) {
  for (auto& value : values.at) {
    T rounded;
    store(rounded, value);
    value = load(rounded);
  }
  store_vector(values, to, count);
}

// to[r * to_stride + v] = sum over d of a[r * a_stride + d] * b[d * kVectors + v]. Sums of a few terms are added up, so
// that the error of long ones stays small. An element's terms come in the same order in a tile of any number of rows.
template <int kRows, int kVectors, class C, int kBytes>
[[gnu::always_inline]] inline void multiply_tile(
    int64_t depth, const C* a, int64_t a_stride, const Vector<C, kBytes>* b, Vector<C, kBytes>* to, int64_t to_stride) {
  typedef C V __attribute__((vector_size(kBytes), may_alias));
  constexpr int64_t kTerms = 128;
  for (int64_t first = 0; first < depth; first += kTerms) {
    V sums[kRows][kVectors] = {};
    const int64_t end = std::min(first + kTerms, depth);
    for (int64_t d = first; d < end; ++d) {
      const V* values = reinterpret_cast<const V*>(b + d * kVectors);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const C factor = a[r * a_stride + d];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] += factor * values[v];
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      V* total = reinterpret_cast<V*>(to + r * to_stride);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) total[v] = first == 0 ? sums[r][v] : total[v] + sums[r][v];
    }
  }
}

// Calls body(integral_constant rows, first) for tiles of at most kRows of the rows [first, end).
template <int kRows, class Body>
[[gnu::always_inline]] inline void for_each_tile(int64_t first, int64_t end, const Body& body) {
  for (; first + kRows <= end; first += kRows) body(std::integral_constant<int, kRows>{}, first);
  if constexpr (kRows > 1) for_each_tile<kRows / 2>(first, end, body);
}

// A sample of the batch, and how many steps of it count.
struct Row {
  int64_t sample;
  int64_t length;
};

// The rows of a slice, the longest first, so that those which count at a step come before the others.
std::vector<Row> longest_first(int64_t time, const int64_t* lengths, int64_t begin, int64_t end) {
  std::vector<Row> rows;
  for (int64_t sample = begin; sample < end; ++sample) {
    rows.push_back({sample, lengths == nullptr ? time : std::clamp<int64_t>(lengths[sample], 0, time)});
  }
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.length > b.length; });
  return rows;
}

// What forward and backward share.
template <class T, int kBytes>
struct Slice {
  using C = typename Compute<T>::type;
  using Vec = Vector<C, kBytes>;
  static constexpr int kLanes = Vec::kLanes;

  const LltmSequenceSizes& sizes;
  int64_t units;    // in a row
  int64_t vectors;  // that hold them, the last one padded with zeros
  std::vector<Row> rows;

  Slice(const LltmSequenceSizes& sizes, const int64_t* lengths, int64_t begin, int64_t end, int64_t group)
      : sizes(sizes),
        units(sizes.state_size),
        vectors((units + group * kLanes - 1) / (group * kLanes) * group),
        rows(longest_first(sizes.time, lengths, begin, end)) {}

  int64_t count_rows(int64_t t) const {
    return std::partition_point(rows.begin(), rows.end(), [t](const Row& row) { return row.length > t; }) -
           rows.begin();
  }

  int64_t offset(int64_t t, const Row& row) const { return t * sizes.time_stride + row.sample * sizes.batch_stride; }

  // A state of [batch, units], or zeros, by the slice's rows.
  [[gnu::always_inline]] std::vector<Vec> load_state(const void* from) const {
    std::vector<Vec> state(rows.size() * vectors);
    if (from == nullptr) return state;
    for (size_t r = 0; r < rows.size(); ++r) {
      const T* row = static_cast<const T*>(from) + rows[r].sample * units;
      for (int64_t v = 0; v < vectors; ++v) {
        state[r * vectors + v] = load_vector<Vec>(row + v * kLanes, units - v * kLanes);
      }
    }
    return state;
  }

  [[gnu::always_inline]] void store_state(const std::vector<Vec>& state, void* to) const {
    for (size_t r = 0; r < rows.size(); ++r) {
      T* row = static_cast<T*>(to) + rows[r].sample * units;
      for (int64_t v = 0; v < vectors; ++v) {
        store_vector(state[r * vectors + v], row + v * kLanes, units - v * kLanes);
      }
    }
  }

  // Zeros for the steps that do not count, in a tensor of [time, batch, width].
  void clear_padding(void* tensor, int64_t width) const {
    for (const Row& row : rows) {
      for (int64_t t = row.length; t < sizes.time; ++t) {
        std::fill_n(static_cast<T*>(tensor) + offset(t, row) * width, width, T{});
      }
    }
  }
};

template <class T, int kBytes>
class Forward {
 public:
  [[gnu::always_inline]] Forward(const LltmSequence& in, int64_t begin, int64_t end)
      : in_(in),
        slice_(in.sizes, in.lengths, begin, end, 1),
        weights_(slice_.vectors * kGates * slice_.units),
        bias_(slice_.vectors * kGates),
        sums_(slice_.rows.size() * kGates),
        h_(slice_.load_state(in.h_0)),
        next_h_(h_),
        cells_(slice_.load_state(in.c_0)) {
    const T* weights = static_cast<const T*>(in.weights);
    const int64_t units = slice_.units;
    for (int64_t line = 0; line < kGates * units; ++line) {
      const int64_t gate = line / units;
      const int64_t unit = line % units;
      const int64_t v = unit / kLanes;
      const int64_t lane = unit % kLanes;
      for (int64_t k = 0; k < units; ++k) {
        weights_[(v * units + k) * kGates + gate].at[lane] = load(weights[line * in.sizes.columns() + k]);
      }
      bias_[v * kGates + gate].at[lane] = load(static_cast<const T*>(in.bias)[line]);
    }
  }

  [[gnu::always_inline]] void run() {
    for (int64_t step = 0; step < in_.sizes.time; ++step) {
      const int64_t t = in_.sizes.reverse ? in_.sizes.time - 1 - step : step;
      const int64_t count = slice_.count_rows(t);
      for (int64_t v = 0; v < slice_.vectors; ++v) {
        multiply(v, count);
        for (int64_t r = 0; r < count; ++r) update(t, r, v);
      }
      // Rows that do not count keep their state: before their first step both buffers hold it.
      h_.swap(next_h_);
    }
    slice_.clear_padding(in_.output, slice_.units);
    slice_.clear_padding(in_.gates, kGates * slice_.units);
    slice_.clear_padding(in_.cells, slice_.units);
    slice_.store_state(cells_, in_.c_n);
    store_last_h();
  }

 private:
  using C = typename Compute<T>::type;
  using Vec = Vector<C, kBytes>;
  static constexpr int kLanes = Vec::kLanes;

  [[gnu::always_inline]] void multiply(int64_t v, int64_t count) {
    const int64_t stride = slice_.vectors * kLanes;
    const Vec* const weights = weights_.data() + v * slice_.units * kGates;
    for_each_tile<kTileRows<kBytes>>(0, count, [&](auto rows, int64_t first) __attribute__((always_inline)) {
      multiply_tile<rows, kGates>(
          slice_.units, h_.data()->at + first * stride, stride, weights, sums_.data() + first * kGates, kGates);
    });
  }

  [[gnu::always_inline]] void update(int64_t t, int64_t r, int64_t v) {
    const int64_t units = slice_.units;
    const int64_t unit = v * kLanes;
    const int64_t count = units - unit;
    const int64_t row = slice_.offset(t, slice_.rows[r]);
    Vec gates[kGates];
    for (int g = 0; g < kGates; ++g) {
      const int64_t at = (row * kGates + g) * units + unit;
      const Vec& bias = bias_[v * kGates + g];
      const Vec& sums = sums_[r * kGates + g];
      gates[g] = load_vector<Vec>(static_cast<const C*>(in_.products) + at, count);
      for (int j = 0; j < kLanes; ++j) gates[g].at[j] = gates[g].at[j] + bias.at[j] + sums.at[j];
      round_and_store(gates[g], static_cast<T*>(in_.gates) + at, count);
    }
    Vec& cells = cells_[r * slice_.vectors + v];
    Vec& h = next_h_[r * slice_.vectors + v];
#pragma GCC ivdep
    for (int j = 0; j < kLanes; ++j) {
      const State<C> next = next_state(gates[0].at[j], gates[1].at[j], gates[2].at[j], cells.at[j]);
      cells.at[j] = next.cell;
      h.at[j] = next.h;
    }
    store_vector(cells, static_cast<T*>(in_.cells) + row * units + unit, count);
    round_and_store(h, static_cast<T*>(in_.output) + row * units + unit, count);
  }

  // The buffers of h were swapped after the last step of each row, and maybe again.
  void store_last_h() const {
    for (const Row& row : slice_.rows) {
      const int64_t last = in_.sizes.reverse ? 0 : row.length - 1;
      const int64_t units = slice_.units;
      const T* from = row.length == 0 ? static_cast<const T*>(in_.h_0) + row.sample * units
                                      : static_cast<const T*>(in_.output) + slice_.offset(last, row) * units;
      std::copy_n(from, units, static_cast<T*>(in_.h_n) + row.sample * units);
    }
  }

  const LltmSequence& in_;
  Slice<T, kBytes> slice_;
  std::vector<Vec> weights_;  // [vectors of units, units, gates]
  std::vector<Vec> bias_;     // [vectors of units, gates]
  std::vector<Vec> sums_;     // [rows, gates], for one vector of units
  std::vector<Vec> h_;        // [rows, vectors of units]
  std::vector<Vec> next_h_;
  std::vector<Vec> cells_;
};

template <class T, int kBytes>
class Backward {
 public:
  [[gnu::always_inline]] Backward(const LltmSequenceBackward& in, int64_t begin, int64_t end)
      : in_(in),
        slice_(in.sizes, in.lengths, begin, end, kGroup),
        weights_(slice_.vectors * columns()),
        grad_gates_(slice_.rows.size() * columns()),
        grad_h_(slice_.load_state(in.grad_h_n)),
        grad_cells_(slice_.load_state(in.grad_c_n)) {
    const T* weights = static_cast<const T*>(in.weights);
    for (int64_t d = 0; d < columns(); ++d) {
      const T* const line = weights + d * in.sizes.columns();
      for (int64_t v = 0; v < slice_.vectors; ++v) {
        weights_[(v / kGroup * columns() + d) * kGroup + v % kGroup] =
            load_vector<Vec>(line + v * kLanes, slice_.units - v * kLanes);
      }
    }
  }

  [[gnu::always_inline]] void run() {
    for (int64_t step = 0; step < in_.sizes.time; ++step) {
      const int64_t t = in_.sizes.reverse ? step : in_.sizes.time - 1 - step;
      const int64_t count = slice_.count_rows(t);
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t unit = 0; unit < slice_.units; unit += kLanes) update(t, r, unit);
      }
      for (int64_t v = 0; v < slice_.vectors; v += kGroup) multiply(v, count);
    }
    slice_.clear_padding(in_.grad_gates, columns());
    slice_.store_state(grad_h_, in_.grad_h_0);
    slice_.store_state(grad_cells_, in_.grad_c_0);
  }

 private:
  using C = typename Compute<T>::type;
  using Vec = Vector<C, kBytes>;
  static constexpr int kLanes = Vec::kLanes;
  static constexpr int kGroup = 2;  // vectors of units in a tile

  int64_t columns() const { return kGates * slice_.units; }

  [[gnu::always_inline]] void multiply(int64_t v, int64_t count) {
    const Vec* const weights = weights_.data() + v * columns();
    for_each_tile<kTileRows<kBytes>>(0, count, [&](auto rows, int64_t first) __attribute__((always_inline)) {
      multiply_tile<rows, kGroup>(
          columns(), grad_gates_.data() + first * columns(), columns(), weights,
          grad_h_.data() + first * slice_.vectors + v, slice_.vectors);
    });
  }

  [[gnu::always_inline]] void update(int64_t t, int64_t r, int64_t unit) {
    const int64_t units = slice_.units;
    const int64_t count = units - unit;
    const int64_t row = slice_.offset(t, slice_.rows[r]);
    Vec gates[kGates];
    for (int g = 0; g < kGates; ++g) {
      gates[g] = load_vector<Vec>(static_cast<const T*>(in_.gates) + (row * kGates + g) * units + unit, count);
    }
    const Vec cells = load_vector<Vec>(static_cast<const T*>(in_.cells) + row * units + unit, count);
    Vec grad_h = grad_h_[r * slice_.vectors + unit / kLanes];
    Vec& grad_cells = grad_cells_[r * slice_.vectors + unit / kLanes];
    if (in_.grad_output != nullptr) {
      const Vec grad_output = load_vector<Vec>(static_cast<const T*>(in_.grad_output) + row * units + unit, count);
      for (int j = 0; j < kLanes; ++j) grad_h.at[j] += grad_output.at[j];
    }
    Vec grad_gates[kGates];
#pragma GCC ivdep
    for (int j = 0; j < kLanes; ++j) {
      const CellGradients<C> grads =
          cell_gradients(gates[0].at[j], gates[1].at[j], gates[2].at[j], cells.at[j], grad_h.at[j], grad_cells.at[j]);
      grad_gates[0].at[j] = grads.input_gate;
      grad_gates[1].at[j] = grads.output_gate;
      grad_gates[2].at[j] = grads.candidate;
      grad_cells.at[j] = grads.old_cell;
    }
    for (int g = 0; g < kGates; ++g) {
      round_and_store(grad_gates[g], static_cast<T*>(in_.grad_gates) + (row * kGates + g) * units + unit, count);
      store_vector(grad_gates[g], grad_gates_.data() + r * columns() + g * units + unit, count);
    }
  }

  const LltmSequenceBackward& in_;
  Slice<T, kBytes> slice_;
  std::vector<Vec> weights_;   // [groups of vectors of units, columns, kGroup]
  std::vector<C> grad_gates_;  // [rows, columns]
  std::vector<Vec> grad_h_;    // [rows, vectors of units]
  std::vector<Vec> grad_cells_;
};

template <template <class, int> class Direction, class Arguments>
Error run(ScalarType dtype, const Arguments& arguments, int64_t begin, int64_t end) {
  return dispatch(dtype, [&](auto scalar) -> Error {
    if (begin >= end || arguments.sizes.state_size == 0) return nullptr;
    return try_vectorize_with_width([&](auto bytes) __attribute__((always_inline)) {
      Direction<decltype(scalar), bytes>(arguments, begin, end).run();
    });
  });
}

}  // namespace
}  // namespace extops::cpu

using namespace extops::cpu;

Error extops_lltm_sequence_cpu(ScalarType dtype, const LltmSequence& arguments, int64_t begin, int64_t end) {
  return run<Forward>(dtype, arguments, begin, end);
}

Error extops_lltm_sequence_backward_cpu(
    ScalarType dtype, const LltmSequenceBackward& arguments, int64_t begin, int64_t end) {
  return run<Backward>(dtype, arguments, begin, end);
}
