"""What is added to a wheel once it is built, and the import that it must pass."""

from __future__ import annotations

import dataclasses
import email
import io
import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from forged_wheels import made_once
from torchwheels import environments
from torchwheels.build import check_import, toolchain
from torchwheels.build.steps import libraries_of_requirements
from torchwheels.errors import UserError
from torchwheels.options import releases
from torchwheels.system import machines
from torchwheels.wheel import finish, variants
from torchwheels.wheel.contents import read

HERE = machines.MACHINES[platform.machine()]

TARGET = releases.load().target("3.11-cpu")
CUDA_TARGET = releases.load().target("3.11-cu130")
USED = finish.Used(TARGET, (), "sha256:1", "g++ 12", None)

CLASSIC = "namespace at { int version(); }\nint used() { return at::version(); }\n"
PLAIN = 'extern "C" int used() { return 1; }\n'


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("compilers") / "compilers"
    return str(toolchain.make_wrappers(folder, toolchain.host_compiler(HERE), {}) / "g++")


def library(compiler: str, folder: Path, code: str, *flags: str) -> bytes:
    target = folder / "library.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", target, *flags]
    subprocess.run(command, input=code, text=True, check=True)
    return target.read_bytes()


def wheel(
    folder: Path,
    libraries: dict[str, bytes],
    version: str = "1.5",
    text: str = "",
    mode: int = 0o644,
    requires: str = "torch>=2",
    platform: str = "linux_x86_64",
    python: str = "cp311-cp311",
) -> Path:
    """A wheel as setuptools makes it, of a package `package` with that text."""
    info = f"some_project-{version}.dist-info"
    files: dict[str, str | bytes] = {
        "package/__init__.py": text,
        **libraries,
        f"some_project-{version}.data/scripts/run": "#!python\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: some-project\nVersion: {version}\n"
        f'Requires-Dist: {requires}\nRequires-Dist: idna; extra == "x"\nProvides-Extra: x\n\nAll of it: ü\n',
        f"{info}/WHEEL": "Wheel-Version: 1.0\n"
        f"Root-Is-Purelib: {str(platform == 'any').lower()}\nTag: {python}-{platform}\n\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"some_project-{version}-{python}-{platform}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, (2026, 1, 1, mode % 24, 0, 0))
            entry.external_attr = mode << 16
            archive.writestr(entry, content)
    return path


def finished(path: Path, used: finish.Used = USED) -> Path:
    return finish.finish(read(path), path.parent / "finished", used, []).path


def test_classic_wheel_gets_label_requirement_tag_record_and_bill(
    compiler: str, tmp_path: Path
) -> None:
    built = wheel(tmp_path, {"package/_C.so": library(compiler, tmp_path, CLASSIC)})
    result = finished(built)
    name, version, _, _, platform = result.stem.split("-")
    assert (name, version) == ("some_project", "1.5+cpu.torch2.13")
    assert platform.startswith("manylinux")
    contents = read(result).files
    info = "some_project-1.5+cpu.torch2.13.dist-info"
    metadata = email.message_from_bytes(contents[f"{info}/METADATA"])
    assert metadata["Version"] == version
    assert metadata.get_all("Requires-Dist") == ["torch==2.13.*", 'idna; extra == "x"']
    assert "All of it: ü" in contents[f"{info}/METADATA"].decode()
    for tag in platform.split("."):
        assert f"Tag: cp311-cp311-{tag}\n" in contents[f"{info}/WHEEL"].decode()
    record = json.loads(contents[f"{info}/torchwheels.json"])
    assert record["source"] == "sha256:1"
    assert (record["target"], record["torch"], record["cuda"]) == ("3.11-cpu", "2.13.0", None)
    bill = json.loads(contents[f"{info}/sboms/some-project.cdx.json"])
    assert bill["metadata"]["component"]["version"] == version
    assert [x["name"] for x in bill["components"]] == ["package/_C.so", "torch", "g++"]
    assert f"some_project-{version}.data/scripts/run" in contents


