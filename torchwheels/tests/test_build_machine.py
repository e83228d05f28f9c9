"""What a build sees of this machine: its compilers and memory, and nothing of its settings."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from forged_wheels import find_nvcc
from torchwheels import environments
from torchwheels.build import check_import, steps, toolchain
from torchwheels.errors import UserError
from torchwheels.options import indexes, project, releases
from torchwheels.system import machines, processes
from torchwheels.wheel import archive

HERE = machines.MACHINES[platform.machine()]

TARGET = releases.load().target("3.11-cu130")
GB = 10**9


def machine(root: Path, available: int, limit: str = "max", quota: str = "max 100000") -> Path:
    """A machine made of files, whose control group is as seen in a container."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemAvailable:   {available // 1024} kB\n")
    (root / "proc" / "self" / "cgroup").write_text("0::/docker/abc\n")
    group = root / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "cpu.max").write_text(f"{quota}\n")
    return root


@pytest.mark.parametrize(
    ("limits", "jobs"),
    [
        ({"available": 100 * GB}, len(os.sched_getaffinity(0))),
        ({"available": 1 * GB}, 1),
        ({"available": 100 * GB, "limit": str(3 * GB)}, 1),
        ({"available": 100 * GB, "quota": "100000 100000"}, 1),
    ],
)
def test_jobs_follow_cores_and_memory(
    tmp_path: Path, limits: dict[str, str], jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    root = machine(tmp_path, **limits)  # type: ignore[arg-type]
    assert toolchain.parallel_jobs(2.5, root) == jobs


def test_max_jobs_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "7")
    assert toolchain.parallel_jobs(2.5, machine(tmp_path, GB)) == 7
    for other in ("two", "²"):
        monkeypatch.setenv("MAX_JOBS", other)
        with pytest.raises(UserError, match=f"MAX_JOBS is '{other}', but a number of jobs from 1"):
            toolchain.parallel_jobs(2.5, tmp_path)


def fake_toolkit(home: Path, version: str, codes: str = "75 80 86 90 100 120") -> Path:
    """A toolkit whose nvcc only says what it is."""
    (home / "bin").mkdir(parents=True)
    known = "\\n".join(f"sm_{code}" for code in codes.split())
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "release, V{version}" || printf "{known}\\n"\n'
    )
    nvcc.chmod(0o755)
    return home


def test_toolkit_is_that_of_cuda_home_or_pips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_toolkit(tmp_path / "nvidia" / "cu13", "13.4.1")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert toolchain.find_toolkit(TARGET, tmp_path).version == "13.4.1"  # type: ignore[union-attr]
    assert toolchain.pip_toolkit(TARGET) == (releases.load().toolkit,)
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "other-major", "12.4.131")))
    assert toolchain.find_toolkit(TARGET, tmp_path).version == "13.4.1"  # type: ignore[union-attr]
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "own", "13.0.88")))
    assert toolchain.find_toolkit(TARGET, tmp_path).version == "13.0.88"  # type: ignore[union-attr]
    assert toolchain.pip_toolkit(TARGET) == ()


@pytest.mark.parametrize(
    ("target", "version", "codes", "message"),
    [
        (
            "3.11-cu124",
            "13.0.88",
            "90",
            r"needs a CUDA 12 compiler, and CUDA_HOME .* names none",
        ),
        (
            "3.11-cu130",
            "13.0.88",
            "75 80 86 90 100",
            r"cannot compile for .* 12\.0\+PTX of 3\.11.*, or leave them out",
        ),
    ],
)
def test_errors_of_a_toolkit_that_does_not_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    version: str,
    codes: str,
    message: str,
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "cuda", version, codes)))
    with pytest.raises(UserError, match=message):
        toolchain.pip_toolkit(releases.load().target(target))
        toolchain.find_toolkit(releases.load().target(target), tmp_path)


