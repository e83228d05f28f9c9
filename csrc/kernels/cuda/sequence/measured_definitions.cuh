// What one file of a library defines for measured.cuh.
#pragma once

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "choice.cuh"

namespace extops::cuda {

namespace {

constexpr double kTies = 0.97;  // the first wins them
constexpr int kRounds = 3;
constexpr double kMostSeconds = 0.02;  // of one kind, after the first round
constexpr double kCyclesASecond = 2e9;

struct Table {
  std::shared_mutex mutex;
  std::map<Kind, std::optional<SequenceKernels>> kinds;  // none where nobody knows it
  SequenceMemory memory{};
};

Table& table() {
  static Table* const it = new Table;  // threads may still ask when the process ends
  return *it;
}

// The first of those who know a kind at the same time is right, so that its calls are all computed alike.
SequenceKernels remember(const Kind& kind, const SequenceKernels& kernels) {
  const std::unique_lock lock(table().mutex);
  std::optional<SequenceKernels>& known = table().kinds[kind];
  if (!known.has_value()) known = kernels;
  return *known;
}

std::string text_of(const Kind& kind) {
  const auto& [device, sm_count, dtype, is_backward, units, directions, batch, time] = kind.second;
  const auto name = [](ScalarType type) {
    return type == ScalarType::TF32    ? "TF32"
           : type == ScalarType::Half  ? "float16"
           : type == ScalarType::Float ? "float32"
                                       : "bfloat16";
  };
  return std::to_string(time) + "," + std::to_string(batch) + ":" + kind.first + "_sequence" +
         (is_backward ? "_backward, " : ", ") + name(static_cast<ScalarType>(dtype)) + ", " + std::to_string(units) +
         (directions > 1 ? " units both ways, " : " units, ") + std::to_string(sm_count) + " SMs";
}

constexpr double kNever = std::numeric_limits<double>::infinity();

// Seconds of a call.
struct Times {
  double host = kNever;
  double gpu = kNever;
};

__global__ void keep_busy_kernel(int64_t cycles) {
  const int64_t start = clock64();
  while (clock64() - start < cycles) continue;
}

// Runs plans, and times them.
class Trials {
 public:
  Trials(cudaStream_t stream, const SequenceTrial& trial) : stream_(stream), trial_(trial) {
    cudaEventCreate(&first_);
    cudaEventCreate(&last_);
  }
  ~Trials() {
    cudaEventDestroy(first_);
    cudaEventDestroy(last_);
  }
  Trials(const Trials&) = delete;

  bool run(const SequencePlan& plan) const { return trial_.run(trial_.self, plan); }

  // The GPU waits until the host, which takes about as long as before, has launched all, so that it waits for nothing
  // afterwards.
  Times time(const SequencePlan& plan, double host_before) const {
    using Clock = std::chrono::steady_clock;
    cudaStreamSynchronize(stream_);
    keep_busy_kernel<<<1, 1, 0, stream_>>>(static_cast<int64_t>(1.5 * host_before * kCyclesASecond));
    cudaEventRecord(first_, stream_);
    const Clock::time_point start = Clock::now();
    if (!run(plan)) return {};
    const double host = std::chrono::duration<double>(Clock::now() - start).count();
    cudaEventRecord(last_, stream_);
    float milliseconds = 0;
    if (cudaEventSynchronize(last_) != cudaSuccess) return {};
    if (cudaEventElapsedTime(&milliseconds, first_, last_) != cudaSuccess) return {};
    return {host, milliseconds * 1e-3};
  }

 private:
  cudaStream_t stream_;
  const SequenceTrial& trial_;
  cudaEvent_t first_ = nullptr;
  cudaEvent_t last_ = nullptr;
};

std::vector<Times> times_of(const Trials& trials, const SequencePlan* plans, int count) {
  std::vector<Times> least(count), before(count);
  for (int i = 0; i < count; ++i) {
    // At first, libraries choose algorithms and kernels are loaded.
    if (trials.run(plans[i])) before[i] = trials.time(plans[i], 0);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(kMostSeconds);
  for (int round = 0; round < kRounds && (round == 0 || std::chrono::steady_clock::now() < end); ++round) {
    for (int i = 0; i < count; ++i) {
      if (!(before[i].host < kNever)) continue;  // it fails
      const Times times = trials.time(plans[i], before[i].host);
      least[i] = {std::min(least[i].host, times.host), std::min(least[i].gpu, times.gpu)};
    }
  }
  return least;
}

// The first whose cost is the least, but for ties.
int first_of_least(const std::vector<double>& costs) {
  const double least = *std::min_element(costs.begin(), costs.end());
  int first = 0;
  while (costs[first] * kTies > least) ++first;
  return first;
}

}  // namespace

std::optional<SequenceKernels> known_kernels(const Kind& kind) {
  Table& all = table();
  {
    const std::shared_lock lock(all.mutex);
    if (const auto found = all.kinds.find(kind); found != all.kinds.end()) return found->second;
  }
  SequenceKernels kernels{};
  if (all.memory.recall != nullptr && all.memory.recall(text_of(kind).c_str(), kernels) > 0) {
    return remember(kind, kernels);
  }
  const std::unique_lock lock(all.mutex);
  return all.kinds.try_emplace(kind).first->second;
}

SequenceKernels measured_kernels(
    const Kind& kind, cudaStream_t stream, const SequencePlan* plans, int count, const SequenceTrial& trial) {
  const SequenceMemory& memory = table().memory;
  const SequenceKernels first{plans[0].kernel, plans[0].kernel};
  if (count == 1) return remember(kind, first);
  SequenceKernels kernels{};
  const std::string text = text_of(kind);
  const int32_t answer = memory.recall == nullptr ? -1 : memory.recall(text.c_str(), kernels);
  if (answer != 0) return answer > 0 ? remember(kind, kernels) : first;
  const RelaxedCapture relaxed;
  const std::vector<Times> times = times_of(Trials(stream, trial), plans, count);
  double host = kNever, gpu = kNever;
  for (const Times& each : times) host = std::min(host, each.host), gpu = std::min(gpu, each.gpu);
  if (!(gpu < kNever)) return remember(kind, first);
  std::vector<double> eager_costs, graph_costs;
  for (int i = 0; i < count; ++i) {
    // What three models pay, which wait for the host or for the GPU: one has nothing else to do, in one the host has as
    // much again, and in one the GPU.
    const Times& of = times[i];
    eager_costs.push_back(
        std::max(of.host, of.gpu) + std::max(of.host + host, of.gpu) + std::max(of.host, of.gpu + gpu));
    graph_costs.push_back(of.gpu);
  }
  const int eager = first_of_least(eager_costs), captured = first_of_least(graph_costs);
  kernels = {plans[eager].kernel, plans[captured].kernel};
  memory.keep(text.c_str(), kernels, std::max(times[eager].host, times[eager].gpu), graph_costs[captured]);
  return remember(kind, kernels);
}

}  // namespace extops::cuda

EXTOPS_API void extops_set_sequence_memory_cuda(const SequenceMemory& memory) { extops::cuda::table().memory = memory; }

EXTOPS_API const char* extops_sequence_kernel_name_cuda(int64_t kernel) {
  const auto& names = extops::cuda::kKernelNames;
  return kernel >= 0 && kernel < static_cast<int64_t>(std::size(names)) ? names[kernel] : nullptr;
}
