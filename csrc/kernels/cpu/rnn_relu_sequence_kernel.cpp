#include "sequence.h"

EXTOPS_DEFINE_SEQUENCE_CPU(rnn_relu, extops::RnnRelu)