def test_wheels_of_other_compilers_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this machine may be newer in the next build."""
    cpu = releases.load().target("3.11-cpu")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    found = {toolchain.compilers_of(cpu), toolchain.compilers_of(TARGET)}
    for version in ("13.0.88", "13.0.96"):
        monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / version, version)))
        found.add(toolchain.compilers_of(TARGET))
        assert toolchain.compilers_of(cpu) in found
    assert len(found) == 4
    compiler = dataclasses.replace(toolchain.host_compiler(HERE), version="g++ 99")
    monkeypatch.setattr(toolchain, "host_compiler", lambda _: compiler)
    assert toolchain.compilers_of(cpu) not in found


def test_toolkit_of_pip_is_laid_out_as_cmake_expects_it(tmp_path: Path) -> None:
    pips = tmp_path / "nvidia" / "cu13"
    for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib/libcudadevrt.a"):
        (pips / name).parent.mkdir(parents=True, exist_ok=True)
        (pips / name).touch()
    for name in ("libcudart.so.13", "libnvrtc-builtins.so.13.0", "libcupti.so", "libcupti.so.13"):
        (pips / "lib" / name).write_text(name)
    toolkit = toolchain.CudaToolkit(pips, "13.0.88")
    driver = tmp_path / "driver" / "libcuda.so"
    found = toolchain.with_usual_layout(toolkit, tmp_path / "cuda", driver)
    assert (found.home, found.version) == (tmp_path / "cuda", "13.0.88")
    for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib64/libcudadevrt.a"):
        assert (found.home / name).is_file()
    # nvcc looks for the rest beside the name that it was called by.
    assert not (found.home / "bin").is_symlink()
    assert (found.home / "lib64" / "libcudart.so").read_text() == "libcudart.so.13"
    assert (found.home / "lib" / "libnvrtc-builtins.so").read_text() == "libnvrtc-builtins.so.13.0"
    assert (found.home / "lib64" / "libcupti.so").read_text() == "libcupti.so"
    assert (found.home / "lib64" / "stubs").readlink() == driver.parent
    assert toolchain.with_usual_layout(found, tmp_path / "again", driver) == found


def test_toolkit_that_lacks_a_usual_folder_keeps_its_own_stubs(tmp_path: Path) -> None:
    """As conda's has no lib64."""
    for name in ("bin", "include", "nvvm/lib64", "lib/stubs"):
        (tmp_path / "home" / name).mkdir(parents=True)
    (tmp_path / "home" / "lib" / "stubs" / "libcuda.so").write_text("its own")
    toolkit = toolchain.CudaToolkit(tmp_path / "home", "13.0.88")
    driver = tmp_path / "driver" / "libcuda.so"
    found = toolchain.with_usual_layout(toolkit, tmp_path / "cuda", driver)
    assert (found.home / "lib64" / "stubs" / "libcuda.so").read_text() == "its own"


def test_driver_of_cuda_can_be_linked_with_where_there_is_none(tmp_path: Path) -> None:
    """As st-attn is."""
    header = tmp_path / "include" / "cuda.h"
    header.parent.mkdir()
    header.write_text(
        "#define cuGet cuGet_v2\nCUresult CUDAAPI cuGet(int *x);\nCUresult cuInit(int);\n"
    )
    toolkit = toolchain.CudaToolkit(tmp_path, "13.0.88")
    driver = toolchain.make_driver(tmp_path / "driver", toolkit, "gcc")
    program = tmp_path / "program"
    code = "int cuInit(int); int cuGet_v2(void);\nint main(void) { return cuInit(0) != 100 || cuGet_v2() != 100; }\n"
    linked = ["gcc", "-x", "c", "-", "-o", str(program), f"-L{driver.parent}", "-lcuda"]
    subprocess.run(linked, input=code, text=True, check=True)
    driver.rename(driver.with_name("libcuda.so.1"))  # the name by which a program asks for it
    variables = {**os.environ, "LD_LIBRARY_PATH": str(driver.parent)}
    subprocess.run([str(program)], env=variables, check=True)


def test_nvcc_of_the_system_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "system"
    system.mkdir()
    for name in ("nvcc", "cmake"):
        (system / name).touch(mode=0o755)
    monkeypatch.setattr(toolchain, "_COMMON_FOLDERS", (str(system), "/usr/bin"))
    path = os.pathsep.join(toolchain.common_path(tmp_path / "work"))
    assert shutil.which("nvcc", path=path) is None
    assert shutil.which("cmake", path=path) == str(tmp_path / "work" / "commands-0" / "cmake")


@pytest.mark.slow
def test_gpu_code_of_several_files_is_linked_and_optimised(tmp_path: Path) -> None:
    """As `CUDAExtension(dlink=True)` has it: pip's toolkit has the library for that in another folder."""
    nvcc = Path(find_nvcc(tmp_path).nvcc).resolve()
    toolkit = toolchain.read_toolkit(nvcc.parents[1])
    driver = toolchain.make_driver(tmp_path / "driver", toolkit, "gcc")
    home = toolchain.with_usual_layout(toolkit, tmp_path / "cuda", driver).home
    (tmp_path / "a.cu").write_text(
        "__device__ float f(float);\n__global__ void k(float* x) { *x = f(*x); }\n"
    )
    (tmp_path / "b.cu").write_text("__device__ float f(float x) { return 2 * x; }\n")
    command = [home / "bin" / "nvcc", "-arch=sm_90", "-dlto"]
    for words in (["-dc", "a.cu", "b.cu"], ["-dlink", "a.o", "b.o", "-o", "linked.o"]):
        subprocess.run([*command, *words], cwd=tmp_path, check=True)
    assert (tmp_path / "linked.o").is_file()


