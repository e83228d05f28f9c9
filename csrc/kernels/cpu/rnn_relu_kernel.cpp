#include "sequence.h"
#include "step.h"

EXTOPS_DEFINE_SEQUENCE_CPU(rnn_relu, extops::RnnRelu)
EXTOPS_DEFINE_STEP_CPU(rnn_relu, extops::RnnRelu)
