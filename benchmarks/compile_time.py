"""What a clean build of all operators costs, beside the same operators in the common style (`benchmarks/tutorial`).

Both are compiled with one compiler for the same GPU architectures, without a compiler cache, in turn:

    pip install torch ninja                                                # and a CUDA compiler
    TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX" python benchmarks/compile_time.py   # minutes
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from extops_build import compile, libraries  # noqa: E402

TUTORIAL = ROOT / "benchmarks" / "tutorial"
VARIANT = "cuda"


def build_ours() -> None:
    """Everything of the wheel: kernels and bindings, CPU and CUDA."""
    shutil.rmtree(compile.build_folder(VARIANT), ignore_errors=True)
    compile.build(VARIANT)


def build_tutorial() -> None:
    """Two CUDA extensions behind torch/extension.h; there are no CPU kernels among them."""
    cuda = compile.cuda_home()
    headers = Path(sysconfig.get_path("purelib")) / "torch" / "include"
    includes = [headers, headers / "torch/csrc/api/include", sysconfig.get_path("include")]
    includes.append(cuda / "include")
    flags = " ".join(
        [
            *(f"-isystem {include}" for include in includes),
            "-O3 -std=c++20 -DTORCH_EXTENSION_NAME=tutorial -D_GLIBCXX_USE_CXX11_ABI=1",
        ]
    )
    gencode = " ".join(libraries.gencode_flags(compile.architectures()))
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            f"rule cxx\n command = g++ -fPIC {flags} -c $in -o $out",
            f"rule cuda\n command = {cuda / 'bin' / 'nvcc'} -Xcompiler -fPIC {flags} {gencode}"
            " --expt-relaxed-constexpr -c $in -o $out",
            *(f"build {x.name}.o: cxx {x}" for x in sorted(TUTORIAL.glob("*.cpp"))),
            *(f"build {x.name}.o: cuda {x}" for x in sorted(TUTORIAL.glob("*.cu"))),
        ]
        Path(folder, "build.ninja").write_text("\n".join(lines) + "\n")
        jobs = f"-j{os.environ.get('MAX_JOBS') or len(os.sched_getaffinity(0))}"
        subprocess.run([sys.executable, "-m", "ninja", "-C", folder, jobs], check=True)


def seconds(build: Callable[[], None]) -> float:
    """How long a build takes on the wall."""
    start = time.perf_counter()
    build()
    return time.perf_counter() - start


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results/compile_time.json"
    )
    arguments = parser.parse_args()
    os.environ["CCACHE_DISABLE"] = "1"
    rounds = [
        {"extops": seconds(build_ours), "tutorial": seconds(build_tutorial)}
        for _ in range(arguments.rounds)
    ]
    ratio = statistics.median(each["tutorial"] / each["extops"] for each in rounds)
    result = {
        "architectures": list(compile.architectures()),
        "cuda": compile.nvcc_version(compile.cuda_home()),
        "torch_headers": importlib.metadata.version("torch"),
        "processor": f"{os.cpu_count()} x {platform.machine()}",
        "commit": compile.git("describe", "--always", "--dirty"),
        "seconds": rounds,
        "tutorial_over_extops": round(ratio, 2),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
