"""The libraries as those who edit kernels compile them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from extops_build import ROOT


@pytest.mark.slow
def test_in_any_folder(tmp_path: Path) -> None:
    """Compiled into a folder with a relative path and a space in it."""
    pytest.importorskip("extops")
    if missing := [program for program in ("c++", "ninja") if shutil.which(program) is None]:
        pytest.skip(f"no {' and no '.join(missing)} to compile with")
    environment = {
        **os.environ,
        "EXTOPS_JIT": str(ROOT / "csrc"),
        "TORCH_EXTENSIONS_DIR": "a folder",
    }
    code = "import extops, torch; print(extops.round_ste(torch.tensor([0.2, 0.5])).tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0.0, 1.0]"
    assert list((tmp_path / "a folder").rglob("libextops_cpu.so"))
