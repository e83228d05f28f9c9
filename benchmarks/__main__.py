"""The command line: measures, prints, and writes `result.json`, then the report, the summary and the plots.

    python -m benchmarks                   # the CPU
    python -m benchmarks --device cuda
    python -m benchmarks --random 200 --seed 1   # layers drawn at random beside torch's, into `random.*` alone

Run it from the top of the source tree, with extops installed. It measures what is installed, and needs a C++ compiler
and ninja, for a GPU also the CUDA compiler: two of the implementations are compiled just in time.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--groups",
        default="cell,elementwise,sweep,sequence",
        help="which of these to measure (default: all, %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument(
        "--output", type=Path, help="a folder; default: benchmarks/results/<device>"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure what is missing from the result.json of the same code on the same machine",
    )
    parser.add_argument(
        "--commit", help="to be recorded; default: what git says, or what extops was built from"
    )
    parser.add_argument("--random", type=int, metavar="N", help="measure N layers drawn at random")
    parser.add_argument("--cells", action="store_true", help="of --random: cells, not layers")
    parser.add_argument("--seed", type=int, default=1, help="of --random; default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="when --random ends, done or not"
    )
    return parser.parse_args()


def prepare_process(device: str, scratch: str) -> None:
    """Sets what must be set before torch is imported."""
    if device == "cpu":
        # Threads stay on their cores. Not for a GPU: compilers that torch starts would share one core.
        os.environ.setdefault("OMP_PROC_BIND", "true")
    # Empty caches: the report tells what it takes to fill them.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{scratch}/inductor")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{scratch}/extensions")
    # The ninja that is installed beside this Python, where its environment is not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def main() -> None:
    """The command line."""
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="extops-bench-", ignore_cleanup_errors=True) as scratch:
        prepare_process(arguments.device, scratch)
        if arguments.random is not None:
            from benchmarks import random_run

            random_run.run(
                arguments.device,
                arguments.random,
                arguments.seed,
                arguments.seconds,
                arguments.output,
                cells=arguments.cells,
            )
            return
        from benchmarks import suite

        suite.run(
            arguments.device,
            tuple(arguments.groups.split(",")),
            arguments.rounds,
            arguments.output,
            arguments.commit,
            arguments.resume,
        )


if __name__ == "__main__":
    main()
