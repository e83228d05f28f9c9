"""What is asked of BuildKit, what becomes of its failures, and builds that are ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fake_docker import FakeDocker

from service import ROOT, ServiceError, images, matrix, wheels

CPU = matrix.load().cell("3.11-cpu")
CUDA = matrix.load().cell("3.12-cu124-torch2.5")
WHEEL = "extops-0.1.0+cpu-py3-none-manylinux_2_28_x86_64.whl"


def build_call(fake: FakeDocker) -> str:
    (call,) = (call for call in fake.calls if call.startswith("buildx build"))
    return call


def test_arguments_of_a_cell() -> None:
    arguments = images.build_arguments(CUDA)
    assert arguments["BASE_IMAGE"] == "nvidia/cuda:12.4.1-devel-ubuntu22.04"
    assert (arguments["CELL"], arguments["PYTHON"]) == ("3.12-cu124-torch2.5", "3.12")
    assert arguments["CUDA_HOME"] == "/usr/local/cuda"
    assert images.build_arguments(CPU)["CUDA_HOME"] == ""


def test_dockerfile_declares_what_it_is_given() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    declared = set(re.findall(r"^ARG (\w+)$", dockerfile, re.MULTILINE))
    given = set(images.build_arguments(CPU))
    assert given <= declared
    assert declared - given == {
        "EXTOPS_COMMIT",
        "SOURCE_DATE_EPOCH",
        "EXTOPS_ARCHITECTURES",
        "CCACHE_RECACHE",
        "EXTOPS_FRESH",
    }


def test_wheel_comes_out_of_the_image(fake_docker: FakeDocker, tmp_path: Path) -> None:
    fake_docker.builds(WHEEL)
    wheel = images.exported_wheel(CPU, tmp_path / "work", builder="far")
    assert wheel.read_text() == "new\n"
    call = build_call(fake_docker)
    assert "--target=export" in call
    assert "--builder far" in call
    assert "--build-arg BASE_IMAGE=ubuntu:22.04" in call


@pytest.mark.parametrize(
    ("variable", "value", "argument"),
    [
        ("EXTOPS_BASE_IMAGE", "mirror/ubuntu:22.04", "BASE_IMAGE"),
        ("EXTOPS_COMMIT", "a-commit-of-elsewhere", "EXTOPS_COMMIT"),
    ],
)
def test_environment_overrides_an_argument(
    fake_docker: FakeDocker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    argument: str,
) -> None:
    monkeypatch.setenv(variable, value)
    fake_docker.builds(WHEEL)
    images.exported_wheel(CPU, tmp_path / "work")
    assert f"--build-arg {argument}={value}" in build_call(fake_docker)


def test_settings_are_no_part_of_the_image(
    fake_docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTOPS_TORCH_INDEX", "https://user:word@example.org/simple")
    fake_docker.builds(WHEEL)
    images.exported_wheel(CPU, tmp_path / "work")
    call = build_call(fake_docker)
    assert "example.org" not in call
    assert "--secret=id=settings,env=" in call


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "ERROR: failed to solve: ubuntu:22.04: failed to resolve source metadata for "
            "docker.io/library/ubuntu:22.04: failed to do request: dial tcp: no such host",
            "the base image ubuntu:22.04 is not here and cannot be pulled: .*`--backend local`",
        ),
        (
            "ERROR: failed to solve: mkdir /var/lib/docker/x: no space left on device",
            "the disk of the Docker engine is full: .*`docker builder prune`",
        ),
        ('ERROR: no builder "far" found', "there is no such builder: `docker buildx ls` lists"),
        (
            "ERROR: failed to receive status: rpc error: code = Unavailable desc = error reading "
            "from server: EOF",
            "the Docker engine does not answer any more: .*`--backend local`",
        ),
        (
            "#12 4.567 extops: cu130 needs a CUDA 13 compiler, and CUDA_HOME is not set\n"
            "#12 ERROR: process did not complete",
            "3.11-cpu failed in Docker: cu130 needs a CUDA 13 compiler, and CUDA_HOME is not set$",
        ),
        ("ERROR: something new", "3.11-cpu failed in Docker: its messages above say why$"),
    ],
    ids=["no image", "disk full", "no builder", "engine stopped", "its own", "unknown"],
)
def test_failures_are_explained(
    fake_docker: FakeDocker, tmp_path: Path, said: str, message: str
) -> None:
    fake_docker.says(f"{said}\n", code=1)
    with pytest.raises(ServiceError, match=message) as error:
        images.exported_wheel(CPU, tmp_path / "work")
    assert "\n" not in str(error.value)


def test_missing_image_in_an_engine(
    engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTOPS_BASE_IMAGE", "localhost:9/nowhere/ubuntu:22.04")
    with pytest.raises(ServiceError, match=r"the base image localhost:9/.* cannot be pulled: "):
        images.exported_wheel(CPU, tmp_path / "work")


class Build:
    """A build of the CPU cell with the fake engine, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.dist = folder / "dist"
        program = f"""
            import pathlib
            from service import cells, matrix, wheels
            wheels.ROOT = pathlib.Path({str(folder)!r})
            cells.end_tidily()
            make = lambda variant, work: cells.images.exported_wheel(cell, work)
            cell = matrix.load().cell("3.11-cpu")
            wheels.build(cell.variant, pathlib.Path({str(self.dist)!r}), make)
        """
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ended_build_keeps_the_old_wheel(
    fake_docker: FakeDocker, tmp_path: Path, number: signal.Signals
) -> None:
    fake_docker.builds(WHEEL)
    fake_docker.says("building\n")
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / WHEEL).write_text("old")
    pipe = fake_docker.waits()
    build = Build(tmp_path)
    assert build.process.stdout is not None
    assert build.process.stdout.readline() == "building\n"
    build.process.send_signal(number)
    build.process.communicate()
    assert build.process.returncode != 0
    assert (dist / WHEEL).read_text() == "old"
    pipe.unlink()
    again = Build(tmp_path)
    again.process.communicate()
    assert again.process.returncode == 0
    assert (dist / WHEEL).read_text() == "new\n"


