"""No kernel that overlaps with the one before it may read by non-coherent loads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from extops_build import UserError, memory_model

KERNEL = """
extern "C" __global__ void copy(const float* RESTRICT from, float* RESTRICT to) {
  WAIT;
  to[threadIdx.x] = from[threadIdx.x];
}
"""
WAIT = "cudaGridDependencySynchronize()"


@pytest.fixture(scope="module")
def nvcc() -> Path:
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"), os.environ["PATH"]]
    found = shutil.which("nvcc", path=os.pathsep.join(map(str, folders)))
    if found is None:
        pytest.skip("there is no CUDA compiler (nvcc)")
    return Path(found)


def build(folder: Path, nvcc: Path, wait: str, restrict: str, code: str) -> Path:
    source, library = folder / "copy.cu", folder / "libcopy.so"
    source.write_text(KERNEL.replace("WAIT", wait).replace("RESTRICT", restrict))
    options = [
        "-shared",
        "-Xcompiler=-fPIC",
        "-cudart=none",
        f"-gencode=arch=compute_90,code={code}",
    ]
    subprocess.run([nvcc, *options, source, "-o", library], check=True)
    return library


@pytest.mark.parametrize("code", ["compute_90", "sm_90"])
def test_a_kernel_that_breaks_the_rule(tmp_path: Path, nvcc: Path, code: str) -> None:
    library = build(tmp_path, nvcc, WAIT, "__restrict__", code)
    with pytest.raises(
        UserError, match=r"libcopy\.so: copy may start before .*take `__restrict__` off"
    ):
        memory_model.check(library)


@pytest.mark.parametrize("code", ["compute_90", "sm_90"])
@pytest.mark.parametrize(("wait", "restrict"), [(WAIT, ""), ("", "__restrict__")])
def test_kernels_that_keep_it(
    tmp_path: Path, nvcc: Path, code: str, wait: str, restrict: str
) -> None:
    memory_model.check(build(tmp_path, nvcc, wait, restrict, code))


PTX = """
.visible .entry good(
	griddepcontrol.wait;
	ld.global.f32 %f1, [%rd1];
}
.entry bad(
	griddepcontrol.wait;
	ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
}
.visible .entry alone(
	ld.global.nc.f32 %f1, [%rd1];
}
"""
SASS = """
		Function : good
        /*0010*/    ACQBULK ;
        /*0020*/    LDG.E R10, desc[UR10][R10.64] ;
		Function : bad
        /*0010*/    ACQBULK ;
        /*0020*/    @P1 LDG.E.128.CONSTANT R10, desc[UR10][R10.64] ;
		Function : alone
        /*0020*/    LDG.E.CONSTANT R10, desc[UR10][R10.64] ;
"""


def test_listings() -> None:
    assert [*memory_model.violations(memory_model.PTX, PTX)] == ["bad"]
    assert [*memory_model.violations(memory_model.SASS, SASS)] == ["bad"]


def test_a_library_without_gpu_code_does_not_pass(tmp_path: Path) -> None:
    library = tmp_path / "libempty.so"
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", library], check=True)
    with pytest.raises(UserError, match=re.escape("libempty.so")):
        memory_model.check(library)
