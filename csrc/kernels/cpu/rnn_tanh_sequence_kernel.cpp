#include "sequence.h"

EXTOPS_DEFINE_SEQUENCE_CPU(rnn_tanh, extops::RnnTanh)
