"""Publishing wheels, builds that die, and the check that spoiled wheels must fail."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from service import ROOT, ServiceError, check, matrix, native_libraries, wheels

CPU = matrix.load().variant("cpu")
CUDA = matrix.load().variant("cu130")
NAME = "extops-0.1.0+{}-py3-none-manylinux_2_28_x86_64.whl"


@pytest.fixture(autouse=True)
def _no_locks_in_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "ROOT", tmp_path)


def make_wheel(variant: matrix.Variant, work: Path) -> Path:
    wheel = work / NAME.format(variant.name)
    wheel.write_text("new")
    return wheel


def test_build_replaces_the_wheel_of_its_variant_only(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / "extops-0.0.9+cpu-py3-none-manylinux_2_34_x86_64.whl").write_text("old")
    (dist / NAME.format("cu130")).write_text("other")
    wheel = wheels.build(CPU, dist, make_wheel)
    assert wheel.read_text() == "new"
    assert sorted(dist.iterdir()) == [wheel, dist / NAME.format("cu130")]


def test_release_is_the_wheel_without_a_label(tmp_path: Path) -> None:
    labelled = [tmp_path / NAME.format(name) for name in ("cpu", "cu124")]
    plain = tmp_path / "extops-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    for wheel in (*labelled, plain):
        wheel.touch()
    assert wheels.published(matrix.load().variant("release"), tmp_path) == [plain]
    assert wheels.published(CPU, tmp_path) == labelled[:1]


def test_failed_build_leaves_no_wheel(tmp_path: Path) -> None:
    def fail(variant: matrix.Variant, work: Path) -> Path:
        make_wheel(variant, work)
        raise ServiceError("the compiler said no")

    wheels.build(CPU, tmp_path / "dist", make_wheel)
    with pytest.raises(ServiceError, match="said no"):
        wheels.build(CPU, tmp_path / "dist", fail)
    assert list((tmp_path / "dist").iterdir()) == []


@pytest.mark.parametrize("step", ["service.wheels.publish", "os.fsync", "shutil.copyfile"])
def test_killed_build_leaves_no_wheel(tmp_path: Path, step: str) -> None:
    """Dies when `step` begins: with the wheel made, with a copy of it written, with none written."""
    program = f"""
        import os, shutil, signal, sys, pathlib
        import service.wheels
        service.wheels.ROOT = root = pathlib.Path({str(tmp_path)!r})
        def make(variant, work):
            wheel = work / {NAME.format("cpu")!r}
            wheel.write_text("new")
            return wheel
        {step} = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        service.wheels.build(service.wheels.load().variant("cpu"), root / "dist", make)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    dist = tmp_path / "dist"
    assert list(dist.glob("*.whl")) == []
    wheel = wheels.build(CPU, dist, make_wheel)
    assert list(dist.iterdir()) == [wheel]
    assert wheel.read_text() == "new"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_build_leaves_no_wheel(tmp_path: Path, number: signal.Signals) -> None:
    """Is interrupted with the wheel half made; `make` says when that is, and waits."""
    program = f"""
        import pathlib, signal, sys
        import service.wheels
        service.wheels.ROOT = root = pathlib.Path({str(tmp_path)!r})
        def make(variant, work):
            (work / {NAME.format("cpu")!r}).write_text("ne")
            print("half", flush=True)
            signal.pause()
        service.wheels.build(service.wheels.load().variant("cpu"), root / "dist", make)
    """
    dist = tmp_path / "dist"
    wheels.build(CPU, dist, make_wheel)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.send_signal(number)
    process.communicate()
    assert process.returncode != 0
    assert list(dist.iterdir()) == []
    assert wheels.build(CPU, dist, make_wheel).read_text() == "new"


