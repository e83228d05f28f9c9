#include <cstdint>

__global__ void one(float* x) { *x = 1; }

void fill(int64_t pointer) { one<<<1, 1>>>(reinterpret_cast<float*>(pointer)); }
