"""The rules that spoiled wheels must break, each one alone."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from forged_wheels import (
    ARCHITECTURES,
    BILL_OF_MATERIALS,
    CLASSIC,
    LIBRARY,
    STABLE,
    Forge,
    Nvcc,
    find_nvcc,
)
from torchwheels.audit import reports
from torchwheels.audit import rules as audit
from torchwheels.errors import UserError
from torchwheels.options import project, releases
from torchwheels.system import machines
from torchwheels.wheel.contents import BUILD_RECORD, read

FEWER = "(TORCHWHEELS_ARCHITECTURES names the GPUs, where fewer are meant)"
COMPLETE = ("sm_80", "sm_90", "compute_90")


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)


@pytest.fixture(scope="module")
def nvcc(shared: Path) -> Nvcc:
    return find_nvcc(shared / "nvcc")


def test_sound_classic_wheel_passes(forge: Forge) -> None:
    assert forge.findings() == {}


def test_sound_stable_wheel_passes(forge: Forge) -> None:
    forge.make_stable()
    assert forge.findings() == {}


def test_sound_limited_api_wheel_passes(forge: Forge) -> None:
    forge.tag = "cp310-abi3"
    forge.files = {"tinyops/_C.abi3.so": forge.files[LIBRARY]}
    assert forge.findings() == {}


def test_sound_cuda_wheel_passes(forge: Forge, nvcc: Nvcc) -> None:
    forge.make_cuda(nvcc.compile(*COMPLETE))
    assert forge.findings() == {}


def test_code_for_one_architecture_alone_is_code_for_it(forge: Forge, nvcc: Nvcc) -> None:
    forge.make_cuda(nvcc.compile("sm_80", "sm_90a", "compute_90"))
    assert forge.findings() == {}


def test_label_missing_from_a_classic_wheel(forge: Forge) -> None:
    forge.version = "1.0"
    assert forge.findings() == {
        "label": [
            "its version 1.0 does not say for which CUDA and which torch it is, and its libraries "
            "work with one only: label it +cpu.torch2.13"
        ]
    }


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.0+cu130.torch2.13", "its label says cu130, but 3.11-cpu is cpu"),
        ("1.0+torch2.12.cpu", "its label says torch 2.12, but 3.11-cpu has torch 2.13.0"),
        ("1.0+cpu.torch2.12", "its label says torch 2.12, but 3.11-cpu has torch 2.13.0"),
        (
            "1.0+cpu.torch2.13.cu130",
            "its label has cpu and torch2.13 and cu130, of which only one CUDA and one torch can be right",
        ),
    ],
    ids=["CUDA", "torch first", "torch", "two"],
)
def test_label_of_another_target(forge: Forge, version: str, message: str) -> None:
    forge.version = version
    assert forge.findings() == {"label": [message]}


def test_version_that_is_not_the_metadatas(forge: Forge) -> None:
    metadata = forge.fitting_metadata()["METADATA"]
    forge.replaced["METADATA"] = metadata.replace(b"Version: 1.0+", b"Version: 1.1+")
    message = "its metadata have the version 1.1+cpu.torch2.13, but its name 1.0+cpu.torch2.13"
    assert forge.findings() == {"label": [message]}


def test_library_of_another_cuda(forge: Forge, nvcc: Nvcc) -> None:
    forge.make_cuda(nvcc.compile(*COMPLETE))
    forge.files[LIBRARY] = forge.compile(
        CLASSIC, nvcc.compile(*COMPLETE), forge.stub("libcudart.so.12")
    )
    message = f"{LIBRARY} needs libcudart.so.12, but 3.11-cu130 has CUDA 13.0"
    assert forge.findings() == {"label": [message]}


def test_gpu_code_of_another_cuda(forge: Forge, nvcc: Nvcc) -> None:
    """With a static runtime no needed library tells."""
    forge.make_cuda(nvcc.compile(*COMPLETE))
    runtime = forge.stub("libcuda.so.1")  # stands for the static one
    forge.files[LIBRARY] = forge.compile(CLASSIC, nvcc.compile(*COMPLETE), runtime)
    forge.allow_libraries = ("libcuda.so.1",)
    forge.target, forge.version = releases.load().target("3.11-cu126"), "1.0+cu126.torch2.7"
    forge.requires = ["torch==2.7.*"]
    found = forge.findings()
    assert [*found] == ["label"]
    (message,) = found["label"]
    assert message.startswith(f"{LIBRARY} holds GPU code of CUDA 13.")
    assert message.endswith("but 3.11-cu126 has 12.6")


@pytest.mark.parametrize("tag", ["manylinux_2_17", "linux"])
def test_platform_tag_without_proof(forge: Forge, tag: str) -> None:
    forge.platform = tag
    message = f"its tag is {tag}_x86_64, but auditwheel proves manylinux_2_5_x86_64"
    assert forge.findings() == {"platform_tag": [message]}


NEEDS_NEWER_GLIBC = pytest.mark.skipif(
    tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 34),
    reason="this glibc is too old to link against a newer one",
)


@NEEDS_NEWER_GLIBC
def test_platform_tag_that_is_too_new(forge: Forge) -> None:
    code = "#include <pthread.h>\nint join(pthread_t t) { return pthread_join(t, nullptr); }"
    forge.files[LIBRARY] = forge.compile(CLASSIC + code)
    forge.platform = "manylinux_2_34"
    message = (
        "its tag is manylinux_2_34_x86_64, but manylinux_2_28 or older is wanted; "
        f"{LIBRARY} uses pthread_join in the version GLIBC_2.34: a compiler of this machine linked it, not the one "
        "that a build has as c++ or cc on PATH, or as $CXX or $CC (link programs with -static)"
    )
    assert forge.findings() == {"platform_tag": [message]}


@NEEDS_NEWER_GLIBC
def test_a_program_that_is_too_new(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "x.c").write_text("int main() { return 0; }\n")
    subprocess.run(["gcc", "x.c", "-o", "x"], cwd=tmp_path, check=True)
    forge.files["tinyops/x"] = (tmp_path / "x").read_bytes()
    forge.platform = "manylinux_2_34"
    (said,) = forge.findings()["platform_tag"]
    assert "; tinyops/x uses __libc_start_main in the version GLIBC_2.34: " in said
    assert said.endswith("(link programs with -static)")


@pytest.mark.parametrize(
    ("platform", "processor"),
    [
        ("manylinux_2_5", "aarch64"),
        ("manylinux_2_5_aarch64.manylinux_2_5", "x86_64"),
        ("manylinux_2_5_x86_64.win", "amd64"),
    ],
)
def test_platform_tag_of_another_system(forge: Forge, platform: str, processor: str) -> None:
    forge.platform, forge.processor = platform, processor
    message = f"its tag is {platform}_{processor}, but auditwheel proves manylinux_2_5_x86_64"
    assert forge.findings() == {"platform_tag": [message]}


def test_platform_tag_of_another_target(forge: Forge) -> None:
    forge.target = dataclasses.replace(forge.target, machine=machines.AARCH64)
    message = f"{LIBRARY} is for EM_X86_64, but 3.11-cpu-aarch64 for EM_AARCH64"
    assert message in forge.findings()["platform_tag"]


def test_platform_tag_with_an_older_name_of_the_same(forge: Forge) -> None:
    forge.platform = "manylinux1_x86_64.manylinux_2_5"
    assert forge.findings() == {}


def test_platform_tag_with_a_library_of_another_processor(forge: Forge) -> None:
    library = bytearray(forge.files[LIBRARY])
    library[18] = 183  # e_machine
    forge.files["tinyops/_more.so"] = bytes(library)
    message = "its tag is manylinux_2_5_x86_64, but tinyops/_more.so is for another processor (EM_AARCH64)"
    assert message in forge.findings()["platform_tag"]


@pytest.mark.parametrize("tag", ["py2.py3-none", "cp311-cp312", "cp310.cp311-cp310", "pp311-none"])
def test_tags_that_promise_too_much(forge: Forge, tag: str) -> None:
    forge.tag = tag
    said = {"cp310.cp311-cp310": "cp310-cp310.cp311-cp310", "py2.py3-none": "py2-none.py3-none"}
    message = (
        f"its tag is {said.get(tag, tag)}, but one of cp311-cp311, cp311-abi3, cp311-none, py3-none is "
        "wanted"
    )
    assert forge.findings()["tags"] == [message]


def test_tag_of_all_pythons_from_one_on(forge: Forge) -> None:
    """As xformers has, whose library uses none."""
    forge.make_stable(STABLE)
    forge.tag = "py39-none"
    assert forge.findings() == {}
    forge.tag = "py312-none"
    message = "its tag is py312-none, but 3.11-cpu has Python 3.11"
    assert forge.findings() == {"python_tag": [message]}


def test_tags_that_are_not_the_metadatas(forge: Forge) -> None:
    forge.replaced["WHEEL"] = b"Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_17_x86_64\n"
    message = "its WHEEL file has the tags cp311-cp311-manylinux_2_17_x86_64, which are not those of its name"
    assert forge.findings() == {"tags": [message]}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param(
            "extern char __libc_single_threaded; char* nothing() { return &__libc_single_threaded; }",
            "uses __libc_single_threaded, which Linux has from GLIBC_2.32 on, but its tag is "
            "manylinux_2_5: have its setup do without, or define it",
            marks=NEEDS_NEWER_GLIBC,
            id="newer",
        ),
        pytest.param(
            "int tiny(); int nothing() { return tiny(); }",
            "uses tiny, which neither the wheel nor torch, Python or the Linux of its tag has: link "
            "what defines it",
            id="unknown",
        ),
    ],
)
def test_undefined_symbols(forge: Forge, code: str, message: str) -> None:
    name = "tinyops/_more.so"
    openmp = forge.stub("libgomp.so.1")
    # Without a version, as an older C library to link with leaves it.
    forge.files[name] = forge.compile(f'extern "C" {{ {code} }}', openmp, flags=["-nodefaultlibs"])
    assert forge.findings() == {"undefined_symbols": [f"{name} {message}"]}


def test_undefined_symbols_that_somebody_has(forge: Forge) -> None:
    code = 'extern "C" int tiny(); int use() { return tiny(); }'
    forge.files["tinyops/_more.so"] = forge.compile(code, forge.stub("libstranger.so.1"))
    forge.allow_libraries = ("libstranger.so.1",)
    assert forge.findings() == {}
    forge.files["tinyops/_more.so"] = forge.compile(code)
    forge.files["tinyops/libtiny.so"] = forge.compile('extern "C" int tiny() { return 1; }')
    assert forge.findings() == {}


def test_undefined_symbols_of_torchs_python_library(forge: Forge) -> None:
    """Of its headers for C++, all are in a namespace or begin with THP but these."""
    code = 'extern "C" void* ParameterClass; void* getPyInterpreter();'
    use = "void* use() { return ParameterClass ? ParameterClass : getPyInterpreter(); }"
    forge.files["tinyops/_more.so"] = forge.compile(f"{code}\n{use}")
    assert forge.findings() == {}


OF_OPENMP = """
extern "C" void GOMP_parallel(), omp_get_num_threads();
void use() { GOMP_parallel(), omp_get_num_threads(); }
"""


def test_undefined_symbols_of_the_openmp_that_torch_loads(forge: Forge) -> None:
    """Compiled with -fopenmp, and linked without."""
    name = "tinyops/_more.so"
    forge.files[name] = forge.compile(CLASSIC + OF_OPENMP)
    assert forge.findings() == {}
    forge.files[name] = forge.compile(OF_OPENMP)  # it may be loaded before torch
    assert forge.findings() == {
        "undefined_symbols": [
            f"{name} uses GOMP_parallel (and 1 more), which neither the wheel nor torch, Python or the Linux of "
            "its tag has: link what defines it, here with -fopenmp"
        ]
    }


def test_undefined_symbols_of_the_cuda_runtime_that_torch_loads(forge: Forge, nvcc: Nvcc) -> None:
    """A library may leave out which CUDA it needs, to work with several."""
    name = "tinyops/_more.so"
    forge.files[name] = forge.compile(
        'extern "C" int cudaMalloc(), __cudaGetKernel(); int use() { return cudaMalloc() + __cudaGetKernel(); }'
    )
    assert [*forge.findings()] == ["undefined_symbols"]
    forge.make_cuda(nvcc.compile(*COMPLETE))
    assert forge.findings() == {}


@pytest.mark.parametrize(
    ("tag", "name", "symbol", "message"),
    [
        (
            "py3-none",
            "_C.so",
            "PyList_New",
            "its tag is py3-none, but tinyops/_C.so uses PyList_New, which is in the Limited "
            "API from 3.2 on",
        ),
        (
            "cp311-cp311",
            "_C.cpython-312-x86_64-linux-gnu.so",
            "PyList_New",
            "its tag is cp311-cp311, but tinyops/_C.cpython-312-x86_64-linux-gnu.so has the name of one "
            "Python's module",
        ),
        (
            "cp310-abi3",
            "_C.abi3.so",
            "_PyThreadState_UncheckedGet",
            "its tag is cp310-abi3, but tinyops/_C.abi3.so uses _PyThreadState_UncheckedGet, which is "
            "not in the Limited API",
        ),
        (
            "cp310-abi3",
            "_C.abi3.so",
            "PyObject_GetBuffer",
            "its tag is cp310-abi3, but tinyops/_C.abi3.so uses PyObject_GetBuffer, which is in the "
            "Limited API from 3.11 on",
        ),
        (
            "py39-none",
            "_C.abi3.so",
            "PyObject_GetBuffer",
            "its tag is py39-none, but tinyops/_C.abi3.so uses PyObject_GetBuffer, which is in the "
            "Limited API from 3.11 on",
        ),
        (
            "cp312-cp312",
            "_C.so",
            "PyList_New",
            "its tag is cp312-cp312, but 3.11-cpu has Python 3.11",
        ),
    ],
    ids=[
        "py3",
        "name",
        "beyond the Limited API",
        "newer Limited API",
        "Pythons from one on",
        "another Python",
    ],
)
def test_python_tag_that_promises_too_much(
    forge: Forge, tag: str, name: str, symbol: str, message: str
) -> None:
    code = f'extern "C" void {symbol}(); void f() {{ {symbol}(); }}'
    forge.tag, forge.files = tag, {f"tinyops/{name}": forge.compile(CLASSIC + code)}
    assert forge.findings() == {"python_tag": [message]}


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        (
            "torch_library_def_with_tags",
            "which is in torch's stable ABI from 2.12 on, but torch 2.10 is promised: compile with "
            "TORCH_TARGET_VERSION",
        ),
        (
            "torch_of_nowhere",
            "which torch 2.15 does not list as stable",
        ),
    ],
    ids=["too new", "unknown"],
)
def test_torch_symbol_that_is_not_promised(forge: Forge, symbol: str, message: str) -> None:
    forge.make_stable(f'{STABLE} extern "C" void {symbol}(); void f() {{ {symbol}(); }}')
    message = f"tinyops/_C.so uses {symbol}, {message}"
    assert forge.findings() == {"torch_symbols": [message]}


def test_torch_symbol_where_a_wider_requirement_is_explained(forge: Forge) -> None:
    """A package may do without its stable library under an older torch."""
    forge.make_stable()
    forge.requires = ["torch>=2.4"]
    assert [*forge.findings()] == ["torch_symbols"]
    forge.torches = ">=2.10"
    assert forge.findings() == {}


def test_torch_symbol_of_one_release_where_many_are_promised(forge: Forge) -> None:
    forge.torches = ">=2.10"
    message = (
        f"{LIBRARY} uses at::Tensor::zero_(), C++ of torch, which changes with every release, but "
        "torch>=2.10 is promised"
    )
    assert forge.findings() == {"torch_symbols": [message]}


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        ([], "its metadata do not require torch: add `Requires-Dist: torch==2.13.*`"),
        (["torch==2.12.*"], "its metadata require torch==2.12.*, but 3.11-cpu has torch 2.13.0"),
        (
            ["numpy", "torch>=2.4"],
            f"its metadata require torch>=2.4, but {LIBRARY} uses at::Tensor::zero_() and 0 more of "
            "torch's C++, which changes with every release: require torch==2.13.*",
        ),
    ],
    ids=["none", "another torch", "many torches"],
)
def test_requirement(forge: Forge, requires: list[str], message: str) -> None:
    forge.requires = requires
    assert forge.findings() == {"requirement": [message]}


def test_requirement_of_a_wheel_whose_libraries_use_nothing_of_torch(forge: Forge) -> None:
    """It may take tensors as NumPy arrays, say, where there are some."""
    forge.make_stable('extern "C" int call() { return 1; }')
    forge.requires = []
    assert forge.findings() == {}
    forge.requires = ["torch<2"]
    message = "its metadata require torch<2, but 3.11-cpu has torch 2.13.0"
    assert forge.findings() == {"requirement": [message]}


def test_gpu_code_of_a_wheel_that_is_silently_cpu_only(forge: Forge, nvcc: Nvcc) -> None:
    """As a setup.py makes it that asks `torch.cuda.is_available()` where there is no GPU."""
    forge.make_cuda(nvcc.compile(*COMPLETE))
    forge.files[LIBRARY] = forge.compile(CLASSIC)
    found = forge.findings()
    assert [*found] == ["gpu_code"]
    (message,) = found["gpu_code"]
    assert message.startswith("it is silently CPU-only: no library holds GPU code, but 3.11-cu130 ")


@pytest.mark.parametrize(
    "code",
    [
        'extern "C" int cudaMalloc(); int use() { return cudaMalloc(); }',
        "namespace c10::cuda { int current(); } int use() { return c10::cuda::current(); }",
        'extern "C" int cublasSgemm_v2(); int use() { return cublasSgemm_v2(); }',
    ],
)
def test_a_library_may_call_cuda_without_gpu_code_of_its_own(forge: Forge, code: str) -> None:
    forge.target, forge.version = releases.load().target("3.11-cu130"), "1.0+cu130.torch2.13"
    forge.architectures = ARCHITECTURES
    cublas = forge.stub("libcublas.so.13")
    forge.files[LIBRARY] = forge.compile(f"{CLASSIC}\n{code}", cublas)
    assert forge.findings() == {}


@pytest.mark.parametrize("codes", [COMPLETE, ("sm_90", "compute_90")], ids=["all", "one"])
def test_gpu_code_among_the_constants_of_a_library(
    codes: Sequence[str], forge: Forge, nvcc: Nvcc, tmp_path: Path
) -> None:
    """Where bin2c puts it, for cuModuleLoadData."""
    code = tmp_path / "code"
    section = "--dump-section=.nv_fatbin="
    subprocess.run(["objcopy", f"{section}{code}", nvcc.compile(*codes), "/dev/null"], check=True)
    forge.make_cuda(nvcc.compile(*COMPLETE))
    numbers = ",".join(map(str, code.read_bytes()))
    array = f'extern "C" const unsigned char module[] __attribute__((aligned(8))) = {{{numbers}}};'
    forge.files[LIBRARY] = forge.compile(f"{CLASSIC}\n{array}")
    found = forge.findings()
    if codes is COMPLETE:
        assert found == {}
    else:
        (message,) = found["gpu_code"]
        assert "_C.cpython-311-x86_64-linux-gnu.so holds no GPU code for 8.0, but " in message


@pytest.mark.parametrize(
    ("codes", "lacking"),
    [
        pytest.param(("sm_90", "compute_90"), "8.0", marks=pytest.mark.slow),
        (("sm_80", "sm_90"), "9.0 as PTX"),
        pytest.param(("compute_90",), "8.0, 9.0", marks=pytest.mark.slow),
    ],
    ids=["an architecture", "PTX", "machine code"],
)
def test_gpu_code_that_is_missing(
    forge: Forge, nvcc: Nvcc, codes: tuple[str, ...], lacking: str
) -> None:
    forge.make_cuda(nvcc.compile(*codes))
    message = f"{LIBRARY} holds no GPU code for {lacking}, but 3.11-cu130 wants it {FEWER}"
    assert forge.findings() == {"gpu_code": [message]}


@pytest.mark.parametrize(
    ("wanted", "lacks"), [("8.6", ""), ("8.9", ""), ("7.5", "7.5"), ("8.9a", "8.9a")]
)
def test_machine_code_serves_its_major_version(
    forge: Forge, nvcc: Nvcc, wanted: str, lacks: str
) -> None:
    forge.make_cuda(nvcc.compile(*COMPLETE))
    forge.architectures = ("8.0", wanted, "9.0+PTX")
    problems = forge.findings()
    if lacks:
        (message,) = problems["gpu_code"]
        assert message.startswith(f"{LIBRARY} holds no GPU code for {lacks}, but ")
    else:
        assert problems == {}


def test_ptx_of_an_older_gpu_serves_newer_ones(forge: Forge, nvcc: Nvcc) -> None:
    forge.make_cuda(nvcc.compile("sm_80", "sm_90", "compute_80"))
    assert not forge.findings()


def test_gpu_code_without_a_kernel_is_none(forge: Forge, nvcc: Nvcc) -> None:
    forge.make_cuda(nvcc.compile(*COMPLETE, source="void host() {}"))
    assert [*forge.findings()] == ["gpu_code"]


def test_gpu_code_in_every_library(forge: Forge, nvcc: Nvcc) -> None:
    forge.make_cuda(nvcc.compile(*COMPLETE))
    runtime = forge.stub("libcudart.so.13")
    more = forge.compile("", nvcc.compile("sm_90", "compute_90"), runtime)
    forge.files["tinyops/_more.so"] = more
    message = f"tinyops/_more.so holds no GPU code for 8.0, but 3.11-cu130 wants it {FEWER}"
    assert forge.findings() == {"gpu_code": [message]}


def test_gpu_code_in_a_cpu_wheel(forge: Forge, nvcc: Nvcc) -> None:
    forge.files[LIBRARY] = forge.compile(CLASSIC, nvcc.compile(*COMPLETE))
    message = f"{LIBRARY} holds GPU code, but 3.11-cpu is without CUDA"
    assert forge.findings()["gpu_code"] == [message]


@pytest.mark.parametrize(
    "path",
    [
        "tinyops.libs/libcudart-0a1b2c3d.so.13",
        "tinyops/libtorch_cpu.so",
        "tinyops.libs/libjpeg.so.8",
    ],
    ids=["CUDA", "torch", "a stranger"],
)
def test_bundled_libraries(forge: Forge, path: str) -> None:
    forge.files[path] = forge.compile("")
    found = forge.findings()
    assert [*found] == ["bundled_libraries"]
    (message,) = found["bundled_libraries"]
    assert message.startswith(f"it bundles {path}: ")
    forge.allow_libraries = (f"{Path(path).name[:7]}*",)
    assert forge.findings() == {}


def test_bundled_library_under_another_name(forge: Forge) -> None:
    forge.files["tinyops/runtime.so"] = forge.compile("", flags=["-Wl,-soname,libcudart.so.13"])
    assert [*forge.findings()] == ["bundled_libraries"]


@pytest.mark.parametrize("name", ["libopenblas.so.0", "libcudart.so.13", "libcuda.so.1"])
def test_needed_libraries(forge: Forge, name: str) -> None:
    forge.files["tinyops/_more.so"] = forge.compile("", forge.stub(name))
    message = (
        f"tinyops/_more.so needs {name}, which a system may lack: link it statically, or name it in "
        "`allow-libraries`"
    )
    assert forge.findings() == {"needed_libraries": [message]}


def test_needed_libraries_of_torch_and_the_wheel(forge: Forge) -> None:
    needed = [forge.stub("libtorch_cpu.so"), forge.stub("libc10.so"), forge.stub("libtiny.so")]
    forge.files["tinyops/libtiny.so"] = forge.compile("")
    forge.files["tinyops/_more.so"] = forge.compile("", *needed, flags=["-Wl,-rpath,$ORIGIN/../x"])
    assert forge.findings() == {}


def test_needed_libraries_are_of_the_torch_it_is_for(forge: Forge) -> None:
    """torch 2.6 and older have their OpenMP under another name: a second would be loaded."""
    forge.files["tinyops/_more.so"] = forge.compile("", forge.stub("libgomp.so.1"))
    assert forge.findings() == {}
    forge.target = releases.load().target("3.11-cpu-torch2.6")
    forge.version, forge.requires = "1.0+cpu.torch2.6", ["torch==2.6.*"]
    message = (
        "tinyops/_more.so needs libgomp.so.1, which torch 2.6 has as libgomp-a34b3233.so.1: require "
        "torch>=2.7, or name it in `allow-libraries`"
    )
    assert forge.findings() == {"needed_libraries": [message]}
    forge.files["tinyops/_more.so"] = forge.compile("", forge.stub("libgomp-a34b3233.so.1"))
    assert forge.findings() == {}


def test_needed_libraries_from_the_builders_folder(forge: Forge) -> None:
    forge.files[LIBRARY] = forge.compile(CLASSIC, flags=["-Wl,-rpath,/opt/cuda/lib64"])
    message = f"{LIBRARY} looks for libraries in /opt/cuda/lib64 (its RPATH)"
    assert forge.findings() == {"needed_libraries": [message]}


@pytest.mark.parametrize("kind", ["auxiliary", "filter", "audit", "depaudit"])
def test_needed_libraries_of_other_kinds(forge: Forge, kind: str) -> None:
    forge.files[LIBRARY] = forge.compile(CLASSIC, flags=[f"-Wl,--{kind},/tmp/own.so"])
    message = (
        f"{LIBRARY} needs /tmp/own.so, which a system may lack: link it statically, or name it in"
    )
    assert forge.findings() == {"needed_libraries": [f"{message} `allow-libraries`"]}


@pytest.mark.parametrize("folder", ["$ORIGIN/../../tmp", "$ORIGIN/x/../../..", "$ORIGINAL"])
def test_needed_libraries_from_outside_of_site_packages(forge: Forge, folder: str) -> None:
    forge.files[LIBRARY] = forge.compile(CLASSIC, flags=[f"-Wl,-rpath,{folder}"])
    message = f"{LIBRARY} looks for libraries in {folder} (its RPATH)"
    assert forge.findings() == {"needed_libraries": [message]}


@pytest.mark.parametrize("flag", ["execstack", "noexecstack"])
def test_executable_stack(forge: Forge, flag: str) -> None:
    forge.files[LIBRARY] = forge.compile(CLASSIC, flags=[f"-Wl,-z,{flag}"])
    message = (
        f"{LIBRARY} wants an executable stack, with which glibc 2.41 and newer do not load it: link with "
        "-z noexecstack"
    )
    assert forge.findings() == ({"executable_stack": [message]} if flag == "execstack" else {})


def test_pages_of_memory(forge: Forge) -> None:
    small = [f"-Wl,-z,{kind}-page-size=1024" for kind in ("max", "common")]
    forge.files[LIBRARY] = forge.compile(CLASSIC, flags=small)
    message = (
        f"{LIBRARY} is aligned to 1024 bytes, but x86_64 has pages of up to 4096: link with "
        "-z max-page-size=4096"
    )
    assert forge.findings() == {"memory": [message]}


def test_pages_of_memory_of_another_processor(forge: Forge) -> None:
    forge.target = dataclasses.replace(forge.target, machine=machines.AARCH64)
    (message,) = forge.findings()["memory"]
    assert message.endswith("-z max-page-size=65536")


@pytest.mark.parametrize("size", [1664, 1672])
@pytest.mark.parametrize("model", ["initial-exec", "global-dynamic"])
def test_static_thread_local_memory(forge: Forge, model: str, size: int) -> None:
    code = f"thread_local char x[{size}]; char* get() {{ return x; }}"
    forge.files["tinyops/_more.so"] = forge.compile(code, flags=[f"-ftls-model={model}"])
    message = (
        "tinyops/_more.so wants 1672 bytes of static thread-local memory, of which glibc keeps 1664 for "
        "libraries: compile without -ftls-model=initial-exec"
    )
    is_wrong = model == "initial-exec" and size > 1664
    assert forge.findings() == ({"memory": [message]} if is_wrong else {})


def test_packed_relocations(forge: Forge) -> None:
    """Older loaders leave them out. The linker notes that only in what uses the C library."""
    code = "static int x; int* y = &x;"
    flags = ["-nostdlib", "-Wl,-z,pack-relative-relocs"]
    forge.files["tinyops/_more.so"] = forge.compile(code, flags=flags)
    (message,) = forge.findings()["platform_tag"]
    assert message.endswith("but tinyops/_more.so wants GLIBC_ABI_DT_RELR")


def test_fast_math(forge: Forge) -> None:
    """What GCC links in for -ffast-math; in a stripped library no name tells."""
    printed = subprocess.run(
        ["g++", "-print-file-name=crtfastmath.o"], capture_output=True, text=True, check=True
    )
    forge.files[LIBRARY] = forge.compile(CLASSIC, printed.stdout.strip())
    message = (
        f"{LIBRARY} makes the whole process flush denormal numbers to zero when it is loaded: link "
        "without -ffast-math and -Ofast"
    )
    assert forge.findings() == {"fast_math": [message]}


def test_needed_libraries_from_where_a_library_comes_to_lie(forge: Forge) -> None:
    name = f"tinyops-{forge.version}.data/platlib/tinyops/_more.so"
    forge.files[name] = forge.compile("", flags=["-Wl,-rpath,$ORIGIN/../../tmp"])
    message = f"{name} looks for libraries in $ORIGIN/../../tmp (its RPATH)"
    assert forge.findings() == {"needed_libraries": [message]}


@pytest.mark.parametrize("said", ["true", "false"])
def test_a_wheel_with_libraries_is_of_a_platform(said: str, forge: Forge) -> None:
    tag = "cp311-cp311-manylinux_2_17_x86_64"
    forge.replaced["WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: {said}\nTag: {tag}\n".encode()
    message = (
        "its WHEEL file says Root-Is-Purelib: true, but it has libraries, which are of one platform"
    )
    assert forge.findings().get("metadata", []) == [message] * (said == "true")


def test_size_over_the_budget(forge: Forge) -> None:
    forge.files["tinyops/data.bin"] = os.urandom(1_200_000)
    forge.size_budget = 1
    found = forge.findings()
    assert [*found] == ["size"]
    assert found["size"][0].endswith("MB, over the 1 MB allowed")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Name: tinyops", "Name: torch", "its metadata are of torch, but its name is of tinyops"),
        (
            "Name: tinyops",
            "Name: UNKNOWN",
            "its metadata are of UNKNOWN, setuptools' word for no name",
        ),
        ("Name: tinyops\n", "", "its metadata are not valid: 'name' is a required field"),
        (
            "Name:",
            "Requires-Python: <b>\nName:",
            "its metadata are not valid: '<b>' is invalid for 'requires-python'",
        ),
        (
            "Name:",
            "Requires-Python: >=3.12\nName:",
            "its metadata require Python >=3.12, but its target has Python 3.11",
        ),
        ("Name:", "Requires-Python: >=3.11.4\nName:", None),
        ("Name:", "Summary: a\0b\nName:", "its metadata hold a NUL"),
        (
            "Name:",
            "Requires-Dist: <b>\nName:",
            "its metadata are not valid: '<b>' is invalid for 'requires-dist'",
        ),
        (
            "Name:",
            "Requires-Dist: numpy @ https://of.nobody/numpy.whl\nName:",
            "its metadata require numpy from an address, which no index shall have",
        ),
        (
            "Name:",
            'Requires-Dist: numpy @ https://of.nobody/numpy.whl ; extra != "tests"\nName:',
            "its metadata require numpy from an address, which no index shall have",
        ),
        (
            "Name:",
            'Requires-Dist: numpy @ https://of.nobody/numpy.whl ; extra == "tests"\nName:',
            None,
        ),
        (
            "Name:",
            'Requires-Dist: numpy @ https://me:secret@of.nobody/x.whl ; extra == "tests"\nName:',
            "its metadata show a password or a token in Requires-Dist: have its setup leave it out",
        ),
        (
            "Name:",
            "Project-URL: Source, https://of.nobody/x?token=secret\nName:",
            "its metadata show a password or a token in Project-URL: have its setup leave it out",
        ),
        ("Name:", "Home-page: https://of.nobody/@me\nName:", None),
        (
            "Name:",
            "Summary: see https://me:secret@of.nobody\nName:",
            "its metadata show a password or a token in Summary: have its setup leave it out",
        ),
        ("Name:", "Description: https://USER:PASSWORD@of.nobody\nName:", None),
        (
            "Name:",
            'Requires-Dist: torch==2.4.0; platform_system == "Linux"\nName:',
            'its metadata require torch==2.4.0 where platform_system == "Linux", but 3.11-cpu has torch 2.13.0',
        ),
        ("Name:", 'Requires-Dist: torch==2.4.0; python_version < "3"\nName:', None),
        # Of setuptools until 76.
        ("Metadata-Version: 2.4", "Metadata-Version: 2.1\nLicense-File: LICENSE", None),
        (
            "Metadata-Version: 2.4",
            "Metadata-Version: 2.1\nLicense-File: LICENSE\nRequires-Python: >=3.12",
            "its metadata require Python >=3.12",
        ),
        (
            "Name:",
            "License-File: ../LICENSE\nName:",
            "its metadata are not valid: '../LICENSE' is invalid for 'license-file'",
        ),
        (
            "Name:",
            "Version: 9\nName:",
            "its metadata are not valid: 'version' h",
        ),
    ],
)
def test_metadata(forge: Forge, old: str, new: str, message: str | None) -> None:
    metadata = forge.fitting_metadata()["METADATA"].decode()
    forge.replaced["METADATA"] = metadata.replace(old, new, 1).encode()
    said = forge.findings().get("metadata", [])
    assert [text[: len(message or "")] for text in said] == ([message] if message else [])


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"Wheel-Version: 9.0\nTag: cp311-cp311-manylinux_2_5_x86_64\n",
        b"Tag: cp311-cp311-manylinux_2_5_x86_64\n\nWheel-Version: 1.0\n",
    ],
)
def test_metadata_of_another_kind_of_wheel(forge: Forge, text: bytes | None) -> None:
    forge.replaced["WHEEL"] = text
    assert forge.findings()["metadata"] == ["its WHEEL file does not say Wheel-Version: 1.0"]


def test_metadata_in_the_folder_of_another(forge: Forge) -> None:
    path = forge.wheel()
    renamed = path.with_name(path.name.replace("tinyops-", "torch-"))
    found = audit.findings(read(path.rename(renamed)), forge.expectation)
    assert found["metadata"] == [
        f"its metadata are in tinyops-{forge.version}.dist-info, but its name is of torch {forge.version}",
        "its metadata are of tinyops, but its name is of torch",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "tinyops.pth",
        "sitecustomize.py",
        "torch/__init__.py",
        "torch-2.13.0.dist-info/INSTALLER",
        "tinyops-1.0+cpu.torch2.13.data/purelib/tinyops.pth",
        "tinyops-1.0+cpu.torch2.13.data/data/lib/python3.11/site-packages/x.py",
        "other-1.0.data/purelib/x.py",
        "torch.py",
        "nvidia.py",
        "torch-2.13.0.DIST-INFO/METADATA",
        "torch.egg-info/PKG-INFO",
        "tinyops-1.0+cpu.torch2.13.data/scripts/python3",
        "tinyops-1.0+cpu.torch2.13.data/data/bin/pip",
        "tinyops-1.0+cpu.torch2.13.data/data/pyvenv.cfg",
        "tinyops-1.0+cpu.torch2.13.data/data/pip.conf",
    ],
)
def test_installed_files(forge: Forge, name: str) -> None:
    forge.files[name] = b""
    message = f"it installs {name}, which is of another project or runs in every start of Python"
    assert forge.findings()["installed_files"] == [message]


@pytest.mark.parametrize("group", ["console_scripts", "gui_scripts", "tinyops.plugins"])
@pytest.mark.parametrize("name", ["python3", "pip", "../lib/python3.11/site-packages/x.pth"])
def test_installed_scripts(forge: Forge, name: str, group: str) -> None:
    forge.replaced["entry_points.txt"] = f"[{group}]\n{name} = tinyops:main\n".encode()
    message = f"it installs the script {name}, which is of another project or runs in every start of Python"
    is_script = group.endswith("scripts")
    assert forge.findings() == ({"installed_files": [message]} if is_script else {})


def test_what_an_installer_writes(forge: Forge) -> None:
    """`pip freeze` would name that address."""
    forge.replaced["direct_url.json"] = b"{}"
    message = "it holds direct_url.json, where installers note from which address they took a wheel"
    assert forge.findings() == {"installed_files": [message]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad/x", "it holds {}, which installers refuse: it is none of purelib, platlib, "),
        ("x", "it holds {}, which installers refuse: it is none of purelib, platlib, "),
        ("purelib/tinyops/__init__.py", "it installs {}, and another file in its place"),
    ],
)
def test_files_that_installers_do_not_take(forge: Forge, name: str, message: str) -> None:
    path = f"tinyops-{forge.version}.data/{name}"
    forge.files[path] = b""
    (found,) = forge.findings()["installed_files"]
    assert found.startswith(message.format(path))


@pytest.mark.parametrize("value", ["tinyops", "not a function", "tinyops:", "tinyops.main()"])
def test_a_script_that_calls_no_function(forge: Forge, value: str) -> None:
    forge.replaced["entry_points.txt"] = f"[console_scripts]\ntinyops = {value}\n".encode()
    message = f"its script tinyops calls {value!r}, which is no `module:function`"
    assert forge.findings()["installed_files"] == [message]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            b"[console_scripts\nx = y:z",
            "File contains no section headers. file: '<string>', line: 1 ",
        ),
        (b"[console_scripts]\n = \nx", "Source contains parsing errors: '<string>' "),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0"),
    ],
)
def test_scripts_that_nobody_can_read(forge: Forge, text: bytes, said: str) -> None:
    forge.replaced["entry_points.txt"] = text
    (found,) = forge.findings()["installed_files"]
    assert found.startswith(f"its entry_points.txt cannot be read: {said}")


def test_installed_files_of_data(forge: Forge) -> None:
    forge.files[f"tinyops-{forge.version}.data/data/share/man/man1/tinyops.1"] = b""
    forge.files[f"tinyops-{forge.version}.data/scripts/tinyops"] = b""
    forge.replaced["entry_points.txt"] = b"[console_scripts]\ntinyops-more = tinyops:main\n"
    assert forge.findings() == {}


@pytest.mark.parametrize(
    "requires",
    [["torch==2.13.*", "Torch==2.4.*"], ["torch==2.13.*; python_version < '3'"]],
    ids=["twice", "elsewhere"],
)
def test_requirement_that_does_not_hold(forge: Forge, requires: list[str]) -> None:
    forge.requires = requires
    assert [*forge.findings()] == ["requirement"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tinyops/__init__.py", b"raise ImportError"),
        ("tinyops/more.py", b""),
        ("tinyops/__init__.py", None),
    ],
    ids=["changed", "added", "lost"],
)
def test_record(forge: Forge, name: str, data: bytes | None) -> None:
    forge.unrecorded[name] = data
    assert forge.findings() == {"record": [f"its RECORD is not right about {name}"]}


def test_build_record_that_is_missing(forge: Forge) -> None:
    forge.replaced[BUILD_RECORD] = None
    message = f"it holds no build record (tinyops-{forge.version}.dist-info/{BUILD_RECORD})"
    assert forge.findings() == {"build_record": [message]}


def test_build_record_of_another_target(forge: Forge) -> None:
    record = json.loads(forge.fitting_metadata()[BUILD_RECORD])
    del record["cxx"]
    record["source"] = ["no text"]
    record |= {"target": "3.11-cu130", "torch": "2.12.1"}
    forge.replaced[BUILD_RECORD] = json.dumps(record).encode()
    assert forge.findings() == {
        "build_record": [
            "its build record names no source",
            "its build record names no cxx",
            "its build record has target '3.11-cu130', not '3.11-cpu'",
            "its build record has torch '2.12.1', not '2.13.0'",
        ]
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"tinyops"', b'"bigops"', "its bill of materials is not right about bigops"),
        (LIBRARY.encode(), b"x.so", f"its bill of materials is not right about {LIBRARY}"),
        (b"2.13.0", b"2.12.1", "its bill of materials is not right about torch"),
        (b"{", b"", "it cannot be checked: JSONDecodeError: "),
    ],
    ids=["another project", "another library", "another torch", "no JSON"],
)
def test_bill_of_materials(forge: Forge, old: bytes, new: bytes, message: str) -> None:
    bill = forge.fitting_metadata()[BILL_OF_MATERIALS]
    forge.replaced[BILL_OF_MATERIALS] = bill.replace(old, new, 1)
    found = forge.findings()
    assert [*found] == ["bill_of_materials"]
    assert found["bill_of_materials"][0].startswith(message)


def test_a_full_disk_is_no_fault_of_the_wheel(
    forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written into its report."""

    def size(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(audit, "RULES", [size])
    path = forge.wheel()
    with pytest.raises(OSError, match="No space left"):
        reports.write_report(path, project.Project())
    assert not reports.report_file(path).exists()


def test_bill_of_materials_that_is_missing(forge: Forge) -> None:
    forge.replaced[BILL_OF_MATERIALS] = None
    path = f"tinyops-{forge.version}.dist-info/{BILL_OF_MATERIALS}"
    message = f"it holds no bill of materials ({path})"
    assert forge.findings() == {"bill_of_materials": [message]}


def test_wheel_without_a_library(forge: Forge) -> None:
    """Every rule about libraries fails, rather than pass on nothing."""
    del forge.files[LIBRARY]
    rules = [rule.__name__ for rule in audit.RULES]
    of_the_file = ["size", "metadata", "installed_files", "record", "build_record"]
    expected = {rule: [audit.NO_LIBRARY] for rule in rules if rule not in of_the_file}
    assert forge.findings() == expected
    with pytest.raises(UserError) as error:
        reports.refuse([reports.audited(forge.wheel(), project.Project())])
    broken = ", ".join(expected)
    assert str(error.value).endswith(f"is not fit to publish:\n  {broken}: {audit.NO_LIBRARY}")


def test_all_that_is_wrong_is_said_at_once(forge: Forge) -> None:
    forge.requires, forge.unrecorded = [], {"tinyops/more.py": b""}
    said = (
        r"is not fit to publish:\n  requirement: .*torch==2\.13\.\*`\n  record: its RECORD is not"
    )
    with pytest.raises(UserError, match=said):
        reports.refuse([reports.audited(forge.wheel(), project.Project())])


def test_every_rule_is_broken_here() -> None:
    source = Path(__file__).read_text()
    assert [x.__name__ for x in audit.RULES if f'"{x.__name__}"' not in source] == []