def test_full_disk_leaves_no_wheel(tmp_path: Path) -> None:
    """No file may grow over 1000 bytes, which fails where a full disk would."""
    program = f"""
        import pathlib, resource
        import service.wheels
        service.wheels.ROOT = root = pathlib.Path({str(tmp_path)!r})
        def make(variant, work):
            wheel = work / {NAME.format("cpu")!r}
            wheel.write_bytes(bytes(100_000))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            return wheel
        try:
            service.wheels.build(service.wheels.load().variant("cpu"), root / "dist", make)
        except service.ServiceError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout.startswith("there is no room to build cpu (File too large: ")
    assert done.stdout.endswith("): free some space and build again; nothing was published\n")
    dist = tmp_path / "dist"
    assert list(dist.iterdir()) == []
    assert wheels.build(CPU, dist, make_wheel).read_text() == "new"


def test_two_builds_of_one_variant_take_turns(tmp_path: Path) -> None:
    program = f"""
        import pathlib, time
        import service.wheels
        service.wheels.ROOT = root = pathlib.Path({str(tmp_path)!r})
        with service.wheels.turn(service.wheels.load().variant("cpu")) as work:
            (work / "mine").touch()
            time.sleep(0.3)
            assert [path.name for path in work.iterdir()] == ["mine"]
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "extops: waiting for another build of cpu to end\n" in said


def test_no_wheel_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"no wheel of cu130 in .*`nox -s build-3.11-cu130`"):
        wheels.wheel_for(matrix.load().cell("3.11-cu130"), tmp_path)


def fat_binary(*entries: tuple[int, int]) -> bytes:
    """The container nvcc embeds, with code of 24 zero bytes for each (kind, architecture)."""
    code = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 0x101, 64, 24, architecture) + bytes(24)
        for kind, architecture in entries
    )
    return struct.pack("<IHHQ", check.FATBIN_MAGIC, 1, 16, len(code)) + code


PTX, MACHINE_CODE = 1, 2
COMPLETE = [(MACHINE_CODE, number) for number in (75, 80, 86, 90, 100, 120)] + [(PTX, 120)]


def test_architectures_of_several_regions() -> None:
    gpu_code = fat_binary((MACHINE_CODE, 75)) + bytes(8) + fat_binary((PTX, 90), (MACHINE_CODE, 90))
    assert check.architectures(gpu_code) == ({75, 90}, {90})
    assert check.architectures(b"") == (set(), set())


