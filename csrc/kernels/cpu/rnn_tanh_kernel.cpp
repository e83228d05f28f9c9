#include "sequence.h"
#include "step.h"

EXTOPS_DEFINE_SEQUENCE_CPU(rnn_tanh, extops::RnnTanh)
EXTOPS_DEFINE_STEP_CPU(rnn_tanh, extops::RnnTanh)
