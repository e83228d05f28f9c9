"""What a project says in [tool.torchwheels]."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchwheels.errors import UserError
from torchwheels.options import project


def read(folder: Path, text: str, name: str = "options.toml") -> project.Project:
    file = folder / name
    for patch in ("all.patch", "new.patch"):
        (folder / patch).touch()
    file.write_text(text)
    return project.load(file)


def test_options_of_a_file_outside(tmp_path: Path) -> None:
    options = read(
        tmp_path,
        'targets = ["3.11-*"]\npretend-gpu = true\nmemory-per-job = 4\nimport = ["a.b"]\n'
        'environment = { TCNN_CUDA_ARCHITECTURES = "{sm}" }\n'
        '[tests]\npaths = ["test"]\ncommand = "pytest -x"\n',
    )
    assert options.targets == ("3.11-*",)
    assert options.pretend_gpu
    assert options.memory_per_job == 4.0
    assert options.imports == ("a.b",)
    assert options.environment == {"TCNN_CUDA_ARCHITECTURES": "{sm}"}
    assert options.tests == project.Tests(paths=("test",), command="pytest -x")
    assert options.file == tmp_path / "options.toml"


def test_table_in_pyproject(tmp_path: Path) -> None:
    text = '[project]\nname = "x"\n[tool.torchwheels]\nsubdirectory = "python"\n'
    assert read(tmp_path, text, "pyproject.toml").subdirectory == "python"
    assert read(tmp_path, '[project]\nname = "x"\n', "pyproject.toml").subdirectory == ""


def test_an_option_is_still_known_by_its_earlier_name(tmp_path: Path) -> None:
    assert read(tmp_path, 'cells = ["3.11-*"]').targets == ("3.11-*",)


OVERRIDDEN = """
environment = { ALL = "all", BOTH = "{sm}" }
patches = ["all.patch"]
tests = { paths = ["tests"], minutes = 5 }

[[overrides]]
select = "*-cu13*"
environment = { BOTH = "{cmake}", NEW = "new" }
patches = ["new.patch"]
tests = { minutes = 9 }