class Forge:
    """Makes wheels that pass the check, except for what a test spoils."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gpu_code = fat_binary(*COMPLETE)
        self.code = ""
        self.left_out = ""
        self.extra: dict[str, str] = {}

    def library(self, library: native_libraries().Library) -> Path:  # type: ignore[misc]
        needed = [*library.links, *(f"lib{name}" for name in library.torch_links)]
        for name in needed:
            self.compile(name, "")
        kernels = library.cuda and not library.torch_links
        code = self.code
        if kernels and self.gpu_code:
            content = ",".join(map(str, self.gpu_code))
            code += f'asm(".section .nv_fatbin,\\"a\\"\\n.byte {content}\\n.text");'
        return self.compile(library.name, code, *(f"{self.folder}/{name}.so" for name in needed))

    def compile(self, name: str, code: str, *flags: str) -> Path:
        output = self.folder / f"{name}.so"
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-x", "none", "-o", str(output)]
        command += [f"-Wl,-soname,{name}.so", "-Wl,--no-as-needed", *flags]
        subprocess.run(command, input=code, text=True, check=True)
        return output

    def wheel(self, variant: matrix.Variant, name: str = NAME) -> Path:
        libraries = native_libraries().libraries(cuda=bool(variant.cuda))
        package = ROOT / "package" / "extops"
        wheel = self.folder / name.format(variant.name)
        with zipfile.ZipFile(wheel, "w") as archive:
            for path in package.rglob("*.py"):
                archive.write(path, f"extops/{path.relative_to(package)}")
            for path in (ROOT / "csrc").rglob("*.*"):
                archive.write(path, f"extops/csrc/{path.relative_to(ROOT / 'csrc')}")
            archive.writestr("extops/_build_info.json", "{}")
            for library in libraries:
                if library.name != self.left_out:
                    archive.write(self.library(library), f"extops/{library.name}.so")
            for member, text in self.extra.items():
                archive.writestr(member, text)
        return wheel


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    pytest.importorskip("elftools", reason="pyelftools is not installed")
    return Forge(tmp_path)


@pytest.mark.parametrize("variant", [CPU, CUDA], ids=["cpu", "cu130"])
def test_sound_wheel_passes(forge: Forge, variant: matrix.Variant) -> None:
    assert check.problems(forge.wheel(variant), variant) == []


def problem(forge: Forge, variant: matrix.Variant = CPU, name: str = NAME) -> str:
    """The one thing that the check finds wrong."""
    (found,) = check.problems(forge.wheel(variant, name), variant)
    return found


def test_tag_without_proof(forge: Forge) -> None:
    found = problem(forge, name="extops-0.1.0+{}-py3-none-linux_x86_64.whl")
    assert "py3-none-manylinux" in found


def test_tag_of_one_python(forge: Forge) -> None:
    found = problem(forge, name="extops-0.1.0+{}-cp311-cp311-manylinux_2_28_x86_64.whl")
    assert "py3-none-manylinux" in found


def test_label_of_another_variant(forge: Forge) -> None:
    found = problem(forge, name=NAME.format("cu121"))
    assert found == "its label is 'cu121', but cpu was built"


def test_library_left_out(forge: Forge) -> None:
    forge.left_out = "libextops_stable_cuda"
    assert problem(forge, CUDA) == "it lacks libextops_stable_cuda.so"


def test_bundled_library(forge: Forge) -> None:
    forge.extra = {"extops.libs/libcudart-1234.so.13": ""}
    assert "libcudart-1234.so.13, which is not ours" in problem(forge)


@pytest.mark.parametrize(
    ("code", "symbol"),
    [
        ("extern void* Py_None; void* f() { return Py_None; }", "Py_None"),
        ("namespace c10 { void g(); } void f() { c10::g(); }", "_ZN3c101gEv"),
    ],
    ids=["python", "torch"],
)
def test_forbidden_symbol(forge: Forge, code: str, symbol: str) -> None:
    forge.code = code.replace("f()", '__attribute__((visibility("default"))) f()', 1)
    found = check.problems(forge.wheel(CPU), CPU)
    assert found == [f"libextops_cpu.so uses {symbol}", f"libextops_stable_cpu.so uses {symbol}"]


def test_shared_cuda_runtime(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    forge.compile("libcudart", "", "-Wl,-soname,libcudart.so.13")
    compile = forge.compile
    runtime = str(forge.folder / "libcudart.so")
    monkeypatch.setattr(
        forge,
        "compile",
        lambda name, code, *flags: compile(
            name, code, *flags, *([runtime] if name == "libextops_cuda" else [])
        ),
    )
    assert problem(forge, CUDA) == "libextops_cuda.so needs libcudart.so.13"


@pytest.mark.parametrize(
    "entries",
    [COMPLETE[1:], COMPLETE[:-1], [*COMPLETE, (MACHINE_CODE, 50)], []],
    ids=["one missing", "no PTX", "one too many", "none"],
)
def test_wrong_gpu_code(forge: Forge, entries: list[tuple[int, int]]) -> None:
    forge.gpu_code = fat_binary(*entries) if entries else b""
    found = problem(forge, CUDA)
    assert found.startswith("libextops_cuda.so holds GPU code for ")
    assert found.endswith("but cu130 names 7.5 8.0 8.6 9.0 10.0 12.0+PTX")


def test_check_names_every_problem(forge: Forge) -> None:
    forge.left_out = "libextops_cpu"
    forge.extra = {"extops/libstranger.so": ""}
    with pytest.raises(ServiceError, match=r"lacks libextops_cpu\.so; it holds .*libstranger\.so"):
        check.check(forge.wheel(CPU), CPU)


def test_failing_tool_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "pip", "nonsense"]
    with pytest.raises(ServiceError, match="the build failed in `pip nonsense`"):
        wheels.run_for_wheel(command, tmp_path, dict(os.environ))
    assert "nonsense" in capfd.readouterr().err
