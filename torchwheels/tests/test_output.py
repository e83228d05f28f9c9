"""What is shown of a build that fails, and how a failure ends."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchwheels import build, cli
from torchwheels.errors import BuildError, RefusedError, UserError
from torchwheels.run import testing
from torchwheels.system.output import DEBUG, Shortened

SOURCES = str(Path(cli.__file__).parents[1])
COMMAND = "[1/2] /usr/bin/g++ -MMD " + "-I/some/where " * 200
ERROR = "x.cpp:1:1: error: no match for " + "std::vector<int>" * 200
PRINTED = f"""\
{COMMAND}
{ERROR}
ninja: build stopped: subcommand failed.
Traceback (most recent call last):
  File "/env/torch/utils/cpp_extension.py", line 2899, in _run_ninja_build
    subprocess.run(
    ^^^^^^^^^^^^^^^
subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/env/pyproject_hooks/_in_process.py", line 389, in <module>
    main()
  File "/source/setup.py", line 10, in <module>
    setup()
  File "/env/setuptools/__init__.py", line 115, in setup
    return distutils.core.setup(**attrs)
RuntimeError: Error compiling objects for extension
"""
SHOWN = f"""\
{COMMAND[:300].rstrip()} ... (--debug shows all)
{ERROR}
ninja: build stopped: subcommand failed.
subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.


  File "/source/setup.py", line 10, in <module>
    setup()
RuntimeError: Error compiling objects for extension
"""


def test_end_of_a_failed_build_is_the_compilers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        return "".join(map(Shortened(Path("/source")), PRINTED.splitlines(keepends=True)))

    assert shown() == SHOWN
    monkeypatch.setenv(DEBUG, "1")
    assert shown() == PRINTED


def test_debug_shows_where_an_error_was_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEBUG, "")
    command = ["build", str(tmp_path / "none"), "--target=3.11-cpu", "--backend=local"]
    with pytest.raises(SystemExit, match="torchwheels: there is no "):
        cli.main(command)
    with pytest.raises(UserError, match="there is no "):
        cli.main([*command, "--debug"])


@pytest.mark.parametrize("command", ["build", "test", "reproduce"])
def test_a_backend_that_there_is_not(
    command: str, own_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHWHEELS_BACKEND", "foo")
    monkeypatch.setattr(testing, "find_wheel", lambda *_: Path("x.whl"))
    said = "^torchwheels: TORCHWHEELS_BACKEND is 'foo': docker, local, auto is expected$"
    with pytest.raises(SystemExit, match=said):
        cli.main([command, str(own_project), "--target=3.11-cpu"])


def test_a_wheel_that_there_is_not_is_not_tested(own_project: Path) -> None:
    command = ["test", str(own_project), "--target=3.11-cpu", "--backend=local"]
    with pytest.raises(
        SystemExit, match=r"^torchwheels: there is no wheel x\.whl: `--wheel` names "
    ):
        cli.main([*command, "--wheel=x.whl"])


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["audit", "none.whl"], UserError),
        (["index", "--dist=none"], UserError),
        (["targets", "none"], UserError),
        (["targets", "--config=none.toml"], UserError),
    ],
)
def test_each_command_shows_where_an_error_was_raised(
    command: list[str], kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DEBUG, "")
    with pytest.raises(SystemExit):
        cli.main(command)
    with pytest.raises(kind):
        cli.main([*command, "--debug"])


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_leads_nowhere(tmp_path: Path, closed: str) -> None:
    """Also for what is started: no file takes its place."""
    code = "from torchwheels import cli; cli.main(['env']); import os; os.system('echo; echo >&2')"
    variables = {**os.environ, "TORCHWHEELS_CACHE": str(tmp_path), "PYTHONPATH": SOURCES}
    command = f'"$0" -c "{code}" {closed} || exit 7'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], env=variables, capture_output=True, text=True
    )
    out = (
        "" if ">&- " in f"{closed} ".replace("2>&-", "") else f"the cache is {tmp_path}: 0.0 GB\n\n"
    )
    assert (done.returncode, done.stdout) == (0, out)
    assert done.stderr == ("" if "2>&-" in closed else "\n")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "cache", "named"),
    [
        (["env"], "", "~/.cache/torchwheels"),  # of a user in a container whom it does not know
        (["env"], "~nobody-of-that-name/x", "~nobody-of-that-name/x"),
        (["build", "~nobody-of-that-name/y", "--backend=local"], "/", "~nobody-of-that-name/y"),
    ],
)
def test_a_home_that_there_is_not(
    words: list[str], cache: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHWHEELS_CACHE", cache)
    said = f"^torchwheels: {named} is in a home folder that there is not: set HOME, or write the whole path$"
    with pytest.raises(SystemExit, match=said):
        cli.main(words)


def test_a_path_without_any_folder_of_commands(
    own_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some services and `env -i` have it."""
    (own_project / "torchwheels.toml").write_text("before-all = 'false'")
    monkeypatch.delenv("PATH")
    command = ["build", str(own_project), "--target=3.11-cpu", "--backend=local"]
    config = f"--config={own_project}/torchwheels.toml"
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, config, f"--dist={tmp_path}/dist"])
    assert ended.value.code == BuildError.code


@pytest.mark.parametrize(
    "words",
    [
        ["build", ""],
        ["build", "--dist="],
        ["merge", ""],
        ["index", "--site", ""],
        ["audit", "--torch="],
    ],
)
def test_an_empty_argument_is_no_folder(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would be the one at hand: of a variable of the shell, say, that is not set."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert (
        "error: an argument is empty: name something, or leave it out\n" in capsys.readouterr().err
    )
    assert not [*tmp_path.iterdir()]


def test_ctrl_c_before_the_command_line_is_there(tmp_path: Path) -> None:
    (tmp_path / "unearth.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCES}"}
    # These tests may run in the background of a shell, which has its processes ignore Ctrl-C.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "torchwheels", "--version"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_debug_shows_where_the_system_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/none")

    monkeypatch.setenv(DEBUG, "")
    monkeypatch.setattr(cli.cache, "lines", fail)
    with pytest.raises(SystemExit, match=r"^torchwheels: No such file or directory: /none$"):
        cli.main(["env"])
    with pytest.raises(FileNotFoundError):
        cli.main(["env", "--debug"])


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([BuildError("x")], 3),
        ([RefusedError("x")], 4),
        ([BuildError("x"), BuildError("x")], 3),
        ([BuildError("x"), RefusedError("x")], 1),
    ],
)
def test_exit_code_is_of_the_kind_of_failure(
    errors: list[UserError],
    code: int,
    own_project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several kinds it is that of any error."""
    left = iter(errors)

    def fail(*_: object) -> None:
        raise next(left)

    monkeypatch.setattr(build, "build_wheel", fail)
    targets = [f"--target=3.1{place}-cpu" for place in range(len(errors))]
    with pytest.raises(SystemExit) as ended:
        cli.main(["build", str(own_project), *targets, "--backend=local", f"--dist={tmp_path}"])
    assert ended.value.code == (
        "torchwheels: 2 of 2 targets failed: 3.10-cpu, 3.11-cpu" if code == 1 else code
    )
