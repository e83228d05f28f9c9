"""What a user meets at the command line: real nox, real processes, real files."""

from __future__ import annotations

import ast
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from nox.project import load_toml
from packaging.requirements import Requirement

from extops_build import ROOT
from tools import emulate
from torchwheels.options import project, releases

OPTIONS = project.load(ROOT / "pyproject.toml")


def command(*arguments: str) -> list[str]:
    """nox with these arguments, and with this Python's packages instead of new environments."""
    nox = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    return [*nox, "--no-venv", "--no-install", *arguments]


def nox(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert "Traceback" not in done.stdout
    return done


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """This Python first on PATH, with the torchwheels of these tests."""
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", folders)
    monkeypatch.setenv("PYTHONPATH", str(Path(project.__file__).parents[2]))
    monkeypatch.setenv("NOX_SCRIPT_MODE", "none")  # no environment of nox's own


def test_nox_lists_what_people_use_first() -> None:
    listed = re.findall(r"^[-*] (\S+)", nox("--list").stdout, re.MULTILINE)
    first = [
        "test",
        "build",
        "build-TARGET",
        "test-TARGET",
        "reproduce",
        "audit",
        "merge",
        "index",
        "matrix",
    ]
    assert listed[:9] == first
    others = {"act", "bench", "docs", "emulate", "fuzz", "guide(legacy)", "guide(stable)"}
    others |= {"images", "lint", "lock", "mutate", "newest", "notes", "package", "releases"}
    others |= {"sanitize", "sizes", "torch_tests"}
    assert {*listed[9:]} == others


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("3.14-cu121", "torch 2.4.1 has no wheel for Python 3.14"),
        ("3.10-cu132", "torch 2.15.0 has no wheel for Python 3.10"),
        ("3.13-release-torch2.4", "torch 2.4.1 has no wheel for Python 3.13"),
    ],
)
def test_target_without_a_torch_says_so(target: str, reason: str) -> None:
    expected = f"torchwheels: there is no target {target!r} ({reason}): "
    assert nox("-s", f"test-{target}").stdout.startswith(expected)


@pytest.mark.parametrize("given", [(), (".github",)], ids=["nothing", "another folder"])
def test_torchs_tests_want_a_checkout_of_torch(given: tuple[str, ...]) -> None:
    asked = "name a checkout of PyTorch: `nox -s torch_tests -- CHECKOUT`"
    assert asked in nox("-s", "torch_tests", "--", *given).stdout


def test_what_emulation_needs_is_named_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    packages = "(debian-archive-keyring )?g\\+\\+-aarch64-linux-gnu mmdebstrap qemu-user-static"
    said = nox("-s", "emulate").stdout
    assert re.search(f"this needs Debian's packages: apt-get install {packages}\\.\n", said)
    assert "torchwheels build" not in said


def test_emulated_system_is_unpacked_into_a_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mmdebstrap makes its target's folder, and not the one above."""
    script = tmp_path / "bin" / "mmdebstrap"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nfor last; do :; done\nmkdir "$last"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    emulate._unpack_debian(tmp_path / "emulated" / "root")
    assert (tmp_path / "emulated" / "root").is_dir()


IMPORTS_OF_THE_NOXFILE = """
import runpy, sys, nox, nox._cli, packaging

known = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names
runpy.run_path("noxfile.py")
print({name.partition(".")[0] for name in sys.modules} - known)
"""


def test_the_noxfile_imports_little() -> None:
    """Of what the README's command installs, so that `nox --list` is quick."""
    command = [sys.executable, "-c", IMPORTS_OF_THE_NOXFILE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) <= {
        "extops_build",
        "msgspec",
        "tools",
        "torchwheels",
        "typing_extensions",
    }


def test_nox_itself_installs_what_torchwheels_needs() -> None:
    """It makes an environment by the block at the top of the file. The versions are those of the lock file."""
    script, tables = (load_toml(ROOT / x) for x in ("noxfile.py", "torchwheels/pyproject.toml"))
    needs = [Requirement(x) for x in (*tables["project"]["dependencies"], "nox")]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", releases.LOCK.read_text(), re.MULTILINE))
    markers = {x.name: f"; {x.marker}" if x.marker else "" for x in needs}
    assert {str(Requirement(x)) for x in script["dependencies"]} == {
        str(Requirement(f"{name}=={pins[name]}{marker}")) for name, marker in markers.items()
    }


@pytest.mark.parametrize("session", ["images", "notes"])
def test_sessions_without_an_environment_need_no_other(
    session: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchwheels is installed beside these tests, by a .pth file, which this Python does not read."""
    monkeypatch.delenv("PYTHONPATH")
    venv.create(tmp_path, symlinks=True)
    (site_packages,) = tmp_path.glob("lib/python*/site-packages")
    (site_packages / "nox.pth").write_text(sysconfig.get_path("purelib"))
    python = str(tmp_path / "bin" / "python")
    command = [python, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    done = subprocess.run([*command, "-s", session, "--", "--help"], capture_output=True, text=True)
    assert done.stdout.startswith("usage: "), done.stderr
    assert done.returncode == 0


def test_building_from_source_wants_to_know_for_what() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "EXTOPS_VARIANT"}
    setup = [sys.executable, "setup.py", "bdist_wheel"]
    done = subprocess.run(setup, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("extops: building extops from source needs to know for what")


def descendants(parent: int) -> list[int]:
    """The processes that `parent` started, and those that these started."""
    threads = Path(f"/proc/{parent}/task").glob("*/children")
    children = [int(child) for thread in threads for child in thread.read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


@pytest.mark.slow
def test_killed_build_leaves_no_compiler() -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    build = ["-s", f"build-{python}-cpu", "--", "--backend=local"]
    process = subprocess.Popen(
        command(*build), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "[3/" in line:  # of ninja
            break
    started = {each: os.pidfd_open(each) for each in descendants(process.pid)}
    names = {Path(f"/proc/{each}/comm").read_text() for each in started}
    assert {"ninja\n", "cc1plus\n"} <= names
    process.kill()
    process.wait()
    left = [each for each, end in started.items() if not select.select([end], [], [], 60)[0]]
    for each in left:
        os.kill(each, signal.SIGKILL)
    assert left == []
