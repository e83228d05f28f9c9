"""Reading wheels: what is in their libraries, and what they work with."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from forged_wheels import CLASSIC, LIBRARY, STABLE, Forge, find_nvcc
from torchwheels.errors import UserError
from torchwheels.wheel import elf
from torchwheels.wheel.contents import read
from torchwheels.wheel.elf import GpuCode


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)


def test_classic_wheel_serves_one_python_and_one_torch(forge: Forge) -> None:
    found = read(forge.wheel())
    assert found.classic_use == (
        f"{LIBRARY} uses at::Tensor::zero_() and 0 more of torch's C++, which changes with every release"
    )
    assert (found.torches, found.pythons, found.cuda) == ("==2.13.*", "==3.11.*", "")


def test_torch_of_a_classic_wheel_is_read_from_its_build_record(forge: Forge) -> None:
    forge.requires = ["torch"]
    assert read(forge.wheel()).torches == "==2.13.*"
    forge.replaced["torchwheels.json"] = None
    assert read(forge.wheel()).torches is None


def test_stable_wheel_serves_torch_from_its_newest_function_on(forge: Forge) -> None:
    forge.make_stable()
    found = read(forge.wheel())
    assert (found.torches, found.pythons, found.classic_use) == (">=2.10", "", "")


def test_functions_of_the_wheel_itself_are_not_torchs(forge: Forge) -> None:
    forge.make_stable('extern "C" void torch_tiny(); void f() { torch_tiny(); }')
    forge.files["tinyops/_more.so"] = forge.compile('extern "C" void torch_tiny() {}')
    assert read(forge.wheel()).torches == ""


def test_optional_functions_are_not_needed(forge: Forge) -> None:
    """What is weak may be missing: the library asks whether it is there."""
    optional = "__attribute__((weak)) void torch_library_def_with_tags();"
    use = "void* g() { return (void*)torch_library_def_with_tags; }"
    forge.make_stable(f'{STABLE} extern "C" {optional} {use}')
    assert read(forge.wheel()).torches == ">=2.10"


@pytest.mark.parametrize(
    ("symbol", "what", "why"),
    [
        ("PyList_New", ">=3.10", "PyList_New, which is in the Limited API from 3.2 on"),
        (
            "PyObject_Vectorcall",
            ">=3.10",
            "PyObject_Vectorcall, which is in the Limited API from 3.12",
        ),
        ("_PyList_Extend", ">=3.10", "_PyList_Extend, which is not in the Limited API"),
    ],
    ids=["old", "new", "outside"],
)
def test_limited_api(forge: Forge, symbol: str, what: str, why: str) -> None:
    code = f'extern "C" void {symbol}(); void f() {{ {symbol}(); }}'
    forge.tag, forge.files = "cp310-abi3", {"tinyops/_C.abi3.so": forge.compile(CLASSIC + code)}
    found = read(forge.wheel())
    assert found.pythons == what
    assert why in found.python_limits["tinyops/_C.abi3.so"][1]


def test_symbols_and_needed_libraries(forge: Forge) -> None:
    code = "#include <cstdio>\nvoid f(); void g() { f(); std::puts(nullptr); }"
    needed = [forge.stub("libtorch_cpu.so"), forge.stub("libc10.so")]
    library = elf.read_library(forge.compile(code, *needed, flags=["-Wl,-rpath,/a:$ORIGIN"]))
    assert library.needed[:2] == ("libtorch_cpu.so", "libc10.so")
    assert library.rpath == ("/a", "$ORIGIN")
    assert library.undefined["_Z1fv"] == ""
    assert re.fullmatch(r"GLIBC_2\.\d+(\.\d+)?", library.undefined["puts"])
    assert "_Z1gv" in library.defined
    assert (library.soname, library.gpu_code) == (None, GpuCode())
    assert not library.start_up_sets_fast_math


def test_gpu_code(forge: Forge, shared: Path) -> None:
    nvcc = find_nvcc(shared / "nvcc")
    forge.make_cuda(nvcc.compile("sm_80", "sm_90a", "compute_75"))
    found = read(forge.wheel())
    code = found.libraries[LIBRARY].gpu_code
    assert code.machine_code == {"8.0", "9.0a"}
    assert code.ptx == {"7.5"}
    assert re.fullmatch(r"13\.\d", code.toolkit or "")
    assert found.cuda == "==13.*"
    forge.files[LIBRARY] = forge.compile(CLASSIC, nvcc.compile("sm_80", "sm_90a", "compute_75"))
    assert read(forge.wheel()).cuda == ""


def test_gpu_code_without_a_kernel(forge: Forge, tmp_path: Path) -> None:
    """nvcc embeds a module into each object, whether there is a kernel in it or not."""
    empty = find_nvcc(tmp_path).compile("sm_80", "compute_80", source="void host() {}")
    forge.make_cuda(empty)
    assert not read(forge.wheel()).libraries[LIBRARY].gpu_code


@pytest.mark.parametrize(
    "line",
    [
        "64-bit ELF: type=ET_EXEC, ABI=8, sm=90a, toolkit=12.4, flags=0x5005a04",
        "64bit elf: type=2, abi=7, sm=50, toolkit=124, flags = 0x320532",
    ],
    ids=["new", "old"],
)
def test_toolkit_of_machine_code(line: str) -> None:
    assert elf.toolkit_version(["arch = sm_50", line]) == "12.4"


def test_demangled_names() -> None:
    assert elf.demangle("_ZN3c105ErrorD1Ev") == "c10::Error::~Error()"
    assert elf.demangle("torch_list_size") == "torch_list_size"


def test_what_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "tinyops-1.0-py3-none-any.whl"
    path.write_text("no zip")
    with pytest.raises(UserError, match=r"-any\.whl is no wheel: File is not a zip file"):
        read(path)
    with pytest.raises(UserError, match=r"gone\.whl cannot be read: No such file or directory"):
        read(tmp_path / "gone.whl")


def test_wheel_under_a_wrong_name(forge: Forge) -> None:
    path = forge.wheel().rename(forge.folder / "tinyops.whl")
    with pytest.raises(UserError, match=r"tinyops\.whl is not named <project>-<version>-"):
        read(path)


def test_wheel_whose_name_is_html(forge: Forge) -> None:
    path = forge.wheel()
    name = path.name.replace("-cp311-cp311-", "-1<script>alert(1)<!--script>-cp311-cp311-")
    with pytest.raises(UserError, match="has characters in its name that the name of no wheel has"):
        read(path.rename(path.with_name(name)))


def test_wheel_without_metadata(forge: Forge) -> None:
    forge.replaced["METADATA"] = None
    with pytest.raises(UserError, match=r"holds 0 files \*\.dist-info/METADATA"):
        read(forge.wheel())


@pytest.mark.parametrize("how", [["-c"], ["-static"], []], ids="".join)
def test_what_the_loader_does_not_take_is_no_library(
    how: list[str], forge: Forge, tmp_path: Path
) -> None:
    """An object file or a static program; GPU code has no dynamic segment, either."""
    (tmp_path / "x.c").write_text("int main() { return 0; }\n")
    subprocess.run(["gcc", *how, "x.c", "-o", "x"], cwd=tmp_path, check=True)
    forge.files["tinyops/x"] = (tmp_path / "x").read_bytes()
    forge.files["tinyops/code.cubin"] = b"\x7fELF\x02\x01" + bytes(100)
    forge.files["tinyops/magic"] = b"\x7fELF\x02\x01"
    is_dynamic = not how
    assert {*read(forge.wheel()).libraries} == {LIBRARY} | ({"tinyops/x"} if is_dynamic else set())


def test_a_script_of_the_linker_is_no_library(forge: Forge) -> None:
    """Such as C libraries bring by the name that `-lq` finds."""
    forge.files["tinyops/lib/libq.so"] = b"/* GNU ld script */\nINPUT ( libq.so.1 )\n"
    assert {*read(forge.wheel()).libraries} == {LIBRARY}
    assert forge.findings() == {}


@pytest.mark.parametrize("length", [1000, 4, 0], ids=["cut short", "its magic alone", "empty"])
def test_library_that_is_not_whole(forge: Forge, length: int) -> None:
    forge.files[LIBRARY] = forge.files[LIBRARY][:length]
    found = read(forge.wheel())
    with pytest.raises(UserError, match=f"{LIBRARY} is no whole shared library of Linux"):
        _ = found.libraries


def test_a_library_of_another_type(forge: Forge) -> None:
    """dlopen takes it for a program."""
    data = bytearray(forge.files[LIBRARY])
    data[16] = 2  # e_type: ET_EXEC
    forge.files[LIBRARY] = bytes(data)
    found = read(forge.wheel())
    with pytest.raises(UserError, match=f"{LIBRARY}: it is of the type ET_EXEC, which no process"):
        _ = found.libraries
