// How the blocks of `ampere_group.cuh` divide a problem, by what a GPU has. Plain C++, so that it is tested without
// one.
#pragma once

#include <cstdint>

namespace extops {

// What of a cell and its types decides whether the weights fit.
struct GroupKind {
  int recurrent;      // gates that meet the recurrent weights
  int gates;          // all
  int element_bytes;  // of the weights as they are multiplied
  bool is_float32;    // strict
  bool is_backward;
};

struct GroupLimits {
  int sm_count;
  int shared_bytes;  // the most of a block
};

// The threads of a block are divided into teams, each for tiles of its own: while one waits, another computes.
constexpr int kGroupThreads = 256;
constexpr int kGroupTeams = 2;
constexpr int kTeamThreads = kGroupThreads / kGroupTeams;
constexpr int kTeamWarps = kTeamThreads / 32;

// The most units of a block. The weights of more seldom fit.
constexpr int most_group_units(int element_bytes) { return element_bytes == 2 ? 16 : 8; }

// The most samples of a tile. More would take too many registers.
constexpr int most_group_rows(bool is_float32) { return is_float32 ? 64 : 32; }

struct GroupPlan {
  int units;   // of a block: 0 if the problem does not fit
  int blocks;  // of a group
  int groups;  // that share the tiles
  int rows;    // samples of a tile
  int tiles;
  int k_blocks;  // the weights are cut up along K into pieces that a warp multiplies at once
  int weight_bytes;
  int shared_bytes;

  constexpr int tiles_of_a_team() const { return (tiles + groups * kGroupTeams - 1) / (groups * kGroupTeams); }
};

constexpr int64_t group_parts(int64_t a, int64_t b) { return (a + b - 1) / b; }

// 16-byte chunks of a row in a piece of K: tensor cores take four of them, strict float32 eight.
constexpr int group_chunks(bool is_float32) { return is_float32 ? 8 : 4; }

constexpr int group_bias_bytes(const GroupKind& kind, int units) {
  return kind.is_backward ? 0 : kind.gates * units * 4;
}

// A plan with tiles of `rows` samples and `units` units for each block.
constexpr GroupPlan make_group_plan(
    const GroupKind& kind, int units, int rows, int64_t batch, int64_t state_size, const GroupLimits& limits) {
  GroupPlan plan{};
  int64_t blocks = group_parts(state_size, units);
  // In the backward as many blocks as there are gates share some columns.
  if (kind.is_backward) blocks = group_parts(blocks, kind.recurrent) * kind.recurrent;
  const int64_t k_block_bytes = 16 * group_chunks(kind.is_float32);
  const int64_t k_blocks = group_parts(state_size * kind.element_bytes, k_block_bytes);
  const int64_t columns = kind.recurrent * units;
  const int64_t weights = k_blocks * k_block_bytes * columns;
  // Each warp's sums of a cell for each thread of its team.
  const int64_t sums = int64_t{kGroupThreads} * kTeamWarps * kind.recurrent * 4;
  if (blocks > limits.sm_count || weights + sums + group_bias_bytes(kind, units) > limits.shared_bytes) return plan;
  plan.units = units;
  plan.blocks = static_cast<int>(blocks);
  plan.rows = rows;
  plan.tiles = static_cast<int>(group_parts(batch, rows));
  plan.groups = static_cast<int>(group_parts(plan.tiles, kGroupTeams));
  if (plan.groups > limits.sm_count / plan.blocks) plan.groups = limits.sm_count / plan.blocks;
  plan.k_blocks = static_cast<int>(k_blocks);
  plan.weight_bytes = static_cast<int>(weights);
  plan.shared_bytes = static_cast<int>(weights + sums);
  return plan;
}

// The time of a step, in that of a row of eight units. What does not depend on the rows is the exchange.
constexpr int64_t group_time(const GroupKind& kind, const GroupPlan& plan) {
  const int64_t rows = int64_t{plan.rows} * plan.units / 8;
  if (!kind.is_float32) return plan.tiles_of_a_team() * (32 + rows);
  // The largest tile is multiplied by fewer loads.
  return plan.tiles_of_a_team() * (5 + (plan.rows == most_group_rows(true) ? rows * 3 / 4 : rows));
}

// The plan whose steps take the least time.
constexpr GroupPlan best_group_plan(
    const GroupKind& kind, int64_t batch, int64_t state_size, const GroupLimits& limits) {
  GroupPlan best{};
  for (int units = most_group_units(kind.element_bytes); units >= 8; units /= 2) {
    for (int rows = kind.is_float32 ? 8 : 16; rows <= most_group_rows(kind.is_float32); rows *= 2) {
      const GroupPlan plan = make_group_plan(kind, units, rows, batch, state_size, limits);
      if (plan.units == 0) continue;
      if (best.units == 0 || group_time(kind, plan) < group_time(kind, best)) best = plan;
    }
  }
  return best;
}

}  // namespace extops
