#include "../sequence/float32_block.cuh"
#include "../sequence/kernels.cuh"
#include "../step/step.cuh"

EXTOPS_SEQUENCE_CUDA(rnn_relu, extops::RnnRelu)
EXTOPS_STEP_CUDA(rnn_relu, extops::RnnRelu)
