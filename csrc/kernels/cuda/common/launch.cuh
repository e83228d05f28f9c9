// Launch configuration and launch errors.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../../types.h"

namespace extops::cuda {

constexpr int kThreads = 256;

// Enough blocks to fill any GPU several times; kernels use grid-stride loops beyond that.
inline unsigned blocks_for(int64_t items, int64_t items_per_thread = 1) {
  constexpr int64_t kMaxBlocks = int64_t{1} << 22;
  const int64_t per_block = kThreads * items_per_thread;
  return static_cast<unsigned>(std::clamp<int64_t>((items + per_block - 1) / per_block, 1, kMaxBlocks));
}

// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// `__CUDA_ARCH__` of the code that runs on the current device, 0 if no code fits. It is below the device's own if the
// device runs PTX for older GPUs, which lacks what only newer ones have.
int code_architecture();

// How much shared memory a block may have on the GPUs for which code of an architecture is made: Maxwell and Pascal,
// Turing, and others, of which no kernel asks too much. What needs more is empty in that code.
__host__ __device__ constexpr int most_shared_bytes(int architecture) {
  return architecture < 700 ? 48 << 10 : architecture == 750 ? 64 << 10 : INT32_MAX;
}

// Call it right after a launch: it returns the error of that launch, or of an earlier one that failed asynchronously.
// If GPU, driver and build do not match, the message refers to the doctor.
Error launch_error();

// The name of the kernel that all sequences use; empty if it is chosen. The environment is read once, since getenv()
// must not run concurrently with another thread's setenv().
const char* named_sequence_kernel();

// The CUDA version that the driver serves, e.g. 12040 for 12.4.
inline int driver_version() {
  int version = 0;
  cudaDriverGetVersion(&version);
  return version;
}

// The launch configuration.
struct Shape {
  dim3 grid;
  unsigned threads;
  unsigned shared_bytes = 0;
  dim3 cluster = {0, 0, 0};  // zeros: no clusters. A kernel with cluster instructions needs one, if only of one block
};

// A launch as CUDA takes it.
class Launch {
 public:
  Launch(const Shape& shape, cudaStream_t stream) {
    config.gridDim = shape.grid;
    config.blockDim = shape.threads;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = attributes_;
    const dim3& cluster = shape.cluster;
    if (cluster.x > 0) add(cudaLaunchAttributeClusterDimension).clusterDim = {cluster.x, cluster.y, cluster.z};
  }
  Launch(const Launch&) = delete;

  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
    attributes_[config.numAttrs].id = id;
    return attributes_[config.numAttrs++].val;
  }

  template <class... Parameters, class... Arguments>
  Error run(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    cudaLaunchKernelEx(&config, kernel, arguments...);
    return launch_error();
  }

  cudaLaunchConfig_t config{};

 private:
  cudaLaunchAttribute attributes_[2] = {};
};

// Launches a kernel that calls `wait_for_previous_kernel`. Where device and code support programmatic dependent launch,
// its blocks start while those of the previous kernel end.
template <class... Parameters, class... Arguments>
Error launch(void (*kernel)(Parameters...), const Shape& shape, cudaStream_t stream, const Arguments&... arguments) {
  Launch launch(shape, stream);
  static const bool can_overlap = driver_version() >= 12030;  // older ones cannot capture such launches in a graph
  if (can_overlap && code_architecture() >= 900) {
    launch.add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  }
  return launch.run(kernel, arguments...);
}

// Programmatic dependent launch: waits until what the kernel before wrote can be seen, then lets the kernel after this
// one start. Comes before any access to memory that another kernel knows of. A kernel that calls it must not read by
// non-coherent loads (`ld.global.nc`), which the memory model allows only for what no kernel writes meanwhile: so none
// of its `const` pointers is `__restrict__`. extops_build/memory_model.py checks that.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// A function of the driver, found at run time, since nothing here links the driver. Null if the driver lacks it.
template <class Function>
Function driver_function(const char* name, [[maybe_unused]] unsigned version = 12000) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
  return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function)
                                                                        : nullptr;
}

