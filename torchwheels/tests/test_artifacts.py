"""Wheels out of CI, by a `gh` that hands out what GitHub's does."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwheels import cli

# Of each artifact a folder, where a pattern names some.
GH = """#!/bin/sh
echo "$@" >> said
for folder in "$@"; do folder=${folder#--dir=}; done
case "$*" in *3.12-cpu*) printf 'caf\\351: ' >&2; echo "no valid artifacts found to download" >&2; exit 1 ;; esac
mkdir -p "$folder/wheel-3.11-cpu/variants"
echo new > "$folder/wheel-3.11-cpu/new-1-py3-none-any.whl"
echo a variant > "$folder/wheel-3.11-cpu/variants/new-1-py3-none-any-cpu.whl"
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def test_the_newest_artifact_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["fetch", "--target=3.11-cpu"])
    assert capsys.readouterr().out.splitlines() == [
        "torchwheels: fetched dist/new-1-py3-none-any.whl",
        "torchwheels: fetched dist/variants/new-1-py3-none-any-cpu.whl",
    ]
    cli.main(["fetch"])  # the same again
    assert (tmp_path / "dist" / "new-1-py3-none-any.whl").read_text() == "new\n"
    (tmp_path / "dist" / "new-1-py3-none-any.whl").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["fetch", "--name=wheels", "--repository=owner/name", "--run=7"])
    assert stopped.value.code == 4
    assert "has the name of a file with another content, dist/new-1-" in capsys.readouterr().err
    said = [line.partition(" --dir=")[0] for line in (tmp_path / "said").read_text().splitlines()]
    assert said == [
        "run download --pattern=wheel-3.11-cpu",
        "run download --pattern=wheel-*",
        "run download 7 --repo=owner/name --pattern=wheels",
    ]


def test_what_is_not_there_is_said() -> None:
    why = r"`gh` cannot fetch wheel-3\.12-cpu \(caf\ufffd: no valid artifacts found to download\): check the "
    with pytest.raises(SystemExit, match=why):
        cli.main(["fetch", "--target=3.12-cpu"])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--repository=name", "`--repository` names 'name', but OWNER/NAME is expected"),
        ("--repository=../x/y", "`--repository` names '../x/y', but OWNER/NAME is expected"),
        ("--repository=https://me:p@x/y/z", r"`--repository` names 'https://me:p@x/y/z', but "),
        ("--run=latest", "`--run` names 'latest', but the number of a run is expected"),
        ("--run=-1", "`--run` names '-1', but the number of a run is expected"),
    ],
)
def test_what_no_repository_or_run_can_be_is_not_asked_for(
    tmp_path: Path, word: str, said: str
) -> None:
    with pytest.raises(SystemExit, match=f"^torchwheels: {said}"):
        cli.main(["fetch", word])
    assert not (tmp_path / "said").exists()


def test_it_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        SystemExit, match=r"there is no `gh`, .*: install it, and run `gh auth login`"
    ):
        cli.main(["fetch"])