def test_platform_is_proved_whatever_the_project_says(compiler: str, tmp_path: Path) -> None:
    """As the setup.py of rotary-emb does, which says manylinux2014."""
    files = {"package/_C.so": library(compiler, tmp_path, PLAIN)}
    promised = wheel(tmp_path / "promised", files, platform="manylinux2014_x86_64")
    result, usual = finished(promised), finished(wheel(tmp_path / "usual", files))
    assert result.name == usual.name
    assert result.read_bytes() == usual.read_bytes()
    assert [*result.parent.glob("*.whl")] == [result]


def test_tag_of_a_python_without_the_global_lock(compiler: str, tmp_path: Path) -> None:
    code = 'extern "C" void PyList_New(); void f() { PyList_New(); }'
    libraries = {"package/_C.so": library(compiler, tmp_path, code)}
    used = dataclasses.replace(USED, target=releases.load().target("3.14t-cpu"))
    result = finished(wheel(tmp_path, libraries, python="py3-none"), used)
    assert "-cp314-cp314t-manylinux" in result.name


# The layouts that a library uses may be those of one Python, also where its functions are of the Limited API. A tag
# of CPython is a choice of the project's, which the audit refuses.
@pytest.mark.parametrize(
    ("promised", "function", "tag"),
    [
        ("py3-none-any", "PyFrame_GetBack", "cp311-cp311"),
        ("py3-none-linux_x86_64", "PyList_New", "cp311-cp311"),
        ("py3-none-any", "puts", "py3-none"),
        ("cp310-abi3-linux_x86_64", "PyFrame_GetBack", "cp310-abi3"),
    ],
)
def test_a_wheel_for_every_python_is_for_one_where_a_library_uses_that(
    compiler: str, tmp_path: Path, promised: str, function: str, tag: str
) -> None:
    """As that of torch-c-dlpack-ext, whose backend compiles a library that Python's setuptools knows nothing of."""
    code = f'extern "C" void {function}(); void f() {{ {function}(); }}'
    libraries = {"package/_C.so": library(compiler, tmp_path, code)}
    python, _, platform = promised.rpartition("-")
    result = read(finished(wheel(tmp_path, libraries, python=python, platform=platform)))
    assert {f"{each.interpreter}-{each.abi}" for each in result.tags} == {tag}
    lines = result.files[f"{result.dist_info}/WHEEL"].decode().splitlines()
    said = {line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")}
    assert said == {str(each) for each in result.tags}


def test_bill_of_materials_follows_the_schema() -> None:
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    record = finish.build_record(
        "some-project", "1.5+cu130", finish.Used(CUDA_TARGET, ("9.0",), "x", "g++", "13.0")
    )
    bill = finish.bill_of_materials(record, {"package/_C.so": b"1"})
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(bill)) is None


@pytest.mark.parametrize(
    ("version", "code", "label"),
    [
        ("1.5+abc", CLASSIC, "1.5+abc.cpu.torch2.13"),
        ("1.5+cpu.torch2.13", CLASSIC, "1.5+cpu.torch2.13"),
        ("1.5", PLAIN, "1.5+cpu"),
        (
            "1.5+torch2.13",
            CLASSIC,
            "1.5+cpu.torch2.13",
        ),  # one address, whatever the project begins with
        ("1.5+torch2.13.abc.cpu", CLASSIC, "1.5+abc.cpu.torch2.13"),
    ],
)
def test_label_keeps_the_projects_own_and_names_torch_where_it_matters(
    compiler: str, tmp_path: Path, version: str, code: str, label: str
) -> None:
    built = wheel(tmp_path, {"package/_C.so": library(compiler, tmp_path, code)}, version)
    assert finished(built).name.split("-")[1] == label


