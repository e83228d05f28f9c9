#include "sequence.h"
#include "step.h"

EXTOPS_DEFINE_SEQUENCE_CPU(lstm, extops::Lstm)
EXTOPS_DEFINE_STEP_CPU(lstm, extops::Lstm)