// A thread has no current context before its first call of the runtime that needs one, such as autograd's thread in the
// first backward of a process.
inline void make_context_current() {
  int device = 0;
  cudaGetDevice(&device);
  cudaSetDevice(device);
}

// Caches a number for each of the last few contexts.
class PerContext {
 public:
  // `find` returns a number below 2**16, or -1 if it must not be cached.
  template <class Find>
  int get(uint64_t context, const Find& find) {
    const uint64_t key = context + 1;  // 0 is an empty place
    std::atomic<uint64_t>& place = places_[context % kPlaces];
    const uint64_t known = place.load(std::memory_order_relaxed);
    if (known >> kBits == key && key > 0) return static_cast<int>(known & ((1 << kBits) - 1));
    const int number = find();
    if (number >= 0) place.store(key << kBits | static_cast<uint64_t>(number), std::memory_order_relaxed);
    return number;
  }

 private:
  static constexpr int kBits = 16;
  static constexpr int kPlaces = 16;
  std::atomic<uint64_t> places_[kPlaces]{};
};

// Within, this thread may call what a graph that another thread captures could not hold.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The context of a stream. It may have fewer SMs than its GPU: a green context, or one under MPS.
class Context {
 public:
  explicit Context(cudaStream_t stream) : stream_(stream) {
    static const auto context_of = driver_function<decltype(&cuStreamGetCtx)>("cuStreamGetCtx");
    static const auto id_of = driver_function<decltype(&cuCtxGetId)>("cuCtxGetId");
    if (context_of == nullptr || id_of == nullptr) return;
    if (context_of(stream, &context_) != CUDA_SUCCESS) {
      make_context_current();
      if (context_of(stream, &context_) != CUDA_SUCCESS) return;
    }
    unsigned long long id = 0;
    if (id_of(context_, &id) == CUDA_SUCCESS) id_ = id;
  }

  static Context current() { return Context(nullptr); }

  cudaStream_t stream() const { return stream_; }

  // Whether what the stream is given becomes part of a CUDA graph.
  bool is_captured() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const bool is_known = cudaStreamIsCapturing(stream_, &status) == cudaSuccess;
    if (!is_known) cudaGetLastError();  // it fails for the legacy stream while another one is captured
    return is_known && status == cudaStreamCaptureStatusActive;
  }

  // Unique in the process, unlike the handle, which may be reused.
  uint64_t id() const { return id_; }

  int sm_count() const {
    static PerContext known;
    return known.get(id_, [&] {
      int count = device_attribute(cudaDevAttrMultiProcessorCount);
#if CUDART_VERSION >= 12040
      static const auto resource_of = driver_function<decltype(&cuCtxGetDevResource)>("cuCtxGetDevResource", 12040);
      CUdevResource resource{};
      if (resource_of != nullptr && resource_of(context_, &resource, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS) {
        count = std::min(count, static_cast<int>(resource.sm.smCount));
      }
#endif
      return count;
    });
  }

 private:
  static constexpr uint64_t kUnknown = UINT64_MAX;

  cudaStream_t stream_;
  CUcontext context_ = nullptr;
  uint64_t id_ = kUnknown;
};

// Raises a kernel's limit of dynamic shared memory beyond 48 KB, once for each context.
template <auto kKernel>
Error allow_shared_memory(int bytes) {
  static PerContext allowed;
  Error error = nullptr;
  allowed.get(Context::current().id(), [&] {
    // Its own status: the last error may be the caller's, and must not be cleared.
    if (cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess) return 1;
    error = launch_error();
    return -1;
  });
  return error;
}

// Whether this is a Hopper GPU and this build has code for sm_90a. In other builds the kernels for Hopper are empty.
inline bool has_hopper_tensor_cores() {
#ifdef EXTOPS_SM90A
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
#else
  return false;
#endif
}

// The widest access to memory, and the alignment that copies of tiles need.
constexpr int kChunkBytes = 16;

// Whether all of these have that alignment.
inline bool start_at_chunks(std::initializer_list<const void*> data) {
  return std::all_of(data.begin(), data.end(), [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kChunkBytes == 0;
  });
}

}  // namespace extops::cuda