@pytest.mark.parametrize(("modes", "kept"), [((0o644, 0o600), 0o644), ((0o755, 0o711), 0o755)])
def test_of_modes_and_times_only_what_may_be_run_matters(
    compiler: str, tmp_path: Path, modes: tuple[int, int], kept: int
) -> None:
    """A package may have a program beside its modules, which an installer lets run."""
    data = {"package/_C.so": library(compiler, tmp_path, CLASSIC)}
    one, other = (finished(wheel(tmp_path / oct(x), data, mode=x)) for x in modes)
    assert one.read_bytes() == other.read_bytes()
    variant = variants.write(read(one))
    assert variant
    for path in (one, variant):
        with zipfile.ZipFile(path) as archive:
            found = {x.filename: x.external_attr >> 16 & 0o777 for x in archive.infolist()}
        (script,) = (x for x in found if ".data/scripts/" in x)
        assert found.pop(script) == 0o755
        assert {x for name, x in found.items() if ".dist-info/" not in name} == {kept}


def test_record_is_right(compiler: str, tmp_path: Path) -> None:
    result = finished(wheel(tmp_path, {"package/_C.so": library(compiler, tmp_path, CLASSIC)}))
    rows = read(result).files["some_project-1.5+cpu.torch2.13.dist-info/RECORD"].decode()
    named = [line.rsplit(",", 2)[0] for line in io.StringIO(rows)]
    with zipfile.ZipFile(result) as archive:
        assert named == archive.namelist()


