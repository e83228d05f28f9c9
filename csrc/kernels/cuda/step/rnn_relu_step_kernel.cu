#include "step.cuh"

EXTOPS_STEP_CUDA(rnn_relu, extops::RnnRelu)
