"""What the images get, where no Docker engine answers, and what becomes of a hostile source in one."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forged_wheels import Forge
from torchwheels import cli, containers, engines, project, releases, wheel
from torchwheels.errors import UserError

TARGET = releases.load().target("3.11-cu130")


def fake_docker(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A command `docker` that answers as an engine does, and in `buildx bake` runs `script`."""
    command = folder / "bin" / "docker"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "buildx bake" ] || {{ echo 26.1.5; exit 0; }}\ncat > {folder}/bake.json\n{script}\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("ERROR: pull access denied", r"a base image \(ubuntu:22\.04.*\) is not here"),
        ("write: no space left on device", "the disk of the Docker engine is full"),
        ("#12 3.4 OSError: [Errno 28] No space left on device", "the disk of the Docker engine is"),
        ("#12 3.4 torchwheels: pip cannot install x (y): the disk of", "disk of the Docker engine"),
        ("Cannot connect to the Docker daemon", "does not answer any more: start it and try again"),
        ("#12 3.4 torchwheels: 3.11-cpu failed: why", "in Docker: 3.11-cpu failed: why"),
        (
            "#12 3.4 torchwheels: x.whl does not pass the audit:\n#12 3.4   size: 6.14 MB\n#12 ERROR",
            r"in Docker: x\.whl does not pass the audit:\n  size: 6\.14 MB$",
        ),
        (
            "#12 3.4 torchwheels: installing torch\nERROR: failed to solve: Unavailable: error reading from server",
            "does not answer any more: start it and try again",
        ),
        (
            "#12 3.3 connection refused\n#12 3.4 torchwheels: 3.11-cpu failed: why",
            "in Docker: 3.11-cpu failed: why",
        ),
        ("nothing", "in Docker: the messages above say why"),
    ],
)
def test_failures_of_the_engine_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, message: str
) -> None:
    fake_docker(tmp_path, monkeypatch, f"echo '{said}'; exit 1")
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(SystemExit, match=message):
        cli.main(["build", str(source), "--target=3.11-cpu"])


def test_engine_that_is_slow_to_answer_is_not_a_test_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_docker(tmp_path, monkeypatch, "exit 0")
    docker = tmp_path / "bin" / "docker"
    text = docker.read_text().replace("\n", '\n[ "$1" = info ] && exec tail -f /dev/null\n', 1)
    docker.write_text(text)
    monkeypatch.setattr(engines, "TIMEOUT", 0.1)
    given = (
        engines.Engine("1"),
        project.Project(),
        TARGET,
        tmp_path / "x.whl",
        tmp_path,
        [],
        tmp_path,
    )
    with pytest.raises(UserError, match="the Docker engine did not do its part") as error:
        containers.run_tests(*given)
    assert "'docker', 'info'" in str(error.value) and "timed out" in str(error.value)
    assert error.value.code == 1


@pytest.mark.parametrize("code", [1, 3, 4, 5, 137])
def test_exit_code_is_that_of_the_command_in_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    said = f'process "sh -c x" did not complete successfully: exit code: {code}'
    fake_docker(tmp_path, monkeypatch, f"echo '#9 0.1 torchwheels: why'; echo '{said}'; exit 1")
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(SystemExit) as ended:
        cli.main(["build", str(source), "--target=3.11-cpu"])
    message = "torchwheels: in Docker: why"
    if code in (3, 4, 5):
        assert ended.value.code == code
        assert capsys.readouterr().err == f"{message}\n"
    else:
        assert ended.value.code == message


@pytest.mark.parametrize(("left", "code"), [("", 3), ("x.whl.refused", 0)])
def test_a_container_ends_as_its_command_or_with_what_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, code: int
) -> None:
    fake_docker(tmp_path, monkeypatch, "exit 1")
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(SystemExit):
        cli.main(["build", str(source), "--target=3.11-cpu"])
    (stage,) = json.loads((tmp_path / "bake.json").read_text())["target"].values()
    command = stage["args"]["COMMAND"].replace("/dist", str(tmp_path / "dist"))
    # Of a name after a dollar, bake prints that it is a variable which is not set.
    assert not re.search(r"\$[A-Za-z_{]", command)
    (tmp_path / "dist").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/dist/{left}\nexit 3\n")
    python.chmod(0o755)
    assert subprocess.run(["sh", "-c", command]).returncode == code