def test_only_pips_configuration_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = ("CFLAGS", "CXX", "CUDA_HOME", "PYTHONPATH", "LD_PRELOAD", "GITHUB_TOKEN")
    for name in hostile:
        monkeypatch.setenv(name, "leaks")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for file, text in (
        (
            "config/pip/pip.conf",
            "[global]\ncert = a\nno-index = true\n[install]\nno-binary = x\n  y\n",
        ),
        (".pip/pip.conf", "[global]\nproxy = old\n[download]\nno-binary = z\n"),
        (".netrc", ""),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/theirs")
    monkeypatch.setenv("PIP_CERT", "b")
    monkeypatch.setenv("PIP_FIND_LINKS", "/one https://two")
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:p'w@x")
    variables = environments.clean_variables(tmp_path / "home")
    assert "leaks" not in variables.values()
    assert variables["GITHUB_REPOSITORY"] == "somebody/theirs"
    given = {name: value for name, value in variables.items() if name.startswith("PIP_")}
    assert (
        given.items()
        >= {
            "PIP_CERT": "b",  # a variable counts more than a file
            "PIP_INDEX_URL": "https://me:p'w@x",
            "PIP_NO_BINARY": "x y",
            "PIP_NO_INDEX": "true",
            "PIP_PROXY": "old",
        }.items()
    )
    of_uv = {"SSL_CERT_FILE": "b", "UV_DEFAULT_INDEX": "https://me:p'w@x", "ALL_PROXY": "old"}
    assert variables.items() >= {**of_uv, "UV_FIND_LINKS": "/one,https://two"}.items()
    assert indexes.uv_options() == ["--no-index", "--no-binary=x", "--no-binary=y"]
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://mine")  # uv's own words count more
    assert environments.clean_variables(tmp_path)["UV_DEFAULT_INDEX"] == "https://mine"
    assert indexes.pip_settings("download")["no-binary"] == "z"
    assert variables["NETRC"] == str(tmp_path / ".netrc")
    assert variables["HOME"] == str(tmp_path / "home")


def index_of_torch(folder: Path, version: str, cuda: str | None) -> str:
    """An index with a torch that is nothing but its version."""
    said = f"__version__ = {version!r}\ncuda = {cuda!r}\n"
    return add_to_index(folder, "torch", version, {"torch/version.py": said})


def add_to_index(
    folder: Path, name: str, version: str, files: dict[str, str], metadata: str = ""
) -> str:
    archive = folder / name / f"{name}-{version}-py3-none-any.whl"
    archive.parent.mkdir(parents=True, exist_ok=True)
    with (archive.parent / "index.html").open("a") as page:
        page.write(f'<a href="{archive.name}">{archive.name}</a>\n')
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(archive, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return folder.as_uri()


@pytest.fixture
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv finds what TORCHWHEELS_TORCH_INDEX names and nothing else; the cache is empty, and its disk has space."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("TORCHWHEELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=9 * GB))
    no_tools = dataclasses.replace(releases.load(), tools=())
    monkeypatch.setattr(releases, "load", lambda: no_tools)


PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.slow
def test_kept_environment_is_of_the_index_at_hand_and_is_named(
    own_index: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """An index of CPU builds, and then one that has torch for CUDA alone, as PyPI has."""
    target = releases.load().target(f"{PYTHON}-cpu")
    for name, version, cuda in (
        ("small", f"{target.torch}+cpu", None),
        ("large", target.torch, "13.0"),
    ):
        index = index_of_torch(tmp_path / name, version, cuda)
        monkeypatch.setenv("TORCHWHEELS_TORCH_INDEX", index)
        folders = {environments.with_torch(target, ()).folder for _ in range(2)}
        (folder,) = folders
        said = capsys.readouterr().out.splitlines()
        of_cuda = f" of CUDA {cuda}" if cuda else ""
        named = f"torchwheels: using torch {version}{of_cuda} in {folder}"
        size = f"it takes {1 if name == 'small' else 5} GB in {tmp_path / 'cache'}"
        installing = f"torchwheels: installing torch {target.torch} for {target.name}, once: {size}"
        assert said == [installing, named, named]


@pytest.mark.slow
def test_targets_share_the_torch_that_uv_finds_for_them(
    own_index: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """Also with ccache on PATH, and where one of them wants the CUDA compiler, which is then added."""
    cpu, cuda = (releases.load().target(f"{PYTHON}-{label}") for label in ("cpu", "cu130"))
    index = index_of_torch(tmp_path / "pypi", cuda.torch, "13.0")
    add_to_index(tmp_path / "pypi", "toolkit", "1", {"nvcc.py": ""})
    monkeypatch.setenv("TORCHWHEELS_TORCH_INDEX", index)
    first = environments.with_torch(cpu, ())
    assert not (first.site_packages / "nvcc.py").exists()
    (tmp_path / "ccache").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    calls = [(cpu, ()), (cuda, ()), (cuda, ("toolkit",)), (cuda, ("toolkit",)), (cpu, ())]
    for target, toolkit in calls:
        for any_cuda in (False, True):
            assert environments.with_torch(target, toolkit, any_cuda) == first
    assert (first.site_packages / "nvcc.py").exists()
    said = [x for x in capsys.readouterr().out.splitlines() if "using torch" not in x]
    assert [x.partition(",")[0] for x in said] == [
        f"torchwheels: installing torch {cpu.torch} for {cpu.name}",
        f"torchwheels: installing CUDA's compiler for {cuda.name}",
    ]
    index = index_of_torch(tmp_path / "small", f"{cpu.torch}+cpu", None)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index)
    assert environments.with_torch(cpu, ()) != first
    assert environments.with_torch(cuda, ()) == first


@pytest.mark.slow
def test_tools_are_the_files_of_the_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not others of that name and version, wherever uv finds them."""
    index = add_to_index(tmp_path, "wheel", "0.45.1", {})
    monkeypatch.setenv("PIP_INDEX_URL", index)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    here = environments.make(sys.executable, tmp_path / "empty")
    with pytest.raises(UserError, match=r"Hash mismatch for `wheel==0\.45\.1`") as error:
        environments.install(
            here, ["wheel==0.45.1"], environments.clean_variables(tmp_path), hashed=True
        )
    assert str(error.value).startswith("uv cannot install wheel==0.45.1 (")


def test_a_full_disk_is_no_fault_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "error: Failed to copy to x\n  cause: No space left on device (os error 28)\n"
    monkeypatch.setattr(processes, "follow", lambda *_, **__: (2, said))
    here = environments.Environment(tmp_path)
    with pytest.raises(UserError) as error:
        environments.install(here, ["x"], {})
    assert str(error.value).startswith(
        "uv cannot install x (Failed to copy to x: No space left on "
    )
    assert str(error.value).endswith(
        "): free some space (`torchwheels clean` removes what is kept between builds)"
    )


def test_a_wheel_that_uv_does_not_take_is_no_fault_of_the_network(tmp_path: Path) -> None:
    info, path = "mp-0.1.dist-info", tmp_path / "mp-0.1-py3-none-any.whl"
    files = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: mp\nVersion: 0.1\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": b"no section",
    }
    archive.write_wheel(path, archive.with_record(files, f"{info}/RECORD"))
    base = environments.Environment(Path(sys.prefix))
    with pytest.raises(UserError) as error:
        check_import.install(path, base, tmp_path / "here")
    said = str(error.value)
    assert said.startswith(f"uv cannot install {path} (Failed to install: mp-0.1-py3-")
    assert said.endswith(
        ": The wheel is invalid: `entry_points.txt` is invalid: expected a section header at line 1)"
    )


def test_requirements_that_contradict_each_other_are_named(
    own_index: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("one", "1"), ("two", "2")):
        wants = f"Requires-Dist: shared=={version}\n"
        index = add_to_index(tmp_path, name, "1", {}, wants)
    add_to_index(tmp_path, "shared", "1", {})
    monkeypatch.setenv("PIP_INDEX_URL", index)
    here = environments.Environment(Path(sys.prefix))
    options = [f"--target={tmp_path / 'here'}", "one", "two"]
    with pytest.raises(UserError) as error:
        environments.install(here, options, environments.clean_variables(tmp_path))
    said = str(error.value)
    for each in (
        "shared==1",
        "shared==2",
        "we can conclude that your requirements are unsatisfiable",
    ):
        assert each in said
    assert said.endswith(": check these names, the network and pip's configuration")


def test_the_callers_constraints_count(
    own_index: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1", "2"):
        index = add_to_index(tmp_path, "shared", version, {})
    (tmp_path / "theirs").write_text("shared<2")
    monkeypatch.setenv("PIP_INDEX_URL", index)
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "theirs"))
    here = environments.Environment(Path(sys.prefix))
    wanted = [f"--target={tmp_path / 'here'}", "shared>1"]
    with pytest.raises(
        UserError, match=r"you require shared>=2\. And because you require shared<2"
    ):
        environments.install(here, wanted, environments.clean_variables(tmp_path))


def test_an_environment_has_what_is_below_and_does_not_change_that(
    own_index: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1", "2"):
        index = add_to_index(tmp_path, "shared", version, {"shared.py": f"version = {version}"})
    monkeypatch.setenv("PIP_INDEX_URL", index)
    variables = environments.clean_variables(tmp_path)
    base = environments.make(sys.executable, tmp_path / "base")
    environments.install(base, ["shared==1"], variables)
    files = sorted(base.site_packages.rglob("*"))
    above = environments.on_top_of(base, tmp_path / "above")
    said = ["import shared, importlib.metadata as m; print(shared.version, m.version('shared'))"]
    for requirement, version in (("shared", b"1 1"), ("shared>1", b"2 2")):
        environments.install(above, [requirement], variables)
        assert subprocess.check_output([above.python, "-B", "-c", *said]).strip() == version
    assert len([*above.site_packages.glob("shared-*")]) == 1
    assert sorted(base.site_packages.rglob("*")) == files


def test_cmake_of_the_environment_below_finds_its_files(
    own_index: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module looks for them by its metadata: a setup.py that imports it ended in an assertion."""
    code = "from importlib.metadata import files\n"
    code += "(data,) = [x.locate().read_text() for x in files('cmake') if str(x) == 'cmake.txt']"
    for version in ("1", "2"):
        index = add_to_index(
            tmp_path, "cmake", version, {"cmake.py": code, "cmake.txt": f"data {version}"}
        )
    monkeypatch.setenv("PIP_INDEX_URL", index)
    variables = environments.clean_variables(tmp_path)
    base = environments.make(sys.executable, tmp_path / "base")
    environments.install(base, ["cmake==1"], variables)
    above = environments.on_top_of(base, tmp_path / "above")
    ask = [above.python, "-c", "import cmake; print(cmake.data)"]
    assert subprocess.check_output(ask) == b"data 1\n"
    environments.install(above, ["cmake==2"], variables)
    assert subprocess.check_output(ask) == b"data 2\n"


def test_places_of_torch_are_known_without_their_passwords(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHWHEELS_TORCH_INDEX", "https://localhost/one")
    one = indexes.places_of_torch()
    monkeypatch.setenv("TORCHWHEELS_TORCH_INDEX", "https://me:password@localhost/one")
    assert indexes.places_of_torch() == one
    monkeypatch.setenv("TORCHWHEELS_TORCH_INDEX", "https://localhost/other")
    assert indexes.places_of_torch() != one


def test_a_missing_compiler_is_said_before_a_torch_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        environments, "with_torch", lambda *_, **__: pytest.fail("torch is fetched")
    )
    with pytest.raises(UserError, match=r"\bgcc\b.*install"):
        toolchain.tools(project.Project(), TARGET)


def test_missing_python_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"there is no Python 3\.99 on PATH: install one"):
        environments.find_python("3.99")