def test_names_of_files_need_no_locale(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    files = {"package/_C.so": library(compiler, tmp_path, CLASSIC), "package/größe.txt": b""}
    assert "package/größe.txt" in read(finished(wheel(tmp_path, files))).files


def test_library_that_nobody_brings_is_refused(compiler: str, tmp_path: Path) -> None:
    other = library(compiler, tmp_path, PLAIN, "-Wl,-soname,libelsewhere.so.1")
    (tmp_path / "libelsewhere.so").write_bytes(other)
    code = 'extern "C" int used();\nint uses() { return used(); }\n'
    data = library(compiler, tmp_path, code, f"-L{tmp_path}", "-lelsewhere")
    with pytest.raises(
        UserError, match=r"auditwheel cannot prove .*libelsewhere\.so\.1.*; it must be on this"
    ):
        finished(wheel(tmp_path, {"package/_C.so": data}))


def test_only_a_library_that_is_missing_is_asked_for(compiler: str, tmp_path: Path) -> None:
    path = wheel(tmp_path, {"package/_C.so": library(compiler, tmp_path, PLAIN), "x" * 300: b""})
    with pytest.raises(UserError, match=r"auditwheel cannot prove .*File name too long: '/.*'$"):
        finished(path)


def test_folders_of_the_builders_machine_are_not_searched(compiler: str, tmp_path: Path) -> None:
    """Those of meson and of Pythons that are built from source, and of MKL, which torch's CMake files name."""
    own = [str(tmp_path / "environment" / "torch" / "lib"), "/lib/intel64"]
    flags = [f"-Wl,-rpath,{':'.join([*own, '$ORIGIN/lib'])}"]
    libraries = {
        "package/_C.so": library(compiler, tmp_path, PLAIN, *flags),
        "package/_D.so": library(compiler, tmp_path, PLAIN, f"-Wl,-rpath,{own[0]}"),
        "package/_E.so": library(compiler, tmp_path, PLAIN, "-Wl,-rpath,$ORIGIN/../../tmp"),
    }
    made = finish.finish(read(wheel(tmp_path, libraries)), tmp_path / "finished", USED, [])
    found = {Path(path).stem: each for path, each in read(made.path).libraries.items()}
    assert {name: each.rpath for name, each in found.items()} == {
        "_C": ("$ORIGIN/lib",),
        "_D": (),
        "_E": ("$ORIGIN/../../tmp",),  # of which the audit says so
    }
    assert not any(str(tmp_path).encode() in data for data in read(made.path).files.values())


@pytest.mark.parametrize("name", ["libgomp.so.1", "libgomp-a34b3233.so.1"])
def test_openmp_is_torchs(compiler: str, tmp_path: Path, name: str) -> None:
    torchs = tmp_path / "torch" / "lib" / name
    torchs.parent.mkdir(parents=True)
    torchs.touch()
    code = 'extern "C" int omp_get_max_threads();\nint used() { return omp_get_max_threads(); }\n'
    data = {"package/_C.so": library(compiler, tmp_path, code, "-fopenmp")}
    made = finish.finish(read(wheel(tmp_path, data)), tmp_path / "finished", USED, [torchs.parent])
    (found,) = read(made.path).libraries.values()
    assert name in found.needed
    assert [each for each in found.needed if "gomp" in each] == [name]


@pytest.fixture(scope="module")
def base(shared: Path) -> environments.Environment:
    """An environment with a torch that is its name alone."""
    return environments.Environment(made_once(shared / "base", make_base))


def make_base(folder: Path) -> None:
    packages = environments.make(sys.executable, folder).site_packages
    info = packages / "torch-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    (info / "INSTALLER").write_text("pip\n")
    (packages / "torch.py").touch()


def imports(path: Path, base: environments.Environment, modules: tuple[str, ...] = ()) -> None:
    """Installs a wheel beside `base`, and imports it."""
    folder = path.parent / "import"
    check_import.install(path, base, folder)
    check_import.check_import(read(path), environments.Environment(folder), modules)


def tagged_for_this_python(path: Path) -> Path:
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return path.rename(path.with_name(path.name.replace("cp311", own)))


WARNS = "import os, warnings; warnings.warn('no numpy')"
HIDES = """
import contextlib, ctypes, pathlib
with contextlib.suppress(OSError):
    ctypes.CDLL(pathlib.Path(__file__).with_name("_C.so"))
"""


@pytest.mark.parametrize("text", ["", HIDES])
def test_undefined_symbol_is_found_and_demangled(
    compiler: str, tmp_path: Path, base: environments.Environment, text: str
) -> None:
    data = {"package/_C.so": library(compiler, tmp_path, CLASSIC)}
    path = tagged_for_this_python(finished(wheel(tmp_path, data, text=text)))
    with pytest.raises(
        UserError, match=r"does not import: .*undefined symbol: at::version\(\): the"
    ):
        imports(path, base)


def test_the_first_words_of_an_exception_are_said(
    compiler: str, tmp_path: Path, base: environments.Environment
) -> None:
    """Its last may be advice of the project's."""
    data = {"package/_C.so": library(compiler, tmp_path, PLAIN)}
    text = "raise ImportError('no luck with x\\n\\n  Try this:\\n  pip install x')"
    path = tagged_for_this_python(finished(wheel(tmp_path, data, text=text)))
    with pytest.raises(UserError, match=r"does not import: ImportError: no luck with x$"):
        imports(path, base)


def test_what_is_imported_is_of_the_wheel(
    compiler: str, tmp_path: Path, base: environments.Environment
) -> None:
    data = {"package/_C.so": library(compiler, tmp_path, PLAIN)}
    path = tagged_for_this_python(finished(wheel(tmp_path, data)))
    imports(path, base, ("os", "package"))
    installed = environments.Environment(path.parent / "import")
    said = r"^the option `import` names os, of which \S+\.whl has none: "
    with pytest.raises(UserError, match=said):
        check_import.check_import(read(path), installed, ("os",))


def test_library_of_the_wheel_that_another_one_loads_is_left_there(
    compiler: str, tmp_path: Path, base: environments.Environment
) -> None:
    """By ctypes, without a word in the library of where it is."""
    core = library(compiler, tmp_path, PLAIN, "-Wl,-soname,libcore.so.1")
    (tmp_path / "libcore.so").write_bytes(core)
    code = 'extern "C" int used();\nint uses() { return used(); }\n'
    linked = library(compiler, tmp_path, code, f"-L{tmp_path}", "-lcore")
    load = """
import ctypes, pathlib
here = pathlib.Path(__file__).parent
ctypes.CDLL(here / "libcore.so", ctypes.RTLD_GLOBAL), ctypes.CDLL(here / "_C.so")
"""
    libraries = {"package/libcore.so": core, "package/_C.so": linked}
    path = tagged_for_this_python(finished(wheel(tmp_path, libraries, text=load)))
    assert [*read(path).libraries] == ["package/_C.so", "package/libcore.so"]
    imports(path, base)


def test_programs_are_not_loaded_as_libraries_are(
    compiler: str, tmp_path: Path, base: environments.Environment
) -> None:
    main, place = tmp_path / "main", "some_project-1.5.data/scripts/some"
    command = [compiler, "-x", "c++", "-", "-o", main]
    subprocess.run(command, input="int main() { return 0; }", text=True, check=True)
    program = main.read_bytes()
    libraries = {"package/_C.so": library(compiler, tmp_path, PLAIN), "package/bin/some": program}
    path = tagged_for_this_python(finished(wheel(tmp_path, {**libraries, place: program})))
    assert len(read(path).libraries) == 3
    imports(path, base)


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (["a/__init__.py", "a/b.py", "c.py", "_D.abi3.so", "a.libs/x.so"], ["_D", "a", "c"]),
        (
            ["ns/a/__init__.py", "ns/a/b.py", "ns/c/d.py", "ns/_E.abi3.so"],
            ["ns._E", "ns.a", "ns.c.d"],
        ),
        (["ns/a/__init__.py", "ns/a/x.so", "b/__init__.py", "tests/test_b.py"], ["b", "ns.a"]),
        (["ns/libx.so", "ns/two words/x.py", "a-1.0.dist-info/x.py"], []),
    ],
)
def test_modules_of_namespaces_are_imported_too(names: list[str], modules: list[str]) -> None:
    """Not what a project has packed by mistake, such as the folder of its tests."""
    assert check_import.top_level_modules(names) == modules