@pytest.mark.parametrize(
    ("builders", "lines"),
    [
        (["a", "b"], ["3.11-cpu  #9 0.1 compiling", "3.12-cpu  #9 0.1 compiling"]),
        (["a"], ["#9 0.1 compiling"] * 2),
    ],
)
def test_lines_of_builds_at_the_same_time_name_their_target(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    builders: list[str],
    lines: list[str],
) -> None:
    fake_docker(tmp_path, monkeypatch, "echo '#9 0.1 compiling'; exit 1")
    source = tmp_path / "source"
    source.mkdir()
    command = ["build", str(source), "--target=3.11-cpu", "--target=3.12-cpu"]
    with pytest.raises(SystemExit, match=r"2 of 2 targets failed: 3\.11-cpu, 3\.12-cpu"):
        cli.main([*command, *(f"--builder={x}" for x in builders)])
    printed = capsys.readouterr().out.splitlines()
    assert sorted(x for x in printed if "compiling" in x) == lines


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        ([], "does not pass the audit:\n  requirement: its metadata do not require torch"),
        (["torch==2.13.*"], "was refused: see the messages above"),  # it does not import, say
    ],
)
def test_wheel_that_was_refused_in_a_container_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    requires: list[str], message: str,
) -> None:  # fmt: skip
    forge = Forge(tmp_path)
    forge.requires = requires
    wheel = forge.wheel()
    leave = f"""
    folder=$(grep -o 'dest=[^"]*' {tmp_path}/bake.json | cut -d= -f2)
    mkdir "$folder/dist" && cp {wheel} "$folder/dist/{wheel.name}.refused"
    echo '{{"cxx": "g++ 12", "nvcc": null}}' > "$folder/compilers.json"
    """
    fake_docker(tmp_path, monkeypatch, leave)
    source, dist = tmp_path / "source", tmp_path / "dist"
    source.mkdir()
    with pytest.raises(SystemExit):
        cli.main(["build", str(source), "--target=3.11-cpu", f"--dist={dist}"])
    assert message in capsys.readouterr().err
    assert [path.name for path in dist.iterdir()] == [f"{wheel.name}.refused"]


def test_image_gets_what_the_table_and_the_project_say() -> None:
    options = project.Project(system_packages=("libfoo-dev",), release="12.4")
    assert containers.build_arguments(options, TARGET) == {
        "BASE_IMAGE": TARGET.image,
        "TARGET": "3.11-cu130",
        "RELEASE": "12.4",
        "PYTHON": "3.11",
        "CUDA_HOME": "/usr/local/cuda",
        "UV": releases.load().uv,
        "SYSTEM_PACKAGES": "libfoo-dev",
    }


@pytest.mark.parametrize(
    ("target", "platform"),
    [("3.11-cpu", "linux/amd64"), ("3.11-cpu-aarch64", "linux/arm64")],
)
def test_the_engine_is_asked_for_the_machine_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, platform: str
) -> None:
    """It may run on another machine than this one, so its own platform says nothing."""
    said = "#9 0.1 exec /bin/sh: exec format error"
    fake_docker(tmp_path, monkeypatch, f"echo '{said}'; exit 1")
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(SystemExit, match=f"the Docker engine cannot run programs for {platform}: "):
        cli.main(["build", str(source), f"--target={target}"])
    (stage,) = json.loads((tmp_path / "bake.json").read_text())["target"].values()
    assert stage["platforms"] == [platform]


def test_a_socket_of_a_group_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        path = tmp_path / "docker.sock"
        listener.bind(str(path))
        said = engines._explained("permission denied", {"DOCKER_HOST": f"unix://{path}"})
    assert f"{path} is open to the group {path.group()}: run `sudo usermod" in said