def test_python_of_pyenv_is_found_where_another_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / f"python{PYTHON}"
    shim.write_text(
        f'#!/bin/sh\n[ "${{PYENV_VERSION-}}" = {PYTHON} ] && exec {sys.executable} "$@"'
    )
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    monkeypatch.setenv("PYENV_VERSION", "3.99")
    monkeypatch.setattr(sys, "version_info", (3, 99))  # that of the tool
    found = subprocess.check_output([environments.find_python(PYTHON), "-V"], text=True)
    assert found.startswith(f"Python {PYTHON}.")


CPP_EXTENSION = """
CUDA_HOME = "/usr/local/cuda"


class BuildExtension:
    def __init__(self, dist, use_ninja=True):
        self.use_ninja = use_ninja

    def build_extension(self, extension):
        pass


class Distribution:
    ext_modules = None


class Extension:
    def __init__(self, flags):
        self.extra_compile_args, self.include_dirs = flags, []


class Generating(BuildExtension):
    # Adds a folder once it has written into it, as that of pov-shuffle does.

    def build_extension(self, extension):
        extension.include_dirs.append("generated")
        super().build_extension(extension)


def include_late(use_ninja):
    Distribution.ext_modules, extension = [], Extension([])
    Generating(Distribution(), use_ninja=use_ninja).build_extension(extension)
    return extension.include_dirs[0]


def build(flags):
    BuildExtension(Distribution()).build_extension(Extension(flags))
    return True


def by_ninja(source, flag):
    Distribution.ext_modules = [extension] = [Extension([flag])]
    extension.sources, extension.include_dirs = [source], ["include"]
    command = BuildExtension(Distribution(), use_ninja=False)
    command.build_extension(extension)
    return command.use_ninja, *extension.include_dirs
"""


