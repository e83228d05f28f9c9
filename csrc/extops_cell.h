// The operators of a cell of your own (cells/cell.h says what one is). A C++ file that says
//
//   EXTOPS_CELL(name, Cell)
//
// defines `extops::<name>_sequence`, `extops::<name>_step` (unless the cell has more states) and their backwards for
// the CPU; compiled with -DEXTOPS_WITH_CUDA also for GPUs, whose kernels a CUDA file has (extops_cell.cuh). Python's
// extops.load_cell() compiles, loads and calls them.
#pragma once

#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION 0x020a000000000000  // LibTorch's stable ABI of 2.10
#endif
#if defined(EXTOPS_WITH_CUDA) && !defined(USE_CUDA)
#define USE_CUDA  // the headers declare the current stream only then
#endif

#include "bindings/stable/cpu.h"
#include "bindings/stable/sequence.h"
#include "bindings/stable/step.h"
#include "kernels/cpu/sequence.h"
#include "kernels/cpu/step.h"
#ifdef EXTOPS_WITH_CUDA
#include "bindings/stable/cuda.h"
#endif

namespace extops::own {

template <class Cell>
const std::vector<Operator>& operators(const char* cell) {
  static const std::vector<Operator> known = [cell] {
    std::vector<Operator> found;
    add_operators<Cell>(cell, found);
    return found;
  }();
  return known;
}

struct Cpu : stable::CpuDevice {
  template <class Cell>
  struct Entries;
};

#ifdef EXTOPS_WITH_CUDA
struct Cuda : stable::CudaDevice {
  template <class Cell>
  struct Entries;
};
#endif

}  // namespace extops::own

#define EXTOPS_CELL(cell, Cell)                                                                                        \
  EXTOPS_DECLARE_SEQUENCE_CPU(cell, Cell)                                                                              \
  EXTOPS_DEFINE_SEQUENCE_CPU(cell, Cell)                                                                               \
  EXTOPS_DECLARE_STEP_CPU(cell, Cell)                                                                                  \
  EXTOPS_DEFINE_STEP_CPU(cell, Cell)                                                                                   \
  EXTOPS_NAMES(cell, Cell)                                                                                             \
  EXTOPS_ENTRIES_CPU(extops::own::Cpu, cell, Cell)                                                                     \
  EXTOPS_API const char* extops_schema(size_t index) {                                                                 \
    const std::vector<extops::Operator>& known = extops::own::operators<Cell>(#cell);                                  \
    return index < known.size() ? known[index].schema.c_str() : nullptr;                                               \
  }                                                                                                                    \
  EXTOPS_API const char* extops_sizes(size_t index) { return extops::own::operators<Cell>(#cell)[index].sizes; }       \
  EXTOPS_API const char* extops_rows(size_t index) { return extops::own::operators<Cell>(#cell)[index].rows.c_str(); } \
  EXTOPS_API const char* extops_cell(size_t index) {                                                                   \
    static const std::string text = describe_cell<Cell>(#cell);                                                        \
    return index < 1 ? text.c_str() : nullptr;                                                                         \
  }                                                                                                                    \
  STABLE_TORCH_LIBRARY_FRAGMENT(extops, library) {                                                                     \
    for (size_t index = 0; extops_schema(index) != nullptr; ++index) library.def(extops_schema(index));                \
  }                                                                                                                    \
  STABLE_TORCH_LIBRARY_IMPL(extops, CPU, library) { extops::stable::register_cell<extops::own::Cpu, Cell>(library); }  \
  EXTOPS_CELL_ON_GPUS(cell, Cell)

#ifdef EXTOPS_WITH_CUDA
#define EXTOPS_CELL_ON_GPUS(cell, Cell)              \
  EXTOPS_DECLARE_SEQUENCE_CUDA(cell, Cell)           \
  EXTOPS_DECLARE_STEP_CUDA(cell, Cell)               \
  EXTOPS_ENTRIES_CUDA(extops::own::Cuda, cell, Cell) \
  STABLE_TORCH_LIBRARY_IMPL(extops, CUDA, library) { extops::stable::register_cell<extops::own::Cuda, Cell>(library); }
#else
#define EXTOPS_CELL_ON_GPUS(cell, Cell)
#endif