@pytest.mark.parametrize(
    ("text", "modules", "message"),
    [
        (
            "import idna_of_nobody",
            (),
            "No module named 'idna_of_nobody': its metadata does not require",
        ),
        ("", ("package.none",), "No module named 'package.none'"),
        ("raise RuntimeError('not today')", (), "does not import: RuntimeError: not today"),
        ("import sys; sys.exit(0)", (), "does not import: it ends the process with exit code 0"),
        (f"{WARNS}; os._exit(3)", (), "does not import: it ends the process with exit code 3"),
        (f"{WARNS}; os.abort()", (), "does not import: it dies of SIGABRT"),
    ],
)
def test_module_that_does_not_import(
    compiler: str,
    tmp_path: Path,
    base: environments.Environment,
    text: str,
    modules: tuple[str, ...],
    message: str,
) -> None:
    data = {"package/_C.so": library(compiler, tmp_path, PLAIN)}
    path = tagged_for_this_python(finished(wheel(tmp_path, data, text=text)))
    with pytest.raises(UserError) as error:
        imports(path, base, modules)
    assert message in str(error.value)


def test_library_of_a_required_package_is_taken_from_there(
    compiler: str, tmp_path: Path, base: environments.Environment
) -> None:
    """As metatensor-torch's of metatensor-core, which loads it before."""
    environment = environments.on_top_of(base, tmp_path / "environment")
    theirs = environment.site_packages / "core" / "lib"
    theirs.mkdir(parents=True)
    info = environment.site_packages / "the_core-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: The_Core\nVersion: 1.0\n")
    (info / "RECORD").write_text("core/lib/libcore.so,,\nthe_core-1.0.dist-info/METADATA,,\n")
    core = 'extern "C" int core() { return 1; }\n'
    (theirs / "libcore.so").write_bytes(library(compiler, tmp_path, core, "-Wl,-soname,libcore.so"))
    linked = library(
        compiler,
        tmp_path,
        'extern "C" int core();\nint used() { return core(); }\n',
        f"-L{theirs}",
        "-lcore",
    )
    load = f"import ctypes; ctypes.CDLL('{theirs}/libcore.so', ctypes.RTLD_GLOBAL)\n"
    built = wheel(tmp_path, {"package/_C.so": linked}, text=load, requires="the-core")
    assert libraries_of_requirements(read(built), environment) == [theirs]
    between = environment.site_packages / "between-1.0.dist-info"
    between.mkdir()
    text = "Metadata-Version: 2.1\nName: between\nVersion: 1.0\nRequires-Dist: the-core>0\n"
    (between / "METADATA").write_text(f"{text}Requires-Dist: other; extra == 'x'\n")
    by_another = wheel(tmp_path / "by-another", {"package/_C.so": linked}, requires="between")
    assert libraries_of_requirements(read(by_another), environment) == [theirs]
    made = finish.finish(read(built), tmp_path / "finished", USED, [theirs])
    assert [*made.libraries] == ["package/_C.so"]
    path = tagged_for_this_python(made.path)
    folder = tmp_path / "import"
    installed = environments.on_top_of(base, folder)
    environments.install(installed, ["--no-deps", str(path)], {**os.environ})
    check_import.check_import(read(path), installed)


