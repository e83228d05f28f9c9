// The kernels of a step that are for Hopper alone: a file that includes this and invokes EXTOPS_STEP_HOPPER(Cell)
// instantiates them.
#pragma once

#include "small.cuh"
#include "small_backward.cuh"
#include "split_k.cuh"

#define EXTOPS_STEP_HOPPER(Cell)                                                                     \
  namespace extops::cuda::step {                                                                     \
  EXTOPS_STEP_HOPPER_OF(Cell, float)                                                                 \
  EXTOPS_STEP_HOPPER_OF(Cell, __half)                                                                \
  EXTOPS_STEP_HOPPER_OF(Cell, __nv_bfloat16)                                                         \
  EXTOPS_STEP_SMALL_OF(Cell, double)                                                                 \
  template Error launch_small_input_backward<Cell>(const StepInputBackwardArguments&, cudaStream_t); \
  }
#define EXTOPS_STEP_HOPPER_OF(Cell, T) \
  EXTOPS_STEP_SMALL_OF(Cell, T)        \
  template Error launch_on_tensor_cores<Cell>(const Forward<Cell, T>&, cudaStream_t);
#define EXTOPS_STEP_SMALL_OF(Cell, T)                                             \
  template Error launch_small<Cell>(const Forward<Cell, T>&, bool, cudaStream_t); \
  template Error launch_parameters_backward<Cell, T>(const StepBackwardArguments&, cudaStream_t);
