"""The table of releases, and the targets that follow from it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from torchwheels import cli
from torchwheels.errors import UserError
from torchwheels.options import project, releases
from torchwheels.run import containers
from torchwheels.system import machines

TABLE = releases.load()


@pytest.mark.parametrize(
    ("name", "torch", "cuda"),
    [
        ("3.11-cpu", "2.13.0", None),
        ("3.12-cpu-torch2.6", "2.6.0", None),
        ("3.11-cu130", "2.13.0", "13.0"),
        ("3.11-cu124-torch2.5", "2.5.1", "12.4"),
        ("3.11-cpu-aarch64", "2.13.0", None),
        ("3.11-cpu-torch2.10-aarch64", "2.10.0", None),
        ("3.12-cu130-aarch64", "2.13.0", "13.0"),
        ("3.11-cu126-torch2.13", "2.13.0+cu126", "12.6"),  # of PyTorch's own index
        ("3.14t-cu130", "2.13.0", "13.0"),
        ("3.15-cpu-torch2.15", "2.15.0", None),
        ("3.15t-cu132", "2.15.0", "13.2"),
        ("3.11-cu129", "2.8.0+cu129", "12.9"),  # which PyPI has of no torch
        ("3.11-cu130-torch2.15", "2.15.0+cu130", "13.0"),
    ],
)
def test_target_has_the_torch_and_cuda_of_its_name(name: str, torch: str, cuda: str | None) -> None:
    target = TABLE.target(name)
    assert (target.name, target.torch) == (name, torch)
    assert (target.cuda.version if target.cuda else None) == cuda


def test_torch_may_be_named_where_it_need_not_be() -> None:
    assert TABLE.target("3.11-cu130-torch2.13") == TABLE.target("3.11-cu130")


def test_names_are_unique() -> None:
    names = [target.name for target in TABLE.targets]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("3.14-cu121", "torch 2.4.1 has no wheel for Python 3.14"),
        ("3.10-cpu-torch2.15", "torch 2.15.0 has no wheel for Python 3.10"),
        ("3.11-cu130-torch2.6", "torch 2.6.0 is built for CUDA 12.4 and 12.6, not 13.0"),
        ("3.11-cu128-aarch64", "torch 2.10.0 has no CUDA build for aarch64 on PyPI"),
        ("3.11-rocm", "there is no target '3.11-rocm': a target is"),
    ],
)
def test_error_says_why_there_is_no_such_target(name: str, reason: str) -> None:
    with pytest.raises(UserError, match="there is no target") as error:
        TABLE.target(name)
    assert reason in str(error.value)
    assert "the nearest are 3.1" in str(error.value)


def test_patterns_are_for_x86_64_where_they_do_not_say() -> None:
    assert {x.machine.name for x in TABLE.matching(["3.1?-cu*", "3.1?-cpu*"])} == {"x86_64"}
    found = TABLE.matching(["3.11-c*-aarch64"])
    assert {"3.11-cpu-aarch64", "3.11-cu130-aarch64"} < {x.name for x in found}
    assert {x.machine.name for x in found} == {"aarch64"}


def test_patterns_name_several_targets() -> None:
    found = TABLE.matching(["3.1[12]-cu130", "3.11-cpu"])
    assert [target.name for target in found] == ["3.11-cu130", "3.12-cu130", "3.11-cpu"]
    with pytest.raises(UserError, match=r"there is no target '3\.99-\*'"):
        TABLE.matching(["3.99-*"])


def test_patterns_have_other_cudas_than_pypis_where_they_name_the_torch() -> None:
    assert {x.torch for x in TABLE.matching(["3.11-cu126*"])} == {"2.7.1"}
    found = [x.name for x in TABLE.matching(["3.11-cu126-torch2.1?"])]
    assert found == [f"3.11-cu126-torch2.{minor}" for minor in range(10, 15)]
    everything = project.Project().chosen_targets()
    assert not [x.name for x in everything if x.is_extra or x.python.endswith("t")]


@pytest.mark.parametrize(
    ("asked", "image"),
    [
        ("", "ubuntu:22.04@sha256:0"),
        ("{tag}", "ubuntu:22.04"),
        ("mirror.example/{image}", "mirror.example/ubuntu:22.04@sha256:0"),
        ("debian:bookworm-slim", "debian:bookworm-slim"),
    ],
)
def test_base_image_of_a_mirror(asked: str, image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHWHEELS_BASE_IMAGE", asked)
    target = dataclasses.replace(TABLE.target("3.11-cpu"), image="ubuntu:22.04@sha256:0")
    assert containers.base_image(target) == image


OWN = """
targets = ["3.12-*2.16", "3.12-cu130", "3.12-cu133"]
[[releases]]
version = "2.16.0.dev20261101+cu130"
cuda = "13.0"
pythons = ["3.12", "3.14t"]
index = "https://example.org/nightly/cu130"
[[releases]]
version = "2.16.0.dev20261101+cpu"
pythons = ["3.12"]
[[releases]]
version = "2.13.0a0+0123456.nv26.8"
cuda = "13.0"
pythons = ["3.12"]
[[releases]]
version = "2.14.0a0+0123456.nv26.11"
cuda = "13.3"
pythons = ["3.12"]
image = "nvcr.io/nvidia/pytorch:26.11-py3"
architectures = ["9.0", "10.0+PTX"]
"""


def test_releases_of_the_projects_own(tmp_path: Path) -> None:
    """A nightly, and two builds of NVIDIA's: one in place of the table's, one of a CUDA of its own."""
    (tmp_path / "own.toml").write_text(OWN)
    options = project.load(tmp_path / "own.toml")
    found = {x.name: (x.torch, x.index) for x in options.chosen_targets()}
    assert found == {
        "3.12-cu130-torch2.16": (
            "2.16.0.dev20261101+cu130",
            "https://example.org/nightly/cu130",
        ),
        "3.12-cpu-torch2.16": ("2.16.0.dev20261101+cpu", ""),
        "3.12-cu130": ("2.13.0a0+0123456.nv26.8", ""),
        "3.12-cu133": ("2.14.0a0+0123456.nv26.11", ""),
    }
    assert options.releases.target("3.14t-cu130-torch2.16").python_version == "3.14"
    assert options.releases.target("3.12-cu133").architectures == ("9.0", "10.0+PTX")
    # A container is told of them, too.
    told = json.loads(json.dumps(options.table))
    assert project.of_table(told, "").releases.targets == options.releases.targets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("releases = 3", "own.toml.*: releases is 3: expected `array`, got `int`"),
        (
            "[[releases]]\nversion = 'new'\npythons = ['3.12']",
            "releases: version has 'new', but that of a torch, such as '2.16.0.dev20261101",
        ),
        ("[[releases]]\nversion = '2.16.0'", "releases lacks the option 'pythons'"),
        (
            "[[releases]]\nversion = '2.16.0'\npythons = []",
            "pythons is ..: expected `array` of length >= 1",
        ),
        (
            "[[releases]]\nversion = '2.16.0'\npythons = ['3.12']\ncuda = '13.9'",
            "is of CUDA 13.9, and only 12.1, .* are known: add `image` and `architectures`",
        ),
        ("[[releases]]\ntorch = '2.16.0'", "has no option 'torch': did you mean"),
    ],
)
def test_error_says_what_is_wrong_with_a_release(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        project.load(tmp_path / "own.toml")


def python_with_torch(folder: Path, version: str | None, cuda: str | None = None) -> Path:
    """A new environment, whose torch is its version alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    if version:
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "torch").mkdir()
        (site_packages / "torch" / "__init__.py").write_text("raise ImportError('not imported')\n")
        text = f"__version__ = {version!r}\ncuda = {cuda!r}\n"
        (site_packages / "torch" / "version.py").write_text(text)
    return folder / "bin" / "python"