SETTINGS = {"hide-toolkit": False, "pretend-gpu": None, "architectures": "9.0", "gencode": []}


def start(folder: Path, ask: str, **settings: object) -> str:
    """What a Python of a build says, beside a torch that has found a toolkit and no GPU."""
    for name, text in {
        "torch/__init__.py": "",
        "torch/cuda.py": "is_available = lambda: False\n",
        "torch/utils/__init__.py": "",
        "torch/utils/cpp_extension.py": CPP_EXTENSION,
        "start.py": (toolchain.WRAPPERS / "python" / "start_of_python.py").read_text(),
        "start.json": json.dumps({**SETTINGS, **settings}),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    code = f"import start, torch.cuda, torch.utils.cpp_extension; print({ask})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        ("is_available()", "True"),
        ("device_count()", "1"),
        ("current_device()", "0"),
        ("get_device_capability(0)", "(12, 0)"),
        ("get_device_name()", "a pretended GPU of compute capability 12.0"),
        ("get_device_properties('cuda').major", "12"),
        ("get_device_properties(0).name", "a pretended GPU of compute capability 12.0"),
        ("get_device_properties(0).total_memory // 10**9", "85"),
    ],
)
def test_gpu_is_pretended_only_where_asked(tmp_path: Path, ask: str, answer: str) -> None:
    assert start(tmp_path, f"torch.cuda.{ask}", **{"pretend-gpu": "12.0"}) == answer
    assert start(tmp_path, "torch.cuda.is_available()") == "False"
    assert (
        start(tmp_path, "torch.cuda.get_device_capability()", **{"pretend-gpu": "10.0f"})
        == "(10, 0)"
    )


def test_toolkit_of_the_system_is_hidden_from_torch_in_a_cpu_target(tmp_path: Path) -> None:
    ask = "torch.utils.cpp_extension.CUDA_HOME"
    assert start(tmp_path, ask, **{"hide-toolkit": True}) == "None"
    assert start(tmp_path, ask) == "/usr/local/cuda"


