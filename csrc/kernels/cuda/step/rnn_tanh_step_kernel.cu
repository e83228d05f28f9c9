#include "step.cuh"

EXTOPS_STEP_CUDA(rnn_tanh, extops::RnnTanh)
