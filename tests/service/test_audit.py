"""The rules that spoiled wheels must break, each one alone, and the passports of wheels."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from service import ROOT, ServiceError, audit, check, matrix, sbom, wheels
from service.compile import BUILD_INFO

pytest.importorskip("auditwheel", reason="auditwheel is not installed")

CPU = matrix.load().variant("cpu")
CUDA = matrix.load().variant("cu130")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU wheel of these sources."""
    return wheels.build(CPU, tmp_path_factory.mktemp("dist"))


def fat_binary(*entries: tuple[int, int]) -> bytes:
    """The container nvcc embeds, with code of 24 zero bytes for each (kind, architecture)."""
    code = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 0x101, 64, 24, architecture) + bytes(24)
        for kind, architecture in entries
    )
    return struct.pack("<IHHQ", check.FATBIN_MAGIC, 1, 16, len(code)) + code


PTX, MACHINE_CODE = 1, 2
COMPLETE = [(MACHINE_CODE, number) for number in (75, 80, 86, 90, 100, 120)] + [(PTX, 120)]


class Forge:
    """Makes wheels out of the real one that keep every rule, except for what a test spoils."""

    def __init__(self, folder: Path, built: Path) -> None:
        self.folder = folder
        self.real = check.Wheel(built)
        self.variant = CPU
        self.version, self.abi, self.platform = self.real.version, self.real.abi, self.real.platform
        self.info = self.real.info
        self.files = {
            name: data for name, data in self.real.files.items() if name.startswith("extops/")
        }
        self.metadata: dict[str, bytes] = {}
        """Files of the metadata that are to be others than they should be."""
        self.unrecorded: dict[str, bytes] = {}
        """Files that get into the wheel after RECORD was written."""

    def make_cuda(self, gpu_code: bytes, *flags: str) -> None:
        """Makes it a wheel of CUDA; `flags` are of its kernels."""
        self.variant, self.version = CUDA, self.version.replace("cpu", "cu130")
        self.info |= {"variant": "cu130", "cuda": "13.0", "architectures": CUDA.architectures}
        code = ""
        if gpu_code:
            content = ",".join(map(str, gpu_code))
            code = f'asm(".section .nv_fatbin,\\"a\\"\\n.byte {content}\\n.text");'
        self.add("libextops_cuda", code, *flags)
        links = [str(self.compile(name)) for name in ("libtorch_cpu", "libtorch_cuda")]
        self.add("libextops_stable_cuda", "", f"{self.folder}/libextops_cuda.so", *links)

    def compile(self, name: str, code: str = "", *flags: str) -> Path:
        output = self.folder / f"{name}.so"
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-x", "none", "-o", str(output)]
        command += [f"-Wl,-soname,{name}.so", "-Wl,--no-as-needed", *flags]
        subprocess.run(command, input=code, text=True, check=True)
        return output

    def add(self, library: str, code: str, *flags: str) -> None:
        """Compiles one of the wheel's libraries."""
        self.files[f"extops/{library}.so"] = self.compile(library, code, *flags).read_bytes()

    def findings(self) -> dict[str, list[str]]:
        """What is found wrong, by the rules that find something."""
        found = check.findings(check.Wheel(self.wheel()), self.variant)
        return {rule: problems for rule, problems in found.items() if problems}

    def wheel(self) -> Path:
        """Packs the wheel, with metadata that fit what is in it."""
        dist_info = f"extops-{self.version}.dist-info"
        packed = {**self.files, f"extops/{BUILD_INFO}": json.dumps(self.info).encode()}
        packed |= {f"{dist_info}/{name}": data for name, data in self.fitting_metadata().items()}
        record = "".join(f"{name},{check.record_hash(packed[name])},\n" for name in packed)
        packed[f"{dist_info}/RECORD"] = record.encode()
        path = self.folder / f"extops-{self.version}-{self.abi}-{self.platform}.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in {**packed, **self.unrecorded}.items():
                archive.writestr(name, data)
        return path

    def fitting_metadata(self) -> dict[str, bytes]:
        real = {name: self.real.files[f"{self.real.dist_info}/{name}"] for name in KEPT}
        old, new = (f"\nVersion: {version}\n" for version in (self.real.version, self.version))
        text = self.metadata.get("METADATA") or real["METADATA"].replace(old.encode(), new.encode())
        ours = [name for name in self.files if name.startswith("extops/libextops_")]
        libraries = {name.removeprefix("extops/"): self.files[name] for name in ours}
        bill = sbom.text(text, self.info, libraries)
        return {**real, "METADATA": text, sbom.PATH: bill.encode(), **self.metadata}