@pytest.mark.slow
def test_compose_serves_an_index_of_the_wheels_in_dist(engine: None, tmp_path: Path) -> None:
    """The services of this repository, in a folder with a wheel that keeps the rules."""
    root = Path(__file__).parents[2]
    tree, tool = tmp_path / "tree", Path("torchwheels/src/torchwheels")
    shutil.copytree(root / tool, tree / tool, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "docker-compose.yml", tree)
    (tree / "dist").mkdir()
    served = Forge(tree / "dist").wheel()
    compose = ["docker", "compose", "--project-name=served-by-a-test"]
    download = [sys.executable, "-m", "pip", "download", "--isolated", "--no-deps", "--retries=9"]
    download += ["--index-url=http://localhost:8080/simple/", f"--dest={tmp_path}", "tinyops"]
    try:
        subprocess.run([*compose, "up", "--detach", "index"], cwd=tree, check=True)
        subprocess.run(download, check=True)
    finally:
        subprocess.run([*compose, "down", "--rmi=local", "--volumes"], cwd=tree, check=True)
    assert (tmp_path / served.name).read_bytes() == served.read_bytes()


HOSTILE = """
import os, pathlib, subprocess, time
def tried(what, run):
    try:
        print("HOSTILE", what, run(), flush=True)
    except OSError as error:
        print("HOSTILE", what, type(error).__name__, flush=True)
tried("writes its sources", lambda: pathlib.Path("/source/left").write_text("x"))
tried("sees the host", lambda: pathlib.Path({marker!r}).read_text())
tried("reads the environment", lambda: "password" in str(os.environ))
home = pathlib.Path("/root")
tried("reads credentials", lambda: any((home / x).exists() for x in (".netrc", ".ssh", ".docker")))
tried("has the engine", lambda: os.path.exists("/var/run/docker.sock"))
import socket
tried("has a network", lambda: any(name != "lo" for _, name in socket.if_nameindex()))
tried("forks", lambda: subprocess.Popen(["sleep", "987654"], start_new_session=True).pid > 1)
print("HOSTILE hangs True", flush=True)
time.sleep(10**6)
"""


