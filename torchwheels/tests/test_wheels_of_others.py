"""The audit of wheels that another tool has built, such as cibuildwheel."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from conftest import version_of_torch
from forged_wheels import BILL_OF_MATERIALS, CLASSIC, LIBRARY, Forge
from torchwheels import cli
from torchwheels.audit import reports
from torchwheels.errors import UserError
from torchwheels.options import project
from torchwheels.wheel.contents import BUILD_RECORD

ROOT = Path(__file__).parents[2]


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    """A sound wheel, without what torchwheels writes."""
    made = Forge(tmp_path)
    made.version = "1.0"
    made.replaced = {BUILD_RECORD: None, BILL_OF_MATERIALS: None}
    return made


def failed(forge: Forge, torch: str = "2.13") -> dict[str, str]:
    report = reports.audited(forge.wheel(), project.Project(), torch=torch)
    return {rule["rule"]: rule["detail"] for rule in report["rules"] if not rule["passed"]}


def test_sound_wheel_passes_and_nothing_is_written(
    forge: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = forge.wheel()
    before = [*wheel.parent.iterdir()]
    cli.main(["audit", str(wheel), "--torch", "2.13.0"])
    printed = capsys.readouterr().out
    assert "torchwheels: 1 of 1 wheels are fit to publish" in printed
    assert "build_record" not in printed
    assert [*wheel.parent.iterdir()] == before
    with pytest.raises(SystemExit, match=r"^4$"):
        cli.main(["audit", str(wheel)])
    said = r"no build record .*: `torchwheels audit tinyops-.* --torch"
    assert re.search(said, capsys.readouterr().err)


def test_wheel_says_which_torch_it_requires(forge: Forge) -> None:
    forge.requires = ["torch"]
    found = failed(forge)
    assert [*found] == ["requirement"]
    assert found["requirement"].endswith(": require torch==2.13.*")


def test_wheel_of_another_torch(forge: Forge) -> None:
    message = "its metadata require torch==2.13.*, but 3.11-cpu-torch2.12 has torch 2.12.1"
    assert failed(forge, "2.12") == {"requirement": message}


@pytest.mark.parametrize(
    ("version", "runtime", "torch", "target"),
    [
        ("1.0", "libcudart.so.13", "2.13", "3.11-cu130-torch2.13"),
        ("1.0", "libcudart.so.13", "2.15", "3.11-cu132-torch2.15"),
        ("1.0+cu126", "libcudart.so.12", "2.13", "3.11-cu126-torch2.13"),
        ("1.0", "libcudart.so.12", "2.13", "3.11-cu129-torch2.13"),
    ],
)
def test_cuda_is_that_of_the_libraries_and_of_the_label(
    forge: Forge, version: str, runtime: str, torch: str, target: str
) -> None:
    forge.version, forge.requires = version, [f"torch=={torch}.*"]
    forge.files[LIBRARY] = forge.compile(CLASSIC, forge.stub(runtime))
    found = failed(forge, torch)
    assert [*found] == ["gpu_code"]
    assert f"but {target} wants it for" in found["gpu_code"]


@pytest.mark.parametrize(
    ("tag", "torch", "message"),
    [
        ("cp311-cp311", "2.13.9", r"torch 2\.13\.9 is not known; the releases that are: 2\.4, "),
        ("cp311-cp311", "1.13", r"torch 1\.13 is not known; the releases that are: 2\.4, 2\.5, "),
        (
            "cp39-cp39",
            "2.13",
            r"tinyops-.* is for Python ==3\.9\.\*, but torch 2\.13\.0 is for 3\.10,",
        ),
    ],
)
def test_torch_that_the_wheel_cannot_be_for(
    forge: Forge, tag: str, torch: str, message: str
) -> None:
    forge.tag = tag
    with pytest.raises(UserError, match=message):
        failed(forge, torch)


@pytest.mark.slow
def test_example_of_cibuildwheel(own_project: Path, tmp_path: Path) -> None:
    """Its commands, without its images: compiles the example."""
    version_of_torch()
    file = ROOT / "examples" / "cibuildwheel.toml"
    options = msgspec.toml.decode(file.read_text())["tool"]["cibuildwheel"]
    built, dest = tmp_path / "built", tmp_path / "wheelhouse"
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = {**os.environ, "PATH": os.pathsep.join(folders), "FORCE_CUDA": "0"}
    variables["PYTHONPATH"] = str(Path(cli.__file__).parents[1])

    def run(command: str, **paths: object) -> None:
        words = shlex.split(command.format(**paths, dest_dir=dest, package=own_project))
        if words[0] == "torchwheels":
            words = [sys.executable, "-m", *words]
        subprocess.run(words, env=variables, check=True)

    run(options["before-build"][1])
    pip = f"{sys.executable} -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir"
    run(f"{pip} {built} {own_project}")
    (wheel,) = built.iterdir()
    run(options["repair-wheel-command"], wheel=wheel)
    (repaired,) = dest.iterdir()
    run(options["audit-command"], wheel=repaired)
