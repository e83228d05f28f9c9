"""What a container gets and gives back, how it ends, and what becomes of a hostile source in one."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from forged_wheels import Forge
from torchwheels import cli, wheel
from torchwheels.errors import UserError
from torchwheels.options import project, releases
from torchwheels.run import containers, engines
from torchwheels.run.engines import Container, Engine

TARGET = releases.load().target("3.11-cu130")
CPU = releases.load().target("3.11-cpu")
IMAGE = containers.base_image(CPU)


def test_image_gets_what_the_table_and_the_project_say() -> None:
    options = project.Project(system_packages=("libfoo-dev",), release="12.4")
    found = containers.build_arguments(options, TARGET)
    assert found == {
        "BASE_IMAGE": containers.base_image(TARGET),
        "PYTHON": "3.11",
        "CUDA_HOME": "/usr/local/cuda",
        "UV": releases.load().uv,
        "SYSTEM_PACKAGES": "libfoo-dev",
        "REQUIREMENTS": "--require-hashes --requirement=/opt/own.txt",
    }


MIRRORS = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "https://me:word@example.org/simple",
    "PIP_EXTRA_INDEX_URL": "https://example.org/more http://localhost:3141/own file:///here",
    "PIP_TRUSTED_HOST": "example.org",
    "UV_PYTHON_INSTALL_MIRROR": "https://me:word@example.org/pythons",
    "TORCHWHEELS_TORCH_INDEX": "https://me:word@example.org/whl/{label}",
    "TORCHWHEELS_APT_MIRROR": "http://example.org/ubuntu",
    "GITHUB_TOKEN": "word",
}


def test_mirrors_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what only this machine has; and what code of a project sees has no password."""
    for name, value in MIRRORS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MAX_JOBS", "3")
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/theirs")
    assert containers.mirrors() == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "PIP_INDEX_URL": "https://me:word@example.org/simple",
        "UV_DEFAULT_INDEX": "https://me:word@example.org/simple",
        "PIP_EXTRA_INDEX_URL": "https://example.org/more",
        "UV_INDEX": "https://example.org/more",
        "PIP_TRUSTED_HOST": "example.org",
        "UV_INSECURE_HOST": "example.org",
        "UV_PYTHON_INSTALL_MIRROR": "https://me:word@example.org/pythons",
        "TORCHWHEELS_TORCH_INDEX": "https://me:word@example.org/whl/{label}",
        "TORCHWHEELS_APT_MIRROR": "http://example.org/ubuntu",
    }
    seen = containers._variables()
    assert "word" not in str(seen)
    assert seen["PIP_INDEX_URL"] == "https://example.org/simple"
    assert (seen["MAX_JOBS"], seen["GITHUB_REPOSITORY"]) == ("3", "somebody/theirs")


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("unix:///none.sock", r"there is no socket /none\.sock"),
        ("tcp://127.0.0.1:1", r"tcp://127\.0\.0\.1:1: .*[Cc]onnection refused"),
        ("ssh://me@localhost:1", "ssh://me@localhost:1: "),
    ],
)
def test_where_no_engine_answers(monkeypatch: pytest.MonkeyPatch, host: str, said: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(UserError, match=said):
        engines.find_engine()


def test_an_engine_without_its_command_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = SimpleNamespace(version=dict, api=SimpleNamespace())
    monkeypatch.setattr(engines.docker, "from_env", lambda **_: client)
    monkeypatch.setenv("DOCKER_HOST", "unix:///some.sock")
    monkeypatch.setenv("PATH", "")
    assert engines.of_backend("auto", ".") is None
    said = "unix:///some.sock answers, but PATH has no docker, which makes the images"
    assert f"backend local: no Docker engine answers ({said})" in capsys.readouterr().out


def test_a_patch_elsewhere_is_not_put_into_a_container(tmp_path: Path) -> None:
    (tmp_path / "x.patch").touch()
    file = tmp_path / "own" / "options.toml"
    options = project.Project(patches=("../x.patch",), file=file)
    with pytest.raises(UserError, match=r"x\.patch is outside of .*own, the folder of the options"):
        containers._patches(options)


@pytest.fixture
def container(engine: Engine) -> Iterator[Container]:
    with Container(engine, IMAGE) as found:
        yield found


def said(container: Container, command: str, variables: Mapping[str, str] | None = None) -> str:
    code, output = container.run(["sh", "-c", command], variables or {})
    assert code == 0
    return output.decode()


@pytest.mark.slow
def test_output_comes_while_a_command_runs(
    container: Container, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        "echo a https://me:word@example.org/ >&2; printf 'answer %s' $X; printf 'ü' >&2; exit 3"
    )
    assert container.run(["sh", "-c", command], {"X": "1"}) == (3, b"answer 1")
    assert capsys.readouterr().out == "a https://****@example.org/\nü\n"


@pytest.mark.slow
def test_files_go_in_and_come_out(container: Container, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "program").write_text("#!/bin/sh\necho ran\n")
    (folder / "program").chmod(0o755)
    (folder / "link").symlink_to("program")
    container.put({"/opt/some/folder": folder, "/job.json": "tëxt"})
    assert said(container, "/opt/some/folder/link; ls /opt/some/folder; cat /job.json") == (
        "ran\nlink\nprogram\ntëxt"
    )
    assert said(container, "stat -c %U:%G /opt/some/folder/program") == "root:root\n"
    out = tmp_path / "out"
    out.mkdir()
    assert container.take("/none", out) == []
    said(container, "mkdir -p /dist/deep; cd /dist; echo x > x; echo y > deep/y; mkfifo fifo")
    said(container, "cd /dist; ln -s /etc/passwd link; ln x hard")
    assert [x.name for x in container.take("/dist", out)] in (["x"], ["hard"])
    assert [x.read_text() for x in out.iterdir()] == ["x\n"]
    said(container, f"rm -r /dist; ln -s {folder} /dist")
    assert container.take("/dist", out) == []


@pytest.mark.slow
def test_a_network_is_left_and_joined(container: Container) -> None:
    def networks() -> int:
        return len(said(container, "ls /sys/class/net").split())

    assert networks() == 2
    container.leave()
    assert networks() == 1
    container.join()
    assert networks() == 2


@pytest.mark.slow
def test_a_command_ends_with_its_time(container: Container) -> None:
    with pytest.raises(TimeoutError):
        container.run(["sleep", "8765431"], {}, limit=0.5)
    assert ends("sleep 8765431")


LEFT_ALONE = f"""
import signal
from torchwheels.run.engines import Container, find_engine
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background ignores
with Container(find_engine(), "{IMAGE}") as container:
    container.run(["sh", "-c", "echo started >&2; exec sleep 8765430"], {{}})
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_container_ends_with_us(engine: Engine, number: signal.Signals) -> None:
    variables = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", LEFT_ALONE], env=variables, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(number)
    assert ends("sleep 8765430")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "answer", "kind", "message"),
    [
        (0, '{"result": 3}', None, ""),
        (3, '{"error": "x failed: why"}', 3, "in the container: x failed: why"),
        (4, '{"error": "https://me:word@h"}', 4, r"in the container: https://\*\*\*\*@h"),
        (1, '{"error": "why"}', 1, "in the container: why"),
        (137, "", 1, "`import` ended with exit code 137: the messages above say why"),
        (0, "[]", 1, "`import` ended with exit code 0: the"),
    ],
)
def test_a_step_ends_in_its_answer_or_an_error_of_its_kind(
    container: Container, code: int, answer: str, kind: int | None, message: str
) -> None:
    container.put({"/usr/bin/python": f"#!/bin/sh\nprintf %s '{answer}'\nexit {code}\n"})
    said(container, "chmod +x /usr/bin/python")
    if kind is None:
        assert container.call("import", {}) == 3
        return
    with pytest.raises(UserError, match=message) as error:
        container.call("import", {})
    assert error.value.code == kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image", "target", "message"),
    [
        ("localhost:1/none:1", "3.11-cpu", r"it wants the base image localhost:1/none:1 \("),
        # The engine may run on another machine than this one, so its own platform says nothing.
        (None, "3.11-cpu-aarch64", "and an engine that runs programs for linux/arm64$"),
    ],
)
def test_an_image_that_cannot_be_made(
    engine: Engine,
    other_machine: str,
    monkeypatch: pytest.MonkeyPatch,
    image: str | None,
    target: str,
    message: str,
) -> None:
    monkeypatch.setenv("TORCHWHEELS_BASE_IMAGE", image or other_machine)
    wanted, options = releases.load().target(target), project.Project()
    with pytest.raises(
        UserError,
        match=rf"^`docker build` of the toolchain of {target} ended with exit code 1: .*{message}",
    ):
        containers._toolchain(engine, wanted, containers.build_arguments(options, wanted))


@pytest.fixture
def other_machine(engine: Engine) -> Iterator[str]:
    """An image whose only program is for another machine."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        program = tarfile.TarInfo("bin/sh")
        program.size, program.mode = 64, 0o755
        header = b"\x7fELF\2\1\1".ljust(16, b"\0") + b"\2\0\xb7\0".ljust(48, b"\0")
        tar.addfile(program, io.BytesIO(header))
    name = f"torchwheels-other:{uuid.uuid4().hex}"
    command = ["docker", "import", "--platform=linux/arm64", "-", name]
    subprocess.run(command, input=packed.getvalue(), check=True, capture_output=True)
    yield name
    engine.client.images.remove(name)


@pytest.mark.slow
def test_an_engine_of_a_context(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for name, host in (("other", "unix:///var/run/docker.sock"), ("gone", "tcp://localhost:1")):
        made = ["docker", "context", "create", name, f"--docker=host={host}"]
        subprocess.run(made, check=True, capture_output=True)
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONTEXT", "other")
    assert engines.find_engine().client.ping()
    monkeypatch.setenv("DOCKER_CONTEXT", "gone")
    with pytest.raises(UserError, match=r"tcp://localhost:1: .*[Cc]onnection refused"):
        engines.find_engine()


@pytest.mark.slow
def test_a_build_that_fails_in_a_container(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text("import not_there")
    with pytest.raises(SystemExit) as ended:
        cli.main(["build", str(source), "--target=3.11-cpu", "--backend=docker"])
    assert ended.value.code == 3
    assert capsys.readouterr().err.startswith(
        "torchwheels: in the container: 3.11-cpu failed: its build imports a module that is not there (not_there)"
    )


@pytest.mark.slow
def test_wheel_that_was_refused_in_a_container_is_kept(
    engine: Engine, own_project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package, dist = own_project / "own_project" / "__init__.py", tmp_path / "dist"
    options = tmp_path / "options.toml"
    options.write_text("size-budget = 0.001\n")
    command = ["build", str(own_project), "--target=3.11-cpu", f"--dist={dist}"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, f"--config={options}"])
    refused = [*dist.glob("*.refused")]
    assert [*dist.glob("[!.]*")] == refused
    said = capsys.readouterr().err
    assert ended.value.code == 4
    assert "is not fit to publish:\n  size: it has 0.02 MB" in said
    assert said.endswith(f"\n  the wheel is kept as {refused[0]}\n") and said.count("kept as") == 1
    package.write_text("raise RuntimeError('no')")
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    said = capsys.readouterr().err
    assert ended.value.code == 4
    assert "in the container: " in said and "RuntimeError: no" in said
    assert said.endswith(f"\n  the wheel is kept as {refused[0]}\n") and said.count("kept as") == 1


TORCH = {
    "torch/__init__.py": "",
    "torch/version.py": "__version__ = '2.13.0'\ncuda = None\n",
    "torch-2.13.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n",
    "torch-2.13.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "torch-2.13.0.dist-info/RECORD": "",
}


@pytest.mark.slow
def test_no_password_of_a_mirror_stays_in_an_image(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The index has another torch, so that an image of its own is made."""
    token = uuid.uuid4().hex
    (tmp_path / "torch").mkdir()
    with zipfile.ZipFile(tmp_path / "torch" / "torch-2.13.0-py3-none-any.whl", "w") as packed:
        for name, text in TORCH.items():
            packed.writestr(name, text)
    with Container(engine, IMAGE):  # which makes the network
        (place,) = engine.client.networks.get(engines.NETWORK).attrs["IPAM"]["Config"]
    gateway = place["Gateway"]
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://me:{token}@{gateway}:{server.server_port}/"
        monkeypatch.setenv("TORCHWHEELS_TORCH_INDEX", index)
        monkeypatch.setenv("PIP_TRUSTED_HOST", gateway)
        name = containers._image(
            engine, project.Project(), CPU, containers._job(project.Project(), CPU, is_built=True)
        )
        server.shutdown()
    try:
        shown = subprocess.run(["docker", "inspect", name], capture_output=True, text=True).stdout
        history = ["docker", "history", "--no-trunc", name]
        shown += subprocess.run(history, capture_output=True, text=True).stdout
        assert "TORCHWHEELS_CACHE=/opt/cache" in shown and token not in shown
        with Container(engine, name) as container:
            found = said(container, f"grep -rl {token} /etc /opt /root /tmp /var || true")
        assert found == ""
        assert token not in capfd.readouterr().out
    finally:
        engine.client.images.remove(name)


@pytest.mark.slow
def test_compose_serves_an_index_of_the_wheels_in_dist(engine: Engine, tmp_path: Path) -> None:
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


# What it requires is asked with a network.
HOSTILE = """
import os, pathlib, subprocess, sys, time
if "bdist_wheel" not in sys.argv:
    import setuptools
    setuptools.setup(name="hostile", version="1")
    sys.exit()
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
    engine: Engine, tmp_path: Path, network: bool
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
            if line.startswith("HOSTILE "):
                what, _, answer = line.partition("HOSTILE ")[2].strip().rpartition(" ")
                said[what] = answer
            if "hangs" in said:
                break
        process.terminate()
    assert said == {
        "writes its sources": "1",
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
from torchwheels import wheel
from torchwheels.options import releases
from torchwheels.wheel import finish
forged = finish.Used(releases.load().target("3.11-cpu"), ("9.0",), "git+https://example.org/x@1", "g++ 99", "99.0")
finish.stamp(wheel.read(__import__("pathlib").Path(sys.argv[1])), forged)
'''
for wheel in glob.glob("/opt/cache/build/*/finished/*.whl"):
    subprocess.run(["/opt/torchwheels/bin/python", "-c", code, wheel], env={"PYTHONPATH": "/opt/tool"}, check=True)
    print("FORGED", file=__import__("sys").stderr)
"""


@pytest.mark.slow
def test_origin_is_written_outside(engine: Engine, own_project: Path, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_tests_are_confined_and_leave_each_other_alone(engine: Engine, tmp_path: Path) -> None:
    before = {x.id for x in engine.client.containers.list(all=True)}
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
    assert {x.id for x in engine.client.containers.list(all=True)} <= before


@pytest.mark.slow
def test_tests_in_a_container_end_with_their_time(engine: Engine, tmp_path: Path) -> None:
    path = str(Path(cli.__file__).parents[1])
    done = subprocess.run(
        command_for(tmp_path / "one", ENDLESS, minutes=0.05),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5
    assert "the tests took more than 0.05 minutes: mend what hangs" in done.stderr
    assert ends("sleep 8765432")