@pytest.mark.parametrize("architectures", ["8.0;9.0+PTX", "10.0f"])
def test_architectures_are_the_targets_whatever_the_project_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architectures: str
) -> None:
    """Also those of a family of GPUs, which torch does not know."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "3.7+PTX")  # as the setup.py of pointnet2_ops does
    flags = "torch.utils.cpp_extension._get_cuda_arch_flags"
    ask = f"{flags}(), {flags}([]), {flags}(['-arch=sm_80']), __import__('os').environ['TORCH_CUDA_ARCH_LIST']"
    settings = {"architectures": architectures, "gencode": ["-gencode=x"]}
    notice = f"torchwheels: its setup sets TORCH_CUDA_ARCH_LIST to 3.7+PTX; it is built for {architectures}"
    found = ["-gencode=x"], ["-gencode=x"], [], architectures
    assert start(tmp_path, ask, **settings) == f"{notice}\n{' '.join(map(str, found))}"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
    assert start(tmp_path, ask, **settings) == " ".join(map(str, found))


@pytest.mark.parametrize(
    ("theirs", "kept"),
    [
        # as the setup.py of causal-conv1d does
        (
            ["-O3", "-gencode", "arch=compute_75,code=sm_75", "--threads", "4"],
            ["-O3", "--threads", "4"],
        ),
        (["-gencode=arch=compute_75,code=sm_75", "-lineinfo"], ["-lineinfo"]),
        (["--generate-code=arch=compute_75,code=sm_75", "-arch=sm_75", "-archive"], ["-archive"]),
        # what is written for one GPU alone does not compile for another
        (
            ["-gencode", "arch=compute_90a,code=sm_90a"],
            ["-gencode", "arch=compute_90a,code=sm_90a"],
        ),
    ],
)
def test_architectures_of_a_project_in_its_flags_are_left_out(
    tmp_path: Path, theirs: list[str], kept: list[str]
) -> None:
    settings = {"architectures": "9.0", "gencode": ["-gencode=x"]}
    build = f"flags := {{'cxx': ['-O1'], 'nvcc': {theirs}}}, torch.utils.cpp_extension.build(flags)"
    found = start(tmp_path, f"({build}) and flags", **settings)
    notice = "torchwheels: its setup asks nvcc for sm_75; it is built for 9.0\n"
    said = notice if theirs != kept else ""
    assert found == f"{said}{ ({'cxx': ['-O1'], 'nvcc': kept}) }"


def test_a_folder_that_is_added_late_is_absolute_for_ninja(tmp_path: Path) -> None:
    ask = "torch.utils.cpp_extension.include_late"
    assert start(tmp_path, f"{ask}(True)") == f"{tmp_path}/generated"


@pytest.mark.parametrize(
    ("source", "flag", "by_ninja"),
    [("a.cpp", "-I/include", True), ("a.c", "-O1", False), ("a.cpp", "-Iinclude", False)],
)
def test_ninja_compiles_what_it_takes_as_it_is(
    source: str, flag: str, by_ninja: bool, tmp_path: Path
) -> None:
    """Also of a project that turns it off, which would be compiled one file after the other."""
    ask = f"torch.utils.cpp_extension.by_ninja({source!r}, {flag!r})"
    folder = str(tmp_path / "include") if by_ninja else "include"
    assert start(tmp_path, ask) == str((by_ninja, folder))


def test_flags_without_a_compiler_of_gpu_code_are_left_alone(tmp_path: Path) -> None:
    settings = {"architectures": "9.0", "gencode": ["-gencode=x"]}
    for flags in (["-arch=sm_75"], {"cxx": ["-arch=x"]}):
        build = f"(flags := {flags}, torch.utils.cpp_extension.build(flags)) and flags"
        assert start(tmp_path, build, **settings) == str(flags)


def test_a_path_that_is_too_long_for_a_socket_has_no_sccache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sccache = shutil.which("sccache")
    if not sccache or shutil.which("ccache"):
        pytest.skip("there is no sccache, or this machine's ccache comes first")
    (tmp_path / "x.c").touch()
    command = [sccache, "gcc", "-c", str(tmp_path / "x.c"), "-o", str(tmp_path / "x.o")]
    with tempfile.TemporaryDirectory() as short:
        for length, taken in ((83, True), (84, False)):
            work = Path(f"{short}/".ljust(length, "x"))
            (work / "home").mkdir(parents=True)
            monkeypatch.setenv("TMPDIR", str(work / "home"))
            for name, value in toolchain.cache_variables(tmp_path, work).items():
                monkeypatch.setenv(name, value)
            done = subprocess.run(command, capture_output=True, text=True)
            subprocess.run([sccache, "--stop-server"], capture_output=True)
            assert (done.returncode == 0) == taken, done.stderr
            assert bool(toolchain.find_launcher(Path(sccache).parent, work)) == taken


def test_nvcc_is_called_through_the_compiler_cache(tmp_path: Path) -> None:
    """In words that ccache knows too: it takes the file of dependencies for a second source otherwise."""
    (tmp_path / "ccache").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "ccache").chmod(0o755)
    toolkit = toolchain.CudaToolkit(tmp_path / "cuda 13", "13.0.88")
    launcher, compiler = str(tmp_path / "ccache"), toolchain.host_compiler(HERE)
    toolchain.make_wrappers(tmp_path / "the compilers", compiler, {}, launcher)
    assert toolchain.nvcc_variables(tmp_path / "the compilers", toolkit, "") == {}
    found = toolchain.nvcc_variables(tmp_path / "the compilers", toolkit, launcher)
    long = ["--generate-dependencies-with-compile", "--dependency-output", "x.o.d"]
    command = [*shlex.split(found["PYTORCH_NVCC"]), *long, "-c", "x.cu", "-DTEXT=a b"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}/cuda 13/bin/nvcc|-MD|-MF|x.o.d|-c|x.cu|-DTEXT=a b|"


@pytest.mark.parametrize(
    ("words", "of_nvcc"),
    [
        (["-specs=x"], ["-Xcompiler=-specs=x"]),
        (["--specs", "x"], ["-Xcompiler", "-O2,--specs=x"]),
        (["-B", "x"], ["-Xcompiler", "-Bx"]),
        (["-Bx"], ["--compiler-options=-O2,-Bx"]),
        (["--prefix=x"], ["-Xcompiler", "--prefix=x"]),
        (["-fplugin=x"], ["-Xcompiler", "-fplugin=x"]),
        (["@x"], ["-Xcompiler", "@x"]),
    ],
)
def test_a_compiler_that_reads_other_files_is_not_called_through_the_compiler_cache(
    words: list[str], of_nvcc: list[str], tmp_path: Path
) -> None:
    """It goes by their names, and would take what was compiled when they said something else."""
    (tmp_path / "cache").write_text("#!/bin/sh\necho cached\n")
    (tmp_path / "cache").chmod(0o755)
    launcher, compilers = str(tmp_path / "cache"), tmp_path / "compilers"
    gcc = toolchain.make_wrappers(compilers, toolchain.host_compiler(HERE), {}, launcher) / "gcc"
    found = toolchain.nvcc_variables(compilers, toolchain.CudaToolkit(tmp_path, "13.0"), launcher)

    def is_cached(*command: str) -> bool:
        done = subprocess.run([*command, "-c", "x-B.cu"], cwd=tmp_path, capture_output=True)
        return done.stdout == b"cached\n"

    nvcc = shlex.split(found["PYTORCH_NVCC"])
    assert is_cached(str(gcc), "-DB")
    assert is_cached(*nvcc, "-Xcompiler", "-DB")
    assert not is_cached(str(gcc), *words)
    assert not is_cached(*nvcc, *of_nvcc)


def test_what_has_no_code_is_nothing_that_a_linker_made(tmp_path: Path) -> None:
    """Two files without sections hold different things, and would count as one."""
    command = ["gcc", "-shared", "-x", "c", "/dev/null", "-o", str(tmp_path / "x.so")]
    subprocess.run(command, check=True)
    data = (tmp_path / "x.so").read_bytes()
    assert steps.contents(data)
    # Without where the sections are, and how many.
    assert steps.contents(data[:0x28] + bytes(8) + data[0x30:0x3C] + bytes(4) + data[0x40:]) is None


def test_the_compiler_cache_is_called_alike_by_builds_of_other_targets(tmp_path: Path) -> None:
    """And so finds what they have compiled, but not what another compiler has."""
    said = 'compiler=$1; cat "$compiler"; shift; printf "%s|" "$@"; exec "$compiler" "$@"'
    (tmp_path / "cache").write_text(f"#!/bin/sh\n{said}\n")
    (tmp_path / "cache").chmod(0o755)
    host = dataclasses.replace(toolchain.host_compiler(HERE), cc=str(tmp_path / "gcc"))

    def called(folder: Path, text: str) -> str:
        Path(host.cc).write_text(f'#!/bin/sh\nexec gcc "$@" {text}\n')
        Path(host.cc).chmod(0o755)
        folder.mkdir()
        (folder / "x.c").touch()
        launcher = str(tmp_path / "cache")
        commands = toolchain.make_wrappers(folder / "bin", host, {folder: "/here"}, launcher)
        command = [str(commands / "gcc"), "-g", "-c", "x.c"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
        made = (folder / "x.o").read_bytes()
        assert b"/here" in made
        assert os.fsencode(folder) not in made
        return done.stdout

    one = called(tmp_path / "one", "")
    assert one.endswith("\n-g|-c|x.c|")
    assert called(tmp_path / "two", "") == one
    assert called(tmp_path / "three", "-O1") != one


def test_host_compiler_under_nvcc_is_not_called_through_the_compiler_cache(tmp_path: Path) -> None:
    """A cache that is called below its own call may refuse that, as sccache does, or wait for itself."""
    log = tmp_path / "log"
    scripts = {
        "cache": f'#!/bin/sh\necho "${{1##*/}}" >>{log}\nexec "$@"\n',
        "cuda/bin/nvcc": '#!/bin/sh\nexec gcc "$@"\n',
    }
    for name, text in scripts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "x.c").touch()
    launcher, compiler = str(tmp_path / "cache"), toolchain.host_compiler(HERE)
    commands = toolchain.make_wrappers(tmp_path / "compilers", compiler, {}, launcher)
    toolkit = toolchain.CudaToolkit(tmp_path / "cuda", "13.0.88")
    found = toolchain.nvcc_variables(tmp_path / "compilers", toolkit, launcher)
    path = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}

    def called(*command: str) -> list[str]:
        subprocess.run([*command, "-c", "x.c"], cwd=tmp_path, env=path, check=True)
        lines = log.read_text().split()
        log.unlink()
        return lines

    assert called("gcc") == ["gcc"]
    assert called(*shlex.split(found["PYTORCH_NVCC"])) == ["nvcc"]
    assert called(found["CMAKE_CUDA_COMPILER_LAUNCHER"], str(toolkit.home / "bin/nvcc")) == ["nvcc"]
