"""Reads untrusted files in a separate process, with limits: a malicious file can only crash that process."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from torchwheels import processes
from torchwheels.errors import UserError

Reader: TypeAlias = Callable[..., Any]

MEMORY = 12 * 10**9
"""Bytes of address space, for each process of a reader."""
FILE_SIZE = 4 * 10**9
SECONDS = 900
_KEPT = ("PATH", "LD_LIBRARY_PATH", "TORCHWHEELS_ARCHITECTURES")


def call(reader: Reader, path: Path, *arguments: Any) -> Any:
    """What `reader` returns for the file `path`, as JSON has it.

    An error says what it took too much of. The reader's folder goes away with all that it writes, and
    whatever it starts ends with it.
    """
    with tempfile.TemporaryDirectory(prefix="torchwheels-reads-") as folder:
        variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
        variables |= {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", "torchwheels.sandbox"]
        given = pickle.dumps((reader, (path.absolute(), *arguments)))
        pipe = subprocess.PIPE
        try:
            done = processes.run(command, SECONDS, given, env=variables, cwd=folder, stdout=pipe)
        except subprocess.TimeoutExpired:
            raise _refused(path, f"reading it takes more than {SECONDS} s") from None
    if done.returncode > 128:
        raise _refused(path, f"its reader died of signal {done.returncode - 128}")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise UserError(answer["refused"])
    if "error" in answer:
        raise _refused(path, answer["error"])
    return answer["result"]


def _refused(path: Path, why: str) -> UserError:
    return UserError(f"{path.name} cannot be checked: {why}")


def main() -> None:
    """The process of a reader: what to call comes in, and the answer goes out."""
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE_SIZE),
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
    answer = {}
    try:
        reader, arguments = pickle.load(sys.stdin.buffer)
        answer["result"] = reader(*arguments)
        text = json.dumps(answer)
    except UserError as error:
        text = json.dumps({"refused": str(error)})
    except MemoryError:
        text = json.dumps({"error": f"reading it takes more than {MEMORY / 1e9:g} GB of memory"})
    except Exception as error:  # of any kind, by what was read
        text = json.dumps({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