[[overrides]]
select = ["3.12-*", "3.13-*"]
environment = { NEW = "newer" }
pretend-gpu = true
"""


def test_overrides_replace_options_of_the_targets_that_they_select(tmp_path: Path) -> None:
    options = read(tmp_path, OVERRIDDEN)

    def of(name: str) -> tuple[object, ...]:
        target = options.releases.target(name)
        found = options.of_target(target)
        assert found.file == options.file
        assert found.of_target(target) == found
        return found.environment, found.patches, found.tests, found.pretend_gpu

    tests = project.Tests(paths=("tests",), minutes=5)
    own, new = {"ALL": "all", "BOTH": "{sm}"}, {"ALL": "all", "BOTH": "{cmake}", "NEW": "new"}
    assert of("3.11-cpu") == (own, ("all.patch",), tests, False)
    newer_tests = project.Tests(paths=("tests",), minutes=9)
    assert of("3.11-cu130") == (new, ("new.patch",), newer_tests, False)
    assert of("3.12-cu130") == ({**new, "NEW": "newer"}, ("new.patch",), newer_tests, True)


def test_a_preset_stands_below_all_that_the_project_says(tmp_path: Path) -> None:
    options = read(tmp_path, OVERRIDDEN)
    preset = {
        "environment": {"ALL": "preset", "PRESET": "preset"},
        "patches": ["preset.patch"],
        "overrides": [{"select": "*-cpu", "environment": {"BOTH": "preset", "CPU": "preset"}}],
        "network": True,
    }
    found = options.of_target(options.releases.target("3.11-cpu"), preset)
    environment = {"ALL": "all", "BOTH": "{sm}", "CPU": "preset", "PRESET": "preset"}
    assert (found.environment, found.patches, found.network) == (environment, ("all.patch",), True)


def test_presets_are_options() -> None:
    target = project.Project().releases.target("3.11-cu130")
    for name in ("bitsandbytes", "mamba-ssm", "natten", "torch-harmonics", "warp-rnnt"):
        found = project.Project().of_target(target, project.preset(name))
        assert found != project.Project(), name
        assert found.variables(project.values_of(target))
    cpu = project.Project().releases.target("3.11-cpu")
    assert project.Project().of_target(cpu, project.preset("torch-harmonics")) == project.Project()


def test_zero_is_no_limit(tmp_path: Path) -> None:
    """So an override can take one away, and the defaults are values that may be written."""
    file = tmp_path / "options.toml"
    file.write_text(
        "time-limit = 5\nmemory-per-job = 0\nsize-budget = 0\ntests = { memory = 0 }\n"
        '[[overrides]]\nselect = "*"\ntime-limit = 0\n'
    )
    options = project.load(file)
    assert options.time_limit == 5
    of_target = options.of_target(options.releases.target("3.11-cpu"))
    assert of_target.time_limit == of_target.memory_per_job == of_target.size_budget == 0


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{architectures}", "8.0;9.0+PTX"),
        ("{architectures: }", "8.0 9.0+PTX"),
        ("{capabilities}", "8.0;9.0"),
        ("{sm}", "80;90"),
        ("{sm:,}", "80,90"),
        ("{sm_names}", "sm_80;sm_90"),
        ("{cmake}", "80-real;90"),
        (
            "{gencode: }",
            "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 "
            "-gencode=arch=compute_90,code=compute_90",
        ),
    ],
)
def test_architectures_are_filled_in_as_projects_want_them(
    template: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHWHEELS_ARCHITECTURES", "8.0 9.0+PTX")
    options = project.Project(environment={"OWN": template}, config_settings={"own": [template]})
    target = options.releases.target("3.11-cu130")
    values = project.values_of(target)
    assert options.variables(values)["OWN"] == text
    assert options.backend_settings(values) == {"own": [text]}


def test_architectures_of_one_gpu_and_of_a_family_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHWHEELS_ARCHITECTURES", "9.0a 10.0a 10.0f 12.0f+PTX")
    target = project.Project().releases.target("3.11-cu130")
    assert target.architectures == ("9.0a", "10.0a", "10.0f", "12.0f+PTX")
    options = project.Project(environment={"OWN": "{sm} {cmake}"})
    said = "90a;100a;100f;120f 90a-real;100a-real;100f-real;120f"
    assert options.variables(project.values_of(target))["OWN"] == said
    monkeypatch.setenv("TORCHWHEELS_ARCHITECTURES", "sm_90")
    with pytest.raises(UserError, match=r"names 'sm_90', .* such as `8\.0 9\.0a 12\.0\+PTX`"):
        target.architectures  # noqa: B018


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "overrides = 1",
            "overrides is 1: expected `array`, got `int`",
        ),
        (
            "[[overrides]]\nnetwork = true",
            "overrides lacks the option 'select'",
        ),
        (
            "[[overrides]]\nselect = [1]",
            "overrides: select is 1: expected `str`, got `int`",
        ),
        (
            "[[overrides]]\nselect = '*-cu31*'",
            "overrides select '*-cu31*', but no target is named so (",
        ),
        ("[[overrides]]\nselect = 'x'\nsource = 'x'", "overrides has no option 'source': did you"),
        (
            "[[overrides]]\nselect = 'x'\ntests = 1",
            "overrides: tests is 1: expected `object`, got `int`",
        ),
        ("pretend_gpu = true", "has no option 'pretend_gpu': did you mean 'pretend-gpu'?"),
        ("folder = 'x'", "has no option 'folder'"),
        ('"" = 1', "has no option '': did you mean"),
        ('"\\n" = 1', "has no option '\\n': did you mean"),
        (
            "[[releases]]\nversion = ''\npythons = ['3.12']",
            "releases: version has '', but that of a torch",
        ),
        ("[tests]\npath = []", "tests has no option 'path': did you mean 'paths'?"),
        ("targets = '3.11-cpu'", "targets is '3.11-cpu': expected `array`, got `str`"),
        ("pretend-gpu = 'yes'", "pretend-gpu is 'yes': expected `bool`, got `str`"),
        ("size-budget = -1", "size-budget is -1: expected `float` >= 0.0"),
        ("memory-per-job = true", "memory-per-job is True: expected `float`, got `bool`"),
        ("tests = 'all'", "tests is 'all': expected `object`, got `str`"),
        ("x =", "is not TOML"),
        ("build-requires = ['foo bar baz']", "build-requires has 'foo bar baz', but a requirement"),
        (
            "stable = 'latest'",
            "stable has 'latest', but the version of a torch, such as '2.13.0', is expected",
        ),
        ("torch = '>>2'", "torch has '>>2', but versions such as '>=2.10' are expected"),
        ("yanked = {'0.1' = true}", "yanked is {'0.1': True}: expected `str`, got `bool`"),
        ("torch = '>=2.10,<2.5'", "torch has '>=2.10,<2.5', but versions such as '>=2.10' are"),
        (
            "yanked = {last = 'broken'}",
            "yanked has 'last', but a version such as '0.1.9' is expected",
        ),
        ("import = ['a b']", "import has 'a b', but the name of a module is expected"),
        ("import = ['']", "import has '', but the name of a module is expected"),
        ("targets = ['']", "targets: there is no target '': a target is a Python and a CUDA"),
        (
            "[[releases]]\nversion = '2.99.1'\npythons = ['3.12']\n"
            "[[releases]]\nversion = '2.99.0'\npythons = ['3.11', '3.12']",
            "releases has torch 2.99.1 and 2.99.0 for Python 3.12, and a target is named by their 2.99: leave one",
        ),
        (
            "small = ['3.11-cpu', '3.12-cpu']\ntargets = ['3.11-*']",
            "small names 3.12-cpu, which is none of the project's targets",
        ),
        (
            "small = ['3.11-cpux']",
            "small: there is no target '3.11-cpux': a target is a Python and",
        ),
        (
            "system-packages = ['x; y']",
            "system-packages has 'x; y', but a package of apt is expected",
        ),
        (
            "subdirectory = '/etc'",
            "subdirectory has '/etc', but a folder in the sources is expected",
        ),
        ("subdirectory = 'a/../..'", "subdirectory has 'a/../..', but a folder in the sources is"),
        (
            "patches = ['none.patch']",
            "patches has 'none.patch', but there is no such file beside it",
        ),
        ("time-limit = inf", "time-limit is inf: expected `float` < 1000000.0"),
        ("time-limit = 1e300", "time-limit is 1e+300: expected `float` < 1000000.0"),
        ("size-budget = nan", "size-budget is nan: expected `float` "),
        ("environment = {X = 1}", "environment is {'X': 1}: expected `str`, got `int`"),
        (
            "environment = {'A=B' = 'x'}",
            "environment has 'A=B', but the name of a variable is expected",
        ),
        (
            "environment = {X = '{jobs.x}'}",
            "environment sets X to '{jobs.x}': it may hold {label}, ",
        ),
        (
            "environment = {X = '{sm.__class__}'}",
            "environment sets X to '{sm.__class__}': it may hold {label}, ",
        ),
        (
            "environment = {X = '{jobs:>9999999999}'}",
            "environment sets X to '{jobs:>9999999999}': it may hold {label}, ",
        ),
        ("environment = {X = '{'}", "environment sets X to '{': it may hold {label}, "),
        (
            "environment = {TORCH_CUDA_ARCH_LIST = 'Ampere'}",
            "TORCH_CUDA_ARCH_LIST has 'Ampere', but a compute capability such as '9.0' is expected",
        ),
        (
            "config-settings = {x = ['{jobs[0].x}']}",
            "config-settings sets x to '{jobs[0].x}': it may",
        ),
        ("config-settings = {x = [1]}", "config-settings is {'x': [1]}: expected `str`, got `int`"),
        ("config-settings = {x = 1}", "config-settings is {'x': 1}: expected `"),
        ("before-build = '{nobody}'", "before-build is set to '{nobody}': it may hold {label}, "),
        (
            "repair = 'cp {wheel} {x} {dest}'",
            "repair is set to 'cp {wheel} {x} {dest}': it may hold {wheel}, ",
        ),
        (
            "repair = 'cp {wheels} {dest}'",
            "repair has 'cp {wheels} {dest}', but a command with {wheel} and {dest} is expected",
        ),
        ("import = ['class']", "import has 'class', but the name of a module is expected"),
        ("environment = {PATH = 'x'}", "environment sets PATH, which is the build's own: leave it"),
        (
            "environment = {X = '{sm!r:>999}'}",
            "environment sets X to '{sm!r:>999}': it may hold {label}, ",
        ),
        (
            "stable = '2.13.0+cpu'",
            "stable has '2.13.0+cpu', but the version of a torch, such as '2.13.0', is",
        ),
        ("[tests]\nrequires = ['-']", "tests: requires has '-', but a requirement such as"),
        (
            "[tests]\nrequires = ['x>=1/2']",
            "tests: requires has 'x>=1/2', but a requirement such as",
        ),
        (
            "[tests]\nrequires = ['-r x.txt']",
            "tests: requires has '-r x.txt', but a requirement such as",
        ),
        (
            "[[releases]]\nversion = '3.0'\npythons = ['3.12']",
            "releases: version has '3.0', but that of a torch, such as",
        ),
        (
            "[[releases]]\nversion = '2.99+cu130'\npythons = ['3.12']",
            "releases: torch 2.99+cu130 is not of CUDA '': correct `cuda`",
        ),
        (
            "[[releases]]\nversion = '2.99'\npythons = ['3.12']\nimage = 'x'",
            "releases has `image` or `architectures` for CUDA '', other than what is known by then: ",
        ),
        (
            "[[releases]]\nversion = '2.99+cpu'\npythons = ['3.12']\ncuda = '13.0'",
            "releases: torch 2.99+cpu is not of CUDA '13.0': correct `cuda`",
        ),
        (
            "[[releases]]\nversion = '2.99'\npythons = ['3.12']\ncuda = '13.0'\nimage = 'x'",
            "releases has `image` or `architectures` for CUDA '13.0', other than what is known by then: ",
        ),
        ("[tests]\ncommand = ' # none'", "tests: command has ' # none', but a command is expected"),
        (
            "[tests]\ncommand = 'echo \"x'",
            "tests: command has 'echo \"x', but a command is expected",
        ),
        (
            "[tests]\nrequires = ['a b']",
            "tests: requires has 'a b', but a requirement such as 'numpy>=2'",
        ),
        (
            "[tests]\npaths = ['../x']",
            "tests: paths has '../x', but a path in the sources is expected",
        ),
        ("[tests]\npaths = ['']", "tests: paths has '', but a path in the sources is expected"),
        ("[[overrides]]\nselect = '*'\ntorch = '1'", "overrides has no option 'torch'"),
        (
            "[[overrides]]\nselect = '*'\nenvironment = {X = '{x}'}",
            "overrides: environment sets X to",
        ),
        (
            "[[releases]]\nversion = '2.99'\npythons = ['three']",
            "pythons has 'three', but a Python",
        ),
        (
            "[[releases]]\nversion = '2.99'\npythons = ['3.12']\ncuda = 'cu130'",
            "releases: cuda has 'cu130', but a version such as '13.0' is expected",
        ),
        (
            "[[releases]]\nversion = '2.99'\npythons = ['3.12']\nindex = 'nightly'",
            "releases: index has 'nightly', but an address such as 'https://example.org/nightly' is expected",
        ),
        (
            r'before-all = "make\u0000"',
            r"before-all has 'make\x00', but a text without NUL is expected: leave the character out",
        ),
        (r'environment = { A = "\u0000" }', r"environment has '\x00', but a text without NUL is"),
        (r'config-settings = { A = ["b", "\u0000"] }', r"config-settings has '\x00', but a text"),
        ('[tests]\nrequire-gpu = "\\u0000"', r"tests: require-gpu has '\x00', but a text"),
    ],
)
def test_errors_name_the_option(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[tool]\ntorchwheels = 3", "[tool.torchwheels] is 3: expected `object`, got `int`"),
        (b"tool = 3", "tool is 3, but a table is expected: write [tool], or leave it out"),
        (b"project.name = 'a b'", "[project] has the name 'a b', but a name of letters, digits, "),
        (b"project = ['x']", "project is ['x'], but a table is expected: write [project], or"),
        (b"x = " + b"[" * 9999, "is not TOML: it has too many tables in one another"),
        (b"\xff\xfe", "is not TOML: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_errors_of_a_pyproject_name_what_is_wrong(
    tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / "pyproject.toml").write_bytes(data)
    with pytest.raises(UserError) as error:
        project.load(tmp_path / "pyproject.toml")
    assert message in str(error.value)


def test_a_pipe_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        UserError, match=r"pipe cannot be read \(No such file, or it is a pipe\): `--config` n"
    ):
        project.load(tmp_path / "pipe")


def test_error_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"none\.toml cannot be read \(No such .*: `--config` names"
    ):
        project.load(tmp_path / "none.toml")


def test_a_stable_torch_that_there_is_not(tmp_path: Path) -> None:
    """Not where the options are read: of a wheel that is there, they may be of another day."""
    options = read(tmp_path, "stable = '2.99'\ntargets = ['3.11-cpu']")
    with pytest.raises(UserError, match=r"^stable: torch 2\.99 is not known; the releases that"):
        options.targets_to_build(options.chosen_targets())
