// The kernels of a cell of your own for GPUs: a CUDA file that says EXTOPS_CELL_KERNELS(name, Cell) has them. Compiled
// for 9.0a and with -DEXTOPS_SM90A it has those for Hopper. See extops_cell.h.
#pragma once

#include "kernels/cuda/common/launch_definitions.cuh"
#include "kernels/cuda/sequence/float32_block.cuh"
#include "kernels/cuda/sequence/float32_cluster.cuh"
#include "kernels/cuda/sequence/group.cuh"
#include "kernels/cuda/sequence/kernels.cuh"
#include "kernels/cuda/sequence/measured_definitions.cuh"
#include "kernels/cuda/sequence/tensor_block.cuh"
#include "kernels/cuda/sequence/tensor_cluster.cuh"
#include "kernels/cuda/step/bias_sums.cuh"
#include "kernels/cuda/step/hopper.cuh"
#include "kernels/cuda/step/step.cuh"

EXTOPS_BIAS_SUMS_HOPPER

#define EXTOPS_CELL_KERNELS(cell, Cell)    \
  EXTOPS_DECLARE_SEQUENCE_CUDA(cell, Cell) \
  EXTOPS_SEQUENCE_CUDA(cell, Cell)         \
  EXTOPS_DECLARE_STEP_CUDA(cell, Cell)     \
  EXTOPS_STEP_CUDA(cell, Cell)
