"""Which targets are built, and which again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from forged_wheels import Forge
from torchwheels import build, cli
from torchwheels.errors import BuildError, UserError
from torchwheels.index import kept
from torchwheels.options import project, releases
from torchwheels.options.releases import Target
from torchwheels.run import pipeline
from torchwheels.sources import Fetched

TARGETS = [releases.load().target(f"3.1{minor}-cpu") for minor in range(5)]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (CalledProcessError(128, ["git", "status"]), "git status ended with exit code 128: the"),
        (OSError(28, "No space left on device", "/x"), "the disk of /x is full: free some"),
    ],
)
def test_a_failure_of_the_machine_ends_its_own_target_alone(
    own_project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: Exception,
    said: str,
) -> None:
    def build_wheel(options: project.Project, target: Target, *_: object) -> Path:
        if target == TARGETS[0]:
            raise failure
        return Forge(tmp_path).wheel()

    monkeypatch.setattr(build, "build_wheel", build_wheel)
    command = ["build", str(own_project), f"--dist={tmp_path}", "--backend=local"]
    targets = [f"--target={target.name}" for target in TARGETS]
    with pytest.raises(SystemExit, match=r"1 of 5 targets failed: 3\.10-cpu"):
        cli.main([*command, *targets])
    first, *others = capsys.readouterr().out.splitlines()[-5:]
    assert first.startswith(f"torchwheels: 3.10-cpu: FAILED after 0 s: {said}")
    wheel = min(tmp_path.glob("*.whl")).name
    assert [x.rpartition(", ")[0] for x in others] == [
        f"torchwheels: {x.name}: {wheel}" for x in TARGETS[1:]
    ]
    with pytest.raises(SystemExit, match=said):  # alone as it is
        cli.main([*command, targets[0]])


def test_sources_without_the_project_are_said_before_anything_is_installed(
    own_project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[str] = []

    def build_wheel(options: project.Project, *_: object) -> Path:
        seen.append(options.subdirectory)
        raise UserError("it builds")

    monkeypatch.setattr(build, "build_wheel", build_wheel)
    command = ["build", str(own_project), f"--dist={tmp_path}", "--backend=local"]
    command.append("--target=3.11-cpu")
    with pytest.raises(SystemExit, match=f"^{BuildError.code}$"):
        cli.main([*command, "--subdirectory=nowhere"])
    assert "neither a setup.py nor a pyproject.toml in nowhere" in capsys.readouterr().err
    table = own_project / "pyproject.toml"
    text = table.read_text()
    table.write_text(text.replace("[project]\n", "[project]\nrequires-python = '>=3.12'\n"))
    with pytest.raises(SystemExit, match=f"^{BuildError.code}$"):
        cli.main(command)
    assert "for Python >=3.12, and 3.11-cpu has Python 3.11: choose" in capsys.readouterr().err
    assert not seen
    (tmp_path / "options.toml").write_text('before-build = "make"\n')
    with pytest.raises(SystemExit, match="it builds"):
        cli.main([*command, f"--config={tmp_path / 'options.toml'}"])
    assert seen == [""]


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
    assert f"torchwheels: 3.11-cpu: {first.name}, kept (delete it to have it built again)\n" in said
    (source / "setup.py").write_text("# changed")
    cli.main(command)
    assert built[2:] == ["3.11-cpu", "3.12-cpu"]
    first.write_bytes(first.read_bytes() + b"changed")
    cli.main(command)
    assert built[4:] == ["3.11-cpu"]
    variant = {"wheel": "x.whl"}  # which is not there, so the wheel is not whole
    first.with_suffix(".report.json").write_text(json.dumps({"variant": variant}))
    cli.main(command)
    assert built[5:] == ["3.11-cpu"]
    (dist / "variants").mkdir()
    (dist / "variants" / "x.whl").touch()
    cli.main(command)
    assert not built[6:]


def test_the_wheel_of_the_sources_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else of its project `dist` has got since."""
    source, dist = tmp_path / "tinyops", tmp_path / "dist"
    source.mkdir(), dist.mkdir()
    (source / "setup.py").touch()
    (source / "pyproject.toml").write_text("[tool.torchwheels]\ntests = { command = 'true' }\n")
    forge, tested = Forge(dist), []
    monkeypatch.setattr(build, "build_wheel", lambda *_: forge.wheel())
    monkeypatch.setattr(pipeline, "test", lambda *given, **_: tested.append(given[2].name))
    given = [str(source), "--target=3.11-cpu", f"--dist={dist}", "--backend=local"]
    cli.main(["build", *given])
    forge.version = "2.0+cpu.torch2.13"
    newer = forge.wheel()
    cli.main(["test", *given])
    (source / "setup.py").write_text("# of which there is no wheel")
    cli.main(["test", *given])
    assert tested == ["tinyops-1.0+cpu.torch2.13-cp311-cp311-manylinux_2_5_x86_64.whl", newer.name]


