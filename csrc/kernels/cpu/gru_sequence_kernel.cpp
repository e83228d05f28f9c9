#include "sequence.h"

EXTOPS_DEFINE_SEQUENCE_CPU(gru, extops::Gru)
