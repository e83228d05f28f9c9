"""Which layers a group of blocks computes, on GPUs that need not be there: csrc/kernels/cuda/sequence/group_plan.h."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).parents[2] / "csrc/kernels/cuda/sequence/group_plan.h"

# Multiprocessors, and the most shared memory of a block.
GPUS = {
    "A100": (108, 163 << 10),
    "H200": (132, 227 << 10),
    "L4": (58, 99 << 10),
    "RTX 3060": (28, 99 << 10),
    "RTX 4090": (128, 99 << 10),
    "RTX 5090": (170, 99 << 10),
}
LSTM, GRU = (4, 4), (3, 4)
BFLOAT16, TF32, FLOAT32 = (2, 0), (4, 0), (4, 1)

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "group_plan.h"

// Of each line of numbers, the most units for a batch of 64 that fit forward and backward.
int main() {
  int recurrent, gates, bytes, is_float32, sms, shared;
  while (std::scanf("%d %d %d %d %d %d", &recurrent, &gates, &bytes, &is_float32, &sms, &shared) == 6) {
    int most = 0;
    for (int units = 1; units <= 4096; ++units) {
      bool fits = true;
      for (const bool backward : {false, true}) {
        const extops::GroupKind kind{recurrent, gates, bytes, is_float32 != 0, backward};
        const extops::GroupPlan plan = extops::best_group_plan(kind, 64, units, {sms, shared});
        if (plan.units == 0) fits = false;
        if (plan.blocks * plan.groups > sms || plan.shared_bytes > shared) std::abort();
        if (fits && plan.tiles * plan.rows < 64) std::abort();
      }
      if (fits) most = units;
    }
    std::printf("%d\\n", most);
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    source, built = folder / "plan.cpp", folder / "plan"
    source.write_text(PROGRAM)
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}"]
    subprocess.run([*command, source, "-o", built], check=True)
    return built


@pytest.mark.parametrize(
    ("gpu", "cell", "precision", "most"),
    [
        ("A100", LSTM, BFLOAT16, 1152),
        ("A100", LSTM, TF32, 864),
        ("A100", LSTM, FLOAT32, 864),
        ("A100", GRU, BFLOAT16, 1600),
        ("H200", LSTM, BFLOAT16, 1664),
        ("H200", LSTM, TF32, 1056),
        ("H200", GRU, BFLOAT16, 2112),
        ("H200", GRU, FLOAT32, 1056),
        ("L4", LSTM, BFLOAT16, 640),
        ("L4", GRU, TF32, 456),
        ("RTX 3060", LSTM, BFLOAT16, 448),
        ("RTX 4090", LSTM, BFLOAT16, 1024),
        ("RTX 4090", LSTM, FLOAT32, 640),
        ("RTX 4090", GRU, TF32, 912),
        ("RTX 5090", LSTM, BFLOAT16, 1312),
        ("RTX 5090", LSTM, TF32, 656),
        ("RTX 4090", GRU, BFLOAT16, 1008),
        ("L4", LSTM, TF32, 448),
        ("L4", GRU, BFLOAT16, 896),
        ("H200", LSTM, FLOAT32, 1056),
        ("RTX 5090", GRU, BFLOAT16, 1344),
    ],
)
def test_the_most_units(
    program: Path, gpu: str, cell: tuple[int, int], precision: tuple[int, int], most: int
) -> None:
    line = " ".join(map(str, (*cell, *precision, *GPUS[gpu])))
    done = subprocess.run([program], input=line, capture_output=True, text=True, check=True)
    assert int(done.stdout) == most