def test_tests_want_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a runner, where the wheel came out of a container."""
    source, dist = tmp_path / "tinyops", tmp_path / "dist"
    source.mkdir(), dist.mkdir()
    (source / "setup.py").touch()
    (source / "pyproject.toml").write_text("[tool.torchwheels]\ntests = { command = 'true' }\n")
    forge, tested = Forge(dist), []
    forge.target = releases.load().target("3.11-cu121")
    forge.version = "1.0+cu121.torch2.4"
    wheel = forge.wheel()
    monkeypatch.setattr(pipeline, "test", lambda *given, **_: tested.append(given[2].name))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    cli.main(["test", str(source), "--target=3.11-cu121", f"--dist={dist}", "--backend=local"])
    assert tested == [wheel.name]


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
    others.append("foo_bar-2.0-cp311-cp311-linux_x86_64.whl.refused")
    for each in (*earlier, *others):
        (dist / each).touch()
    command = ["build", str(own_project), "--target=3.11-cpu", f"--dist={dist}", "--backend=local"]
    with pytest.raises(SystemExit, match="it does not compile"):
        cli.main(command)
    assert {x.name for x in dist.iterdir()} == {*others}
    kept.forget_refused(dist, TARGETS[1], "[^x]*")  # as a PKG-INFO may say
    assert {x.name for x in dist.iterdir()} == {*others}


def test_inputs_are_the_options_the_patches_and_what_chooses_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    constraint = tmp_path / "constraint.txt"
    for name in ("UV_CONSTRAINT", "PIP_CONSTRAINT"):
        monkeypatch.setenv(name, str(constraint))
        for text in ("numpy<2", "numpy<1"):
            constraint.write_text(f"{text}  # {name}")
            others.add(kept.inputs(options, TARGETS[0], source, "local"))
    monkeypatch.delenv("UV_CONSTRAINT")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "including.txt"))
    (tmp_path / "including.txt").write_text("--constraint=constraint.txt\n-r including.txt")
    for text in ("numpy<2", "numpy<1"):
        constraint.write_text(text)
        others.add(kept.inputs(options, TARGETS[0], source, "local"))
    for name in ("UV_RESOLUTION", "UV_EXCLUDE_NEWER", "UV_FIND_LINKS", "PIP_NO_BINARY"):
        monkeypatch.setenv(name, "lowest")
        others.add(kept.inputs(options, TARGETS[0], source, "local"))
    assert len(others - {first}) == 15
    monkeypatch.setenv("UV_INDEX_OWN_PASSWORD", "another")
    assert kept.inputs(options, TARGETS[0], source, "local") in others
    (tmp_path / "including.txt").unlink()
    os.mkfifo(tmp_path / "including.txt")
    with pytest.raises(
        UserError, match=r"including\.txt, which is to constrain versions, is no pl"
    ):
        kept.inputs(options, TARGETS[0], source, "local")


def test_what_links_lead_to_out_of_the_sources_is_an_input(tmp_path: Path) -> None:
    """Whatever their commit; of a folder nobody knows what has changed there."""
    folder, file = tmp_path / "source", tmp_path / "outside" / "own.h"
    for each in (folder, file.parent):
        each.mkdir()
    file.write_text("one")

    def inputs() -> str:
        source = Fetched(folder, "git:1")
        return kept.inputs(project.Project(), TARGETS[0], source, "local")

    (folder / "own.h").symlink_to(file)
    first = inputs()
    assert first == inputs()
    file.write_text("changed")
    assert first != inputs()
    (folder / "include").symlink_to(file.parent)
    assert inputs() != inputs()