KEPT = ("METADATA", "WHEEL", "top_level.txt", "licenses/LICENSE")


@pytest.fixture
def forge(tmp_path: Path, built: Path) -> Forge:
    return Forge(tmp_path, built)


def test_sound_wheels_pass(forge: Forge) -> None:
    assert forge.findings() == {}
    forge.make_cuda(fat_binary(*COMPLETE))
    assert forge.findings() == {}


def test_architectures_of_several_regions() -> None:
    gpu_code = fat_binary((MACHINE_CODE, 75)) + bytes(8) + fat_binary((PTX, 90), (MACHINE_CODE, 90))
    assert check.architectures(gpu_code) == ({75, 90}, {90})
    assert check.architectures(b"") == (set(), set())


def test_label_of_another_variant(forge: Forge) -> None:
    forge.version = forge.version.replace("cpu", "cu121")
    message = f"its version is {forge.version}, but cpu has +cpu"
    assert forge.findings() == {"version_and_label": [message]}


def test_version_that_is_not_the_metadatas(forge: Forge) -> None:
    real = forge.real.files[f"{forge.real.dist_info}/METADATA"]
    forge.metadata["METADATA"] = real.replace(b"\nVersion: 0.", b"\nVersion: 9.", 1)
    (message,) = forge.findings()["version_and_label"]
    assert message.startswith("its metadata names the version 9.")


@pytest.mark.parametrize("platform", ["manylinux_2_17_x86_64", "linux_x86_64"])
def test_tag_without_proof(forge: Forge, platform: str) -> None:
    message = f"its tag is {platform}, but auditwheel proves {forge.platform}"
    forge.platform = platform
    assert forge.findings() == {"manylinux_tag": [message]}


@pytest.mark.skipif(
    tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 34),
    reason="this glibc is too old to link against a newer one",
)
def test_tag_that_is_too_new(forge: Forge) -> None:
    code = "#include <pthread.h>\nint f(pthread_t t) { return pthread_join(t, nullptr); }"
    forge.add("libextops_cpu", code)
    forge.platform = "manylinux_2_34_x86_64"
    message = "its tag is manylinux_2_34_x86_64, but manylinux_2_28 or older is wanted"
    assert forge.findings() == {"manylinux_tag": [message]}


def test_tag_of_one_python(forge: Forge) -> None:
    forge.abi = "cp311-cp311"
    assert forge.findings() == {"python_abi": ["its tag is cp311-cp311, not py3-none"]}


def test_symbol_of_python(forge: Forge) -> None:
    forge.add("libextops_cpu", "extern void* Py_None; void* f() { return Py_None; }")
    assert forge.findings() == {"python_abi": ["libextops_cpu.so uses Py_None"]}


def test_symbols_of_torch(forge: Forge) -> None:
    """Its C++ functions are outside the stable ABI, and even stable ones are not for kernels."""
    code = "namespace c10 { void g(); } void f() { c10::g(); }"
    forge.add("libextops_cpu", code + 'extern "C" void torch_f(); void g() { torch_f(); }')
    end = ", which is neither in torch's stable ABI nor in manylinux_2_28"
    found = forge.findings()
    assert set(found) == {"stable_abi"}
    expected = [f"libextops_cpu.so uses {name}{end}" for name in ("_ZN3c101gEv", "torch_f")]
    assert sorted(found["stable_abi"]) == expected


@pytest.mark.parametrize(
    "entries",
    [COMPLETE[1:], COMPLETE[:-1], [*COMPLETE, (MACHINE_CODE, 50)], []],
    ids=["one missing", "no PTX", "one too many", "none"],
)
def test_wrong_gpu_code(forge: Forge, entries: list[tuple[int, int]]) -> None:
    forge.make_cuda(fat_binary(*entries) if entries else b"")
    found = forge.findings()
    assert set(found) == {"gpu_code"}
    (message,) = found["gpu_code"]
    assert message.startswith("libextops_cuda.so holds GPU code for ")
    assert message.endswith("but cu130 names 7.5 8.0 8.6 9.0 10.0 12.0+PTX")


