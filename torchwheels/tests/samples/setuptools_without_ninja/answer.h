#include <cstdint>

int64_t answer();