def test_library_linked_with_the_driver_is_imported_where_there_is_none(
    compiler: str, tmp_path: Path, base: environments.Environment
) -> None:
    header = tmp_path / "include" / "cuda.h"
    header.parent.mkdir()
    header.write_text("CUresult CUDAAPI cuInit(unsigned int);\n")
    toolkit = toolchain.CudaToolkit(tmp_path, "13.0.88")
    driver = toolchain.make_driver(tmp_path / "driver", toolkit, "gcc")
    code = 'extern "C" int cuInit(unsigned);\nint used() { return cuInit(0); }\n'
    linked = library(compiler, tmp_path, code, f"-L{driver.parent}", "-lcuda")
    path = tagged_for_this_python(finished(wheel(tmp_path, {"package/_C.so": linked}, text=HIDES)))
    folder = tmp_path / "import"
    check_import.install(path, base, folder)
    check_import.check_import(read(path), environments.Environment(folder), driver=driver)


def test_wheel_that_imports_passes_and_leaves_the_base_as_it_was(
    compiler: str, tmp_path: Path, base: environments.Environment
) -> None:
    before = sorted(base.site_packages.iterdir())
    data = {"package/_C.so": library(compiler, tmp_path, PLAIN)}
    imports(tagged_for_this_python(finished(wheel(tmp_path, data, text=HIDES))), base)
    assert sorted(base.site_packages.iterdir()) == before


@pytest.mark.parametrize(
    ("requires", "text", "said"),
    [
        pytest.param(
            "some-of-nobody<2", "", "some-of-nobody was not found", marks=pytest.mark.slow
        ),
        ("helper<1", "import helper", "depends on helper<1, we can conclude"),
    ],
)
def test_wheel_whose_requirements_cannot_be_had_is_imported_beside_others(
    compiler: str, tmp_path: Path, base: environments.Environment, requires: str, text: str,
    said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """As torch-points-kernels, which wants a NumPy that no Python of today has."""
    with zipfile.ZipFile(tmp_path / "helper-1.0-py3-none-any.whl", "w") as archive:
        info = {"METADATA": "Metadata-Version: 2.1\nName: helper\nVersion: 1.0", "RECORD": ""}
        info["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        for name, content in info.items():
            archive.writestr(f"helper-1.0.dist-info/{name}", content)
        archive.writestr("helper.py", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    data = {"package/_C.so": library(compiler, tmp_path, PLAIN)}
    built = wheel(tmp_path / "built", data, text=text, requires=requires)
    imports(tagged_for_this_python(finished(built)), base)
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.endswith("; it is imported beside other versions\n")


def test_what_a_wheel_says_of_its_build_is_written_again(compiler: str, tmp_path: Path) -> None:
    built = wheel(tmp_path / "built", {"package/x.so": library(compiler, tmp_path, CLASSIC)})
    made = finish.finish(read(built), tmp_path / "finished", USED, [])
    right = made.path.read_bytes()
    forged = finish.Used(CUDA_TARGET, ("9.0",), "git+https://example.org/x@1", "g++ 99", "99.0")
    finish.stamp(read(made.path), forged)
    assert made.path.read_bytes() != right
    finish.stamp(read(made.path), USED)
    assert made.path.read_bytes() == right