@pytest.mark.parametrize("name", ["extops.libs/libcudart-1234.so.13", "extops/libtorch_cpu.so"])
def test_bundled_library(forge: Forge, name: str) -> None:
    forge.files[name] = b""
    message = f"it holds the library {name}, which is not ours"
    assert forge.findings() == {"bundled_libraries": [message]}


def test_shared_cuda_runtime(forge: Forge) -> None:
    runtime = forge.compile("libcudart", "", "-Wl,-soname,libcudart.so.13")
    forge.make_cuda(fat_binary(*COMPLETE), str(runtime))
    assert forge.findings() == {"linked_libraries": ["libextops_cuda.so needs libcudart.so.13"]}


def test_torch_that_is_not_named(forge: Forge) -> None:
    forge.add("libextops_stable_cpu", "", str(forge.compile("libextops_cpu")))
    message = "libextops_stable_cpu.so does not name libtorch_cpu.so"
    assert forge.findings() == {"linked_libraries": [message]}


def test_size_over_the_budget(forge: Forge) -> None:
    forge.files["extops/csrc/kernels/types.h"] = os.urandom(1_000_000)
    found = forge.findings()
    assert set(found) == {"size"}
    assert re.fullmatch(r"it has 1\.\d\d MB, over the 1 MB allowed", *found["size"])


def test_files_that_do_not_belong(forge: Forge) -> None:
    forge.files |= {"extops/notes.txt": b"", "tests/conftest.py": b""}
    expected = ["extops/notes.txt", "tests/conftest.py"]
    messages = [f"it holds {name}, which does not belong" for name in expected]
    assert forge.findings() == {"files": messages}


def test_files_left_out(forge: Forge) -> None:
    forge.make_cuda(fat_binary(*COMPLETE))
    del forge.files["extops/libextops_stable_cuda.so"], forge.files["extops/ops/rounding.py"]
    missing = ["extops/libextops_stable_cuda.so", "extops/ops/rounding.py"]
    assert forge.findings() == {"files": [f"it lacks {name}" for name in missing]}


def test_library_cut_short(forge: Forge) -> None:
    forge.files["extops/libextops_cpu.so"] = forge.files["extops/libextops_cpu.so"][:1000]
    found = forge.findings()
    rules = {"manylinux_tag", "python_abi", "stable_abi", "gpu_code", "linked_libraries"}
    assert set(found) == rules
    for messages in found.values():
        assert messages[0].startswith("it cannot be judged: ELFParseError: ")


def test_file_that_was_changed(forge: Forge) -> None:
    forge.unrecorded["extops/reference.py"] = b"raise ImportError"
    message = "its RECORD is not right about extops/reference.py"
    assert forge.findings() == {"record": [message]}


def test_bill_of_other_materials(forge: Forge) -> None:
    bill = forge.real.files[f"{forge.real.dist_info}/{sbom.PATH}"]
    forge.metadata[sbom.PATH] = bill.replace(b"libstdc++.a", b"libc++.a")
    message = f"its {sbom.PATH} does not describe this wheel"
    assert forge.findings() == {"bill_of_materials": [message]}


def test_every_rule_is_broken_here() -> None:
    source = Path(__file__).read_text()
    assert [x.__name__ for x in check.RULES if f'"{x.__name__}"' not in source] == []


def test_bill_of_materials_keeps_to_its_format(forge: Forge) -> None:
    validation = pytest.importorskip(
        "cyclonedx.validation.json", reason="cyclonedx-python-lib is not installed"
    )
    from cyclonedx.schema import SchemaVersion

    forge.make_cuda(fat_binary(*COMPLETE))
    wheel = check.Wheel(forge.wheel())
    text = wheel.files[f"{wheel.dist_info}/{sbom.PATH}"].decode()
    assert validation.JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = {each["name"]: each for each in json.loads(text)["components"]}
    assert components["libcudart_static.a"]["version"] == "13.0"
    assert "scope" not in components["libcudart_static.a"]
    assert components["torch"]["scope"] == "excluded"


