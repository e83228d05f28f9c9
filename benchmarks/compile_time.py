"""What a clean build of all operators costs, beside the same operators in the common style (`benchmarks/tutorial`).

Both are compiled with one compiler for the same GPU architectures, without a compiler cache, in turn:

    nox -s build-3.11-cu130                                       # once: makes the environment
    .nox/build-3-11-cu130/bin/python benchmarks/compile_time.py   # minutes

The environment is that of a build session: torch's headers, ninja and the CUDA compiler.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from service import compile, native_libraries, toolchain  # noqa: E402
from service.matrix import Variant, load  # noqa: E402

TUTORIAL = ROOT / "benchmarks" / "tutorial"


def build_ours(variant: Variant) -> None:
    """Everything of the wheel: kernels and bindings, CPU and CUDA."""
    shutil.rmtree(compile.build_folder(variant), ignore_errors=True)
    compile.build(variant)


def build_tutorial(variant: Variant) -> None:
    """Two CUDA extensions behind torch/extension.h; there are no CPU kernels among them."""
    toolkit = toolchain.find_cuda(variant)
    headers = Path(sysconfig.get_path("purelib")) / "torch" / "include"
    includes = [headers, headers / "torch/csrc/api/include", sysconfig.get_path("include")]
    includes.append(toolkit.nvcc.parent.parent / "include")
    flags = " ".join(
        [
            *(f"-isystem {include}" for include in includes),
            "-O3 -std=c++20 -DTORCH_EXTENSION_NAME=tutorial -D_GLIBCXX_USE_CXX11_ABI=1",
        ]
    )
    gencode = " ".join(native_libraries().gencode_flags(variant.architectures))
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            f"rule cxx\n command = g++ -fPIC {flags} -c $in -o $out",
            f"rule cuda\n command = {toolkit.nvcc} -Xcompiler -fPIC {flags} {gencode}"
            " --expt-relaxed-constexpr -c $in -o $out",
            *(f"build {x.name}.o: cxx {x}" for x in sorted(TUTORIAL.glob("*.cpp"))),
            *(f"build {x.name}.o: cuda {x}" for x in sorted(TUTORIAL.glob("*.cu"))),
        ]
        Path(folder, "build.ninja").write_text("\n".join(lines) + "\n")
        jobs = f"-j{toolchain.parallel_jobs()}"
        subprocess.run([sys.executable, "-m", "ninja", "-C", folder, jobs], check=True)


def seconds(build: object, variant: Variant) -> float:
    """How long a build takes on the wall."""
    assert callable(build)
    start = time.perf_counter()
    build(variant)
    return time.perf_counter() - start


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", default="cu130")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results/compile_time.json"
    )
    arguments = parser.parse_args()
    os.environ["CCACHE_DISABLE"] = "1"
    variant = load().variant(arguments.variant)
    rounds = [
        {"extops": seconds(build_ours, variant), "tutorial": seconds(build_tutorial, variant)}
        for _ in range(arguments.rounds)
    ]
    ratio = statistics.median(each["tutorial"] / each["extops"] for each in rounds)
    result = {
        "variant": variant.name,
        "architectures": list(variant.architectures),
        "cuda": toolchain.find_cuda(variant).version,
        "torch_headers": load().headers_torch,
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
