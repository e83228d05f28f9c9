"""Which target goes to which builder, what is not built again, and how builds share a machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from forged_wheels import Forge
from torchwheels import (
    build,
    cli,
    containers,
    engines,
    kept,
    pipeline,
    processes,
    project,
    releases,
    schedule,
)
from torchwheels.errors import UserError
from torchwheels.releases import Target
from torchwheels.sources import Fetched

TARGETS = [releases.load().target(f"3.1{minor}-cpu") for minor in range(5)]


def test_builders_share_the_targets() -> None:
    both = threading.Barrier(2, timeout=60)
    built: dict[str, list[str]] = {"a": [], "b": []}

    def builder(name: str) -> schedule.Build:
        def run(target: Target) -> Path:
            if not built[name]:
                both.wait()  # neither has its first before the other has one, too
            built[name].append(target.name)
            return Path(f"{target.name}.whl")

        return run

    outcomes = schedule.spread(TARGETS, [builder("a"), builder("b")])
    assert {x.name: Path(f"{x.name}.whl") for x in TARGETS} == {
        name: outcome.wheel for name, outcome in outcomes.items()
    }
    assert built["a"] and built["b"]
    assert sorted(built["a"] + built["b"]) == [x.name for x in TARGETS]


def test_the_rest_goes_on_where_a_builder_dies(capsys: pytest.CaptureFixture[str]) -> None:
    died = threading.Event()

    def dies(target: Target) -> Path:
        died.set()
        raise schedule.BuilderGoneError("the builder b does not answer any more")

    def lives(target: Target) -> Path:
        assert died.wait(60)
        if target.name == "3.12-cpu":
            raise UserError("it does not compile")
        return Path(f"{target.name}.whl")

    outcomes = schedule.spread(TARGETS, [lives, dies])
    failures = {name: str(x.error) for name, x in outcomes.items() if x.error}
    assert failures == {"3.12-cpu": "it does not compile"}
    assert {*outcomes} == {x.name for x in TARGETS}
    assert "waits for another builder: the builder b does not" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (CalledProcessError(128, ["git", "status"]), "git status ended with exit code 128: the"),
        (OSError(28, "No space left on device", "/x"), "No space left on device: /x"),
    ],
)
def test_a_failure_of_the_machine_ends_its_own_target_alone(failure: Exception, said: str) -> None:
    def build(target: Target) -> Path:
        if target == TARGETS[0]:
            raise failure
        return Path(f"{target.name}.whl")

    first, *others = schedule.spread(TARGETS, [build]).values()
    assert f"{TARGETS[0].name}: FAILED after 0 s: {said}" in str(first)
    with pytest.raises(UserError, match=r"1 of 5 targets failed: 3\.10-cpu"):
        pipeline._check([first, *others])
    with pytest.raises(type(failure)):  # as it is said of a single target, and shown by `--debug`
        pipeline._check([first])
    assert [x.wheel for x in others] == [Path(f"{x.name}.whl") for x in TARGETS[1:]]


def test_targets_fail_once_every_builder_is_gone() -> None:
    def dies(target: Target) -> Path:
        raise schedule.BuilderGoneError("it does not answer any more")

    outcomes = schedule.spread(TARGETS, [dies, dies])
    assert {*outcomes} == {x.name for x in TARGETS}
    assert {str(x.error) for x in outcomes.values()} == {
        "it does not answer any more",
        "no builder is left",
    }


def test_nothing_is_started_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that was between two processes goes no further."""
    begun, stopped, end_all = threading.Event(), threading.Event(), processes.end_all
    monkeypatch.setattr(processes, "end_all", lambda: (end_all(), stopped.set()))
    ended: list[str] = []

    def interrupted(target: Target) -> Path:
        assert begun.wait(60)
        raise KeyboardInterrupt

    def goes_on(target: Target) -> Path:
        begun.set()
        assert stopped.wait(60)
        processes.run(["true"])
        ended.append(target.name)
        return Path("x.whl")

    with pytest.raises(KeyboardInterrupt):
        schedule.spread(TARGETS[:2], [interrupted, goes_on])
    assert not ended
    assert processes.run(["true"]).returncode == 0


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """A function that sends this process a signal like Ctrl-C's, to the thread that calls it.

    Python runs the handler in the main thread, but wakes it from no wait without an end.
    """

    def handle(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handle)
    yield lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_reaches_a_main_thread_that_waits(interrupt: Callable[[], None]) -> None:
    outlasted = []

    def builder(target: Target) -> None:
        processes.pause(0.5)  # the main thread begins to wait
        interrupt()
        processes.pause(30)
        outlasted.append(target)

    with pytest.raises(KeyboardInterrupt):
        schedule.spread(TARGETS[:1], [builder])
    assert not outlasted