def test_build_names_every_problem(forge: Forge) -> None:
    forge.files |= {"extops/libstranger.so": b"", "extops/notes.txt": b""}
    with pytest.raises(
        ServiceError, match=r"holds the library .*libstranger\.so.*; it holds .*txt"
    ):
        check.check(forge.wheel(), CPU)


def test_the_release_that_the_documentation_shows_has_passed() -> None:
    passport = json.loads((ROOT / "benchmarks" / "results" / "release.passport.json").read_text())
    assert all(rule["passed"] for rule in passport["rules"])
    assert all(test["passed"] and not test["failed"] for test in passport["tests"])


def run_audit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service.audit", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_passport(forge: Forge) -> None:
    wheel = forge.wheel()
    done = run_audit(wheel)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("extops: 1 of 1 wheels are fit to publish\n")
    passport = json.loads(wheels.passport(wheel).read_text())
    assert passport["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (passport["size"], passport["wheel"]) == (wheel.stat().st_size, wheel.name)
    assert (passport["variant"], passport["cuda"], passport["architectures"]) == ("cpu", None, [])
    assert (passport["minimum_torch"], passport["requires_python"]) == ("2.4", ">=3.10")
    assert passport["tag"] == f"py3-none-{forge.platform}"
    assert list(passport["libraries"]) == ["libextops_cpu.so", "libextops_stable_cpu.so"]
    assert {rule["rule"]: rule["passed"] for rule in passport["rules"]} == {
        rule.__name__: True for rule in check.RULES
    }
    assert passport["tests"] == []


def test_spoiled_wheel_gets_a_passport_that_says_so(forge: Forge) -> None:
    forge.files["extops/notes.txt"] = b""
    wheel = forge.wheel()
    done = run_audit(wheel)
    assert done.returncode == 1
    message = "it holds extops/notes.txt, which does not belong"
    assert done.stderr == f"extops: not fit to publish: {wheel.name}: {message}\n"
    rules = {rule["rule"]: rule for rule in json.loads(wheels.passport(wheel).read_text())["rules"]}
    assert rules["files"] == {"rule": "files", "passed": False, "detail": message}


def test_what_is_no_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "extops-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    wheel.write_text("no zip")
    done = run_audit(wheel)
    assert (done.returncode, done.stderr) == (
        1,
        f"extops: not fit to publish: {wheel} is no wheel: File is not a zip file\n",
    )


def test_tests_of_these_very_files_are_in_the_passport(forge: Forge) -> None:
    """A record that the suite leaves, where the wheel is installed, and one of another wheel."""
    wheel = forge.wheel()
    site, records = forge.folder / "site", forge.folder / wheels.TESTS
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True)
    shutil.copytree(
        ROOT / "tests", forge.folder / "suite", ignore=shutil.ignore_patterns("service")
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "version"]
    done = subprocess.run(
        [*command, "suite/test_imports.py", f"--record={records / '3.11-cpu'}"],
        cwd=forge.folder,
        env={**os.environ, "PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    (file,) = (records / "3.11-cpu").iterdir()
    assert file.name == "cpu.json", done.stdout
    record = json.loads(file.read_text())
    (records / "3.12-cpu").mkdir()
    (records / "3.12-cpu" / "cpu.json").write_text(json.dumps({**record, "contents": "others"}))
    del record["contents"]
    assert (record["device"], record["python"]) == ("CPU", platform.python_version())
    assert record["passed"] > 0
    found = audit.tests_of(check.Wheel(wheel), records)
    assert found == [{"cell": "3.11-cpu", **record}]


def test_wheel_whose_tests_failed(forge: Forge) -> None:
    wheel = forge.wheel()
    folder = forge.folder / wheels.TESTS / "3.11-cpu"
    folder.mkdir(parents=True)
    record = {"contents": check.Wheel(wheel).contents, "python": "3.11.7", "torch": "2.13.0"}
    record |= {"device": "CPU", "passed": 1, "failed": 1, "skipped": 0}
    (folder / "cpu.json").write_text(json.dumps(record))
    done = run_audit(wheel)
    assert done.returncode == 1
    assert done.stderr.endswith(f"{wheel.name}: its tests failed in 3.11-cpu\n")
    assert "| 3.11-cpu | 3.11.7 | 2.13.0 | CPU | 1 | 1 | 0 |" in done.stdout