def test_target_of_the_torch_at_hand(tmp_path: Path) -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = python_with_torch(tmp_path / "cuda", "2.14.9+cu130", "13.0")
    assert TABLE.current_target(python).name == f"{own}-cu130-torch2.14"
    python = python_with_torch(tmp_path / "cpu", "2.13.0+cpu")
    assert TABLE.current_target(python).name == f"{own}-cpu"


def test_error_without_a_torch_explains_how_to_name_a_target(tmp_path: Path) -> None:
    python = python_with_torch(tmp_path / "none", None)
    with pytest.raises(
        UserError, match=r"has no torch, which is no target: name one, such as `--target 3.11-"
    ):
        TABLE.current_target(python)
    python = python_with_torch(tmp_path / "old", "1.13.0+cu117", "11.7")
    with pytest.raises(
        UserError, match=r"has 1\.13\.0\+cu117 of CUDA 11\.7, .*, which is no target"
    ):
        TABLE.current_target(python)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("build", r"build there, .*, or set `cross-compile = true` in \[tool\.torchwheels\]"),
        ("test", "test there, or with `--backend docker` on an engine that emulates it"),
    ],
)
def test_another_machine_is_refused(tmp_path: Path, command: str, message: str) -> None:
    """To build for it needs a project that can, to test on it an engine."""
    (there,) = (each for each in machines.MACHINES.values() if not each.is_here)
    table = "[tool.torchwheels]\ntests = { paths = ['setup.py'] }\n"
    (tmp_path / "pyproject.toml").write_text(table)
    (tmp_path / "setup.py").write_text("")
    given = [command, str(tmp_path), f"--target=3.11-cpu{there.suffix}", "--backend=local"]
    if command == "test":
        wheel = tmp_path / "x-1-py3-none-any.whl"
        given.append(f"--wheel={wheel}")
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("x-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: x\n")
    with pytest.raises(
        SystemExit, match=f"3.11-cpu{there.suffix} is for {there.name}, .*: {message}"
    ):
        cli.main(given)


