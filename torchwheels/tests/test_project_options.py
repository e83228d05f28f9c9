"""What a project says in [tool.torchwheels]."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwheels import project
from torchwheels.errors import UserError


def read(folder: Path, text: str, name: str = "options.toml") -> project.Project:
    file = folder / name
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pretend_gpu = true", "has no option 'pretend_gpu': did you mean 'pretend-gpu'?"),
        ("folder = 'x'", "has no option 'folder'"),
        ("[tests]\npath = []", "tests has no option 'path': did you mean 'paths'?"),
        ("targets = '3.11-cpu'", "targets is '3.11-cpu', but a list of texts is expected"),
        ("pretend-gpu = 'yes'", "pretend-gpu is 'yes', but true or false is expected"),
        ("size-budget = -1", "size-budget is -1, but a positive number is expected"),
        ("memory-per-job = true", "memory-per-job is True, but a positive number is expected"),
        ("tests = 'all'", "tests is 'all', but a table is expected"),
        ("x =", "is not TOML"),
    ],
)
def test_errors_name_the_option(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, text)
    assert message in str(error.value)


def test_error_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*none\.toml: `--config` names a TOML file"):
        project.load(tmp_path / "none.toml")
