#include "sequence.h"

EXTOPS_DEFINE_SEQUENCE_CPU(lltm, extops::Lltm)
