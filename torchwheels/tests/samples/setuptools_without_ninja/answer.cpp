#include "answer.h"

#include <torch/library.h>

int64_t answer() { return ANSWER; }