def test_a_reader_may_stop_early() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "torchwheels", "targets"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("capabilities", "chosen"),
    [
        (["9.0"], "9.0"),
        (["8.0"], "8.0"),
        (["8.9"], "8.6"),  # an RTX 4090
        (["12.1"], "12.0"),
        (["8.0", "9.0", "8.0"], "8.0 9.0"),
        (["7.0"], ""),  # before CUDA 13
        (["9.0", "13.0"], ""),
        ([], ""),
    ],
)
def test_code_for_the_gpus_of_a_machine(capabilities: list[str], chosen: str) -> None:
    assert TABLE.target("3.11-cu130").for_gpus(capabilities) == chosen
    assert TABLE.target("3.11-cpu").for_gpus(capabilities) == ""


@pytest.mark.parametrize(
    ("words", "variables", "chosen"),
    [
        (["--target=3.11-cu130"], {}, "9.0"),
        (["--target=3.11-cu130"], {"CI": "true"}, None),
        (["--target=3.11-cu130"], {"TORCHWHEELS_ARCHITECTURES": "all"}, "all"),
        (["--target=3.11-cu130"], {"TORCHWHEELS_ARCHITECTURES": "8.0"}, "8.0"),
        (["--target=3.11-cpu"], {}, None),
        (["--target=3.11-cu130", "--target=3.12-cu130"], {}, None),
        (["torchsort==0.1.9", "--target=3.11-cu130"], {}, None),
    ],
)
def test_own_sources_are_built_for_the_gpu_at_hand(
    words: list[str], variables: dict[str, str], chosen: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 9.0\necho 9.0\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("CI", "TORCHWHEELS_ARCHITECTURES"):
        monkeypatch.setenv(name, "")  # so that what the command sets goes away
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "pyproject.toml").write_text("[tool.torchwheels]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.engines, "of_backend", lambda *_: None)
    monkeypatch.setattr(cli.sources, "fetched", lambda *_: contextlib.nullcontext())
    seen = []
    monkeypatch.setattr(cli.pipeline, "run", lambda order: seen.append(order.targets[-1]))
    cli.main(["build", *words])
    assert os.environ.get("TORCHWHEELS_ARCHITECTURES") == chosen
    (target,) = seen
    every = ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0+PTX") if target.cuda else ()
    assert target.architectures == ((chosen,) if chosen and chosen != "all" else every)
    said = (
        "for the GPU of this machine alone, by code of compute capability 9.0"
        in capsys.readouterr().out
    )
    assert said == (not variables and chosen is not None)
