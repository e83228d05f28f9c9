"""Finding compilers, and counting jobs, on machines made of files."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service import ROOT, ServiceError, compile, matrix, toolchain

MIB = 2**20


def fake_toolkit(home: Path, version: str, architectures: str = "75 80 86 90 100 120") -> Path:
    """A toolkit whose nvcc only says what it is."""
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "lib" / "libcudart_static.a").touch()
    codes = "\\n".join(f"sm_{number}" for number in architectures.split())
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "release, V{version}" || printf "{codes}\\n"\n'
    )
    nvcc.chmod(0o755)
    return home


def variant(name: str) -> matrix.Variant:
    return matrix.load().variant(name)


def find(name: str, environ: dict[str, str], site_packages: Path) -> toolchain.CudaToolkit:
    return toolchain.find_cuda(variant(name), environ, site_packages)


def test_cuda_home_of_the_same_major_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = fake_toolkit(tmp_path / "cuda", "13.0.88")
    assert find("cu130", {"CUDA_HOME": str(home)}, tmp_path).home == home
    assert "names CUDA" not in capsys.readouterr().out


@pytest.mark.parametrize("version", ["13.0.88", "13.4.1"])
def test_another_minor_version_is_used_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    home = fake_toolkit(tmp_path / "cuda", version)
    assert find("cu132", {"CUDA_HOME": str(home)}, tmp_path).version == version
    assert "cu132 names CUDA 13.2, another CUDA 13 serves" in capsys.readouterr().out


def test_pip_serves_where_cuda_home_is_of_another_major(tmp_path: Path) -> None:
    home = fake_toolkit(tmp_path / "cuda", "12.4.131")
    pip = fake_toolkit(tmp_path / "nvidia" / "cu13", "13.0.88")
    assert find("cu130", {"CUDA_HOME": str(home)}, tmp_path).home == pip
    assert toolchain.toolkit_of_cuda_home(variant("cu130"), {"CUDA_HOME": str(home)}) is None


def test_cuda_12_is_not_to_be_had_from_pip(tmp_path: Path) -> None:
    with pytest.raises(ServiceError) as error:
        find("cu124", {}, tmp_path)
    assert str(error.value) == (
        "cu124 needs a CUDA 12 compiler, and CUDA_HOME is not set: "
        "set CUDA_HOME to a CUDA 12 toolkit (12.4 or newer), "
        "or build in the image nvidia/cuda:12.4.1-devel-ubuntu22.04 with Docker"
    )


def test_what_pip_must_install(tmp_path: Path) -> None:
    home = fake_toolkit(tmp_path / "cuda", "13.0.88")
    assert toolchain.missing_requirements(variant("cpu"), {}) == ()
    assert toolchain.missing_requirements(variant("cu130"), {"CUDA_HOME": str(home)}) == ()
    assert toolchain.missing_requirements(variant("cu130"), {}) == (
        "cuda-toolkit[nvcc,crt,cudart,cccl,nvvm]==13.0.2",
    )
    with pytest.raises(ServiceError, match="cu124 needs a CUDA 12 compiler"):
        toolchain.missing_requirements(variant("cu124"), {})


def test_cuda_13_is_to_be_had_from_pip(tmp_path: Path) -> None:
    home = fake_toolkit(tmp_path / "cuda", "12.4.131")
    with pytest.raises(ServiceError, match=r"is of CUDA 12\.4\.131: .*pip install 'cuda-toolkit\["):
        find("cu130", {"CUDA_HOME": str(home)}, tmp_path)


def test_cuda_home_without_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(
        ServiceError, match=r"but there is no .*/bin/nvcc: set it to .* or unset it"
    ):
        find("cu130", {"CUDA_HOME": str(tmp_path)}, tmp_path)


def test_architectures_the_compiler_does_not_know(tmp_path: Path) -> None:
    home = fake_toolkit(tmp_path / "cuda", "12.4.131", "70 75 80 86 90")
    with pytest.raises(ServiceError, match=r"cannot compile for .* 10\.0, 12\.0 of cu128: set"):
        find("cu128", {"CUDA_HOME": str(home)}, tmp_path)


def test_static_runtime_is_missing(tmp_path: Path) -> None:
    home = fake_toolkit(tmp_path / "cuda", "13.0.88")
    toolkit = toolchain.read_toolkit(home)
    assert toolkit.libraries == home / "lib"
    (home / "lib" / "libcudart_static.a").unlink()
    with pytest.raises(ServiceError, match=r"has no libcudart_static\.a in lib64 or lib: install"):
        toolkit.libraries  # noqa: B018


def test_no_host_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ServiceError, match=r"no C\+\+ compiler g\+\+ on PATH: .*`apt-get install g\+\+`"
    ):
        toolchain.host_compiler()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("ninja", "no ninja for .*: run `pip install ninja`"),
        ("torch", "run `pip install --no-deps"),
    ],
)
def test_build_needs(monkeypatch: pytest.MonkeyPatch, module: str, message: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else find_spec(name)
    )
    with pytest.raises(ServiceError, match=message):
        compile.build(variant("cpu"))


def test_torch_too_old_for_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    torch = importlib.machinery.ModuleSpec("torch", None, origin="/somewhere/torch/__init__.py")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: torch if name == "torch" else find_spec(name)
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cu128")
    with pytest.raises(ServiceError) as error:
        compile._torch_headers()
    assert str(error.value) == (
        "the headers of torch >= 2.10 are needed, and torch is 2.9.1+cu128: "
        f"run `pip install --no-deps torch=={matrix.load().headers_torch}`"
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "set EXTOPS_VARIANT to one of release, cpu, .* or install a wheel"),
        (
            {"EXTOPS_VARIANT": "cuda"},
            "there is no variant 'cuda' in matrix.toml; it has release, cpu, cu121",
        ),
    ],
    ids=["none", "unknown"],
)
def test_setup_wants_a_variant(asked: dict[str, str], message: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "EXTOPS_VARIANT"}
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env={**environ, **asked},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("extops: ")
    assert re.search(message, line)


def test_pip_shows_what_setup_wants(tmp_path: Path) -> None:
    """`pip install` of a source tree does not compile something by guesswork, and says why not."""
    environ = {name: value for name, value in os.environ.items() if name != "EXTOPS_VARIANT"}
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, f"--target={tmp_path}", str(ROOT)], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "extops: building extops from source needs to know for what: set" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_build_without_torch(tmp_path: Path) -> None:
    """A Python that has all that this one has, but no torch."""
    for entry in toolchain.SITE_PACKAGES.iterdir():
        if not entry.name.startswith("torch"):
            (tmp_path / entry.name).symlink_to(entry)
    done = subprocess.run(
        [sys.executable, "-S", "setup.py", "--quiet", "build_libraries"],
        cwd=ROOT,
        env={**os.environ, "EXTOPS_VARIANT": "cpu", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"extops: the headers of torch >= 2.10 are needed, and {sys.executable} has no torch: "
        f"run `pip install --no-deps torch=={matrix.load().headers_torch}`"
    )


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """64 GiB of memory free, and no limits."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   67108864 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    return tmp_path


