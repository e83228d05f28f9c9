// Lets a binding that is not compiled read the schemas.
#include "schemas.h"

#include <cstddef>

#include "../kernels/types.h"

EXTOPS_API const char* extops_schema(size_t index) {
  return index < sizeof(extops::kSchemas) / sizeof(extops::kSchemas[0]) ? extops::kSchemas[index] : nullptr;
}