@pytest.mark.slow
@pytest.mark.parametrize("network", [False, True])
def test_what_a_hostile_source_can_and_cannot_do(
    engine: None, tmp_path: Path, network: bool
) -> None:
    marker = tmp_path / "marker"
    marker.write_text("of the host")
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text(HOSTILE.format(marker=str(marker)))
    options = tmp_path / "options.toml"
    options.write_text(f"network = {str(network).lower()}\n")
    command = [sys.executable, "-m", "torchwheels", "build", str(source), "--target=3.11-cpu"]
    command.append(f"--config={options}")
    path = str(Path(cli.__file__).parents[1])
    secrets = {"PIP_PASSWORD": "password", "GITHUB_TOKEN": "password"}
    said: dict[str, str] = {}
    with subprocess.Popen(
        [*command, "--backend=docker"],
        env={**os.environ, **secrets, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "  HOSTILE " in line:
                what, _, answer = line.partition("HOSTILE ")[2].strip().rpartition(" ")
                said[what] = answer
            if "hangs" in said:
                break
        process.terminate()
    assert said == {
        "writes its sources": "OSError",
        "sees the host": "FileNotFoundError",
        "reads the environment": "False",
        "reads credentials": "False",
        "has the engine": "False",
        "has a network": str(network),
        "forks": "True",
        "hangs": "True",
    }
    assert [x.name for x in source.iterdir()] == ["setup.py"]
    assert ends("sleep 987654")


def ends(command: str) -> bool:
    """Whether a process of this machine, or of a container on it, ends within half a minute."""
    for _ in range(300):
        if subprocess.run(["pgrep", "-fx", command], capture_output=True).returncode:
            return True
        time.sleep(0.1)
    return False


# The import check runs code of the wheel, beside the wheel that is going to leave the container.
FORGING = """
import glob, subprocess
code = '''
import sys
from torchwheels import finish, releases, wheel
forged = finish.Used(releases.load().target("3.11-cpu"), ("9.0",), "git+https://example.org/x@1", "g++ 99", "99.0")
finish.stamp(wheel.read(__import__("pathlib").Path(sys.argv[1])), forged)
'''
for wheel in glob.glob("/opt/cache/build/*/finished/*.whl"):
    subprocess.run(["/opt/torchwheels/bin/python", "-c", code, wheel], env={"PYTHONPATH": "/opt/tool"}, check=True)
    print("FORGED", file=__import__("sys").stderr)
"""


@pytest.mark.slow
def test_origin_is_written_outside(engine: None, own_project: Path, tmp_path: Path) -> None:
    package = own_project / "own_project" / "__init__.py"
    package.write_text(FORGING + package.read_text())
    dist = tmp_path / "dist"
    cli.main(["build", str(own_project), "--target=3.11-cpu", "--backend=docker", f"--dist={dist}"])
    (path,) = dist.glob("*.whl")
    record = wheel.read(path).record
    assert record is not None
    assert record["source"].startswith("sha256:")
    assert record["cxx"].startswith("g++ ") and record["cxx"] != "g++ 99"
    assert (record["nvcc"], record["architectures"]) == (None, [])


CONFINED = """
import json, pathlib, socket
def test_what_it_may_do():
    said = dict(x.split(":\\t") for x in pathlib.Path("/proc/self/status").read_text().splitlines())
    assert {said[x] for x in ("CapPrm", "CapEff", "CapBnd")} == {"0" * 16}
    assert said["NoNewPrivs"] == "1"
    assert [x.name for x in pathlib.Path("/sys/class/net").iterdir()] == ["lo"]
    groups = pathlib.Path("/sys/fs/cgroup")
    (memory,) = [*groups.glob("memory.max"), *groups.glob("memory/memory.limit_in_bytes")]
    (pids,) = [*groups.glob("pids.max"), *groups.glob("pids/pids.max")]
    assert 0 <= 2 * 10**9 - int(memory.read_text()) < 2**16  # whole pages
    assert int(pids.read_text()) == 8192
"""

ENDLESS = """
import subprocess
def test_it():
    print("HANGS", flush=True)
    subprocess.run(["sleep", "8765432"])
"""


def command_for(folder: Path, test: str, **options: object) -> list[str]:
    """The command that tests a wheel of a project in `folder`, whose only test is `test`."""
    table = {"paths": ["tests"], **options}
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test_it.py").write_text(test)
    (folder / "pyproject.toml").write_text(f"[tool.torchwheels]\ntests = {{ {pairs} }}\n")
    forge = Forge(folder)
    forge.requires = []
    command = [sys.executable, "-m", "torchwheels", "test", str(folder), "--target=3.11-cpu"]
    return [
        *command,
        "--backend=docker",
        f"--dist={folder}",
        f"--wheel={forge.wheel()}",
        "--",
        "-s",
    ]


def of_tests() -> set[str]:
    """The containers and images of tests that the engine has."""
    listed = subprocess.run(
        "docker ps --all --format={{.Names}}; docker images --format={{.Repository}}:{{.Tag}}",
        shell=True, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {x for x in listed.stdout.split() if x.startswith("torchwheels-test")}


@pytest.mark.slow
def test_tests_are_confined_and_leave_each_other_alone(engine: None, tmp_path: Path) -> None:
    before = of_tests()
    path = str(Path(cli.__file__).parents[1])
    variables = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        command_for(tmp_path / "one", ENDLESS), env=variables, stdout=subprocess.PIPE, text=True
    ) as first:
        try:
            assert first.stdout is not None
            assert any("HANGS" in line for line in first.stdout)
            other = command_for(tmp_path / "other", CONFINED, memory=2)
            done = subprocess.run(other, env=variables, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout
            assert first.poll() is None
        finally:
            first.terminate()
    assert first.returncode == 130
    assert ends("sleep 8765432")
    assert of_tests() <= before


@pytest.mark.slow
def test_tests_in_a_container_end_with_their_time(engine: None, tmp_path: Path) -> None:
    path = str(Path(cli.__file__).parents[1])
    done = subprocess.run(
        command_for(tmp_path / "one", ENDLESS, minutes=0.05),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "the tests took more than 0.05 minutes: mend what hangs" in done.stderr
    assert ends("sleep 8765432")