def put(machine: Path, path: str, text: str) -> None:
    (machine / path).parent.mkdir(parents=True, exist_ok=True)
    (machine / path).write_text(text + "\n")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.usefixtures("cores")
class TestJobs:
    def test_cores(self, machine: Path) -> None:
        assert toolchain.parallel_jobs({}, machine) == 16

    def test_max_jobs(self, machine: Path) -> None:
        assert toolchain.parallel_jobs({"MAX_JOBS": "3"}, machine) == 3

    @pytest.mark.parametrize("asked", ["0", "-1", "many"])
    def test_wrong_max_jobs(self, machine: Path, asked: str) -> None:
        with pytest.raises(ServiceError, match=f"MAX_JOBS is '{asked}', but a number"):
            toolchain.parallel_jobs({"MAX_JOBS": asked}, machine)

    def test_free_memory(self, machine: Path) -> None:
        put(machine, "proc/meminfo", f"MemAvailable: {3 * 512 * 1024} kB")
        assert toolchain.parallel_jobs({}, machine) == 3

    def test_cgroup_version_2(self, machine: Path) -> None:
        put(machine, "proc/self/cgroup", "0::/system/job")
        put(machine, "sys/fs/cgroup/system/job/cpu.max", "max 100000")
        put(machine, "sys/fs/cgroup/system/cpu.max", "250000 100000")
        assert toolchain.parallel_jobs({}, machine) == 2
        put(machine, "sys/fs/cgroup/system/job/memory.max", str(900 * MIB))
        assert toolchain.parallel_jobs({}, machine) == 1

    def test_cgroup_version_1_in_a_container(self, machine: Path) -> None:
        put(machine, "proc/self/cgroup", "4:memory:/docker/1a2b\n3:cpu,cpuacct:/docker/1a2b")
        put(machine, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(4 * 512 * MIB))
        put(machine, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
        put(machine, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
        assert toolchain.parallel_jobs({}, machine) == 4

    def test_never_none(self, machine: Path) -> None:
        put(machine, "sys/fs/cgroup/memory.max", str(10 * MIB))
        assert toolchain.parallel_jobs({}, machine) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH")
def test_this_machine_can_build() -> None:
    assert Path(toolchain.host_compiler()).is_file()
    assert toolchain.parallel_jobs({}) >= 1
