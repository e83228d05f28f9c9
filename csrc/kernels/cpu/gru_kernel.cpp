#include "sequence.h"
#include "step.h"

EXTOPS_DEFINE_SEQUENCE_CPU(gru, extops::Gru)
EXTOPS_DEFINE_STEP_CPU(gru, extops::Gru)