def test_follow_ends_what_it_started(tmp_path: Path) -> None:
    program = """
        from service import cells, images
        cells.end_tidily()
        images.follow(["sh", "-c", "echo $$; exec tail -f /dev/null"])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.terminate()
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_bake_file_has_a_target_for_each_cell() -> None:
    cells = list(matrix.load().default_cells)
    bake = images.bake_file(cells)
    assert bake["group"]["default"]["targets"] == list(bake["target"])
    for cell, target in zip(cells, bake["target"].values(), strict=True):
        assert target["args"].items() >= images.build_arguments(cell).items()
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]+", name) for name in bake["target"])


def test_bake_command() -> None:
    command = [sys.executable, "-m", "service.matrix", "--bake"]
    named = {**os.environ, "EXTOPS_COMMIT": "a-commit-of-elsewhere"}
    done = subprocess.run(
        [*command, "3.11-cpu"], cwd=ROOT, env=named, capture_output=True, text=True
    )
    arguments = json.loads(done.stdout)["target"]["3-11-cpu"]["args"]
    assert arguments["EXTOPS_COMMIT"] == "a-commit-of-elsewhere"
    done = subprocess.run([*command, "3.11-cu999"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "extops: there is no cell '3.11-cu999' in matrix.toml; the nearest"
    )


def test_finished_wheel_is_published(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="there is no wheel of cpu in "):
        wheels.finished_wheel(CPU.variant, tmp_path, tmp_path)
    (tmp_path / WHEEL).touch()
    assert wheels.finished_wheel(CPU.variant, tmp_path, tmp_path) == tmp_path / WHEEL
