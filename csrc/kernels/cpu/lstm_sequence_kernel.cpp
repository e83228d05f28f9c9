#include "sequence.h"

EXTOPS_DEFINE_SEQUENCE_CPU(lstm, extops::Lstm)