def test_ctrl_c_while_the_builders_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of which its pool does not know yet would build on."""
    begun = threading.Event()

    def start(thread: threading.Thread) -> None:
        original(thread)
        begun.wait(0.5)
        raise KeyboardInterrupt

    def builder(target: Target) -> None:
        begun.set()

    original = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        schedule.spread(TARGETS, [builder])
    assert not begun.is_set()


@pytest.mark.parametrize(
    ("machine", "targets", "shares"),
    [
        ("64 274877906944", 5, ["12"] * 5),
        ("2 274877906944", 5, ["1"] * 2),
        ("64 4000000000", 5, ["1"] * 2),  # its memory is for two compilers
        ("64 274877906944", 1, ["64"]),
    ],
)
def test_builds_at_the_same_time_share_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, targets: int, shares: list[str]
) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho {machine} null\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    engine = engines.Engine("26.1.5")
    found = containers.shared(engine, dict.fromkeys(TARGETS[:targets], project.Project()))
    assert [x.jobs for x in found] == shares


def test_what_dist_has_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted run goes on: only the wheel is a stub here, for its compiler."""
    dist = tmp_path / "dist"
    dist.mkdir()
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text("")
    built: list[str] = []
    interrupted = iter([False, True])

    def build_wheel(
        options: project.Project, target: Target, source: Fetched, dist: Path, *_: object
    ) -> Path:
        if next(interrupted, False):
            raise KeyboardInterrupt
        built.append(target.name)
        forge = Forge(dist)
        forge.target, tag = target, f"cp{target.python.replace('.', '')}"
        forge.tag = f"{tag}-{tag}"
        return forge.wheel()

    monkeypatch.setattr(build, "build_wheel", build_wheel)
    command = ["build", str(source), "--target=3.11-cpu", "--target=3.12-cpu", f"--dist={dist}"]
    command.append("--backend=local")
    with pytest.raises(SystemExit):
        cli.main(command)
    assert built == ["3.11-cpu"]
    cli.main(command)
    assert built == ["3.11-cpu", "3.12-cpu"]
    said = capsys.readouterr().out
    first = min(dist.glob("*.whl"))
    assert f"torchwheels: 2 targets, 1 of which {dist} has\n" in said
    assert f"torchwheels: 3.11-cpu: {first.name}, kept\n" in said
    (source / "setup.py").write_text("# changed")
    cli.main(command)
    assert built[2:] == ["3.11-cpu", "3.12-cpu"]
    first.write_bytes(first.read_bytes() + b"changed")
    cli.main(command)
    assert built[4:] == ["3.11-cpu"]


def test_a_build_that_fails_leaves_no_refused_wheel_of_an_earlier_one(
    own_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it remove what is of another target or project."""

    def fail(*_: object) -> None:
        raise UserError("it does not compile")

    monkeypatch.setattr(build, "build_wheel", fail)
    dist = tmp_path / "dist"
    dist.mkdir()
    name = "own_project-0.1{}-cp3{}-cp3{}-linux_x86_64.whl.refused".format
    earlier = [name("", 11, 11), name("+cpu.torch2.13", 11, 11)]
    others = [name("+cu130.torch2.13", 11, 11), name("", 12, 12), f"x{earlier[0]}", "x.whl.refused"]
    for each in (*earlier, *others):
        (dist / each).touch()
    command = ["build", str(own_project), "--target=3.11-cpu", f"--dist={dist}", "--backend=local"]
    with pytest.raises(SystemExit, match="it does not compile"):
        cli.main(command)
    assert {x.name for x in dist.iterdir()} == {*others}


def test_inputs_are_the_options_and_the_patches(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    (tmp_path / "x.patch").write_text("one")
    options = project.Project(patches=("x.patch",), file=file)
    source = Fetched(tmp_path, "sha256:1")
    first = kept.inputs(options, TARGETS[0], source, "local")
    assert first == kept.inputs(options, TARGETS[0], source, "local")
    others = {
        kept.inputs(options, TARGETS[1], source, "local"),
        kept.inputs(options, TARGETS[0], Fetched(tmp_path, "sha256:2"), "local"),
        kept.inputs(options, TARGETS[0], source, "ubuntu:22.04"),
        kept.inputs(project.Project(file=file), TARGETS[0], source, "local"),
    }
    (tmp_path / "x.patch").write_text("two")
    others.add(kept.inputs(options, TARGETS[0], source, "local"))
    assert len(others - {first}) == 5
