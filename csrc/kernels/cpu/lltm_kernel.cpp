#include "sequence.h"
#include "step.h"

EXTOPS_DEFINE_SEQUENCE_CPU(lltm, extops::Lltm)
EXTOPS_DEFINE_STEP_CPU(lltm, extops::Lltm)
