"""What editors are told of the options is what the tool takes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from torchwheels import cli
from torchwheels.errors import UserError
from torchwheels.options import project

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "text",
    [
        (ROOT / "pyproject.toml").read_text(),
        (ROOT / "examples" / "own_project" / "pyproject.toml").read_text(),
        "[tool.torchwheels]\n[[tool.torchwheels.overrides]]\nselect = '*-cu13*'\nnetwork = true",
        "[tool.torchwheels]\nconfig-settings = { one = '1', more = ['2', '3'] }",
        "[tool.torchwheels]\nno-such = 1",
        "[tool.torchwheels]\ntargets = 'all'",
        "[tool.torchwheels]\nsize-budget = -1",
        "[tool.torchwheels]\nnetwork = 'yes'",
        "[tool.torchwheels.tests]\npath = ['tests']",
        "[[tool.torchwheels.overrides]]\nselect = 'x'\nstable = '2.13.0'",
        "[[tool.torchwheels.releases]]\nversions = '2.16'",
    ],
)
def test_schema_takes_what_the_tool_takes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["schema"])
    schema = json.loads(capsys.readouterr().out)
    table = msgspec.toml.decode(text)["tool"]["torchwheels"]
    try:
        project.of_table(table, "the table")
    except UserError:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(table, schema)
    else:
        jsonschema.validate(table, schema)


def test_schema_explains_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["schema"])
    options = json.loads(capsys.readouterr().out)["properties"]
    assert options["subdirectory"] == {
        "type": "string",
        "default": "",
        "description": "The folder of the sources in which the project is.",
    }
    assert [name for name, said in options.items() if not said["description"]] == ["tests"]
