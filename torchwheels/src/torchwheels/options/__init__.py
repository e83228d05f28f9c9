"""What is wanted: the options of a project, the table of torch releases, and where packages come from."""

from torchwheels.options import indexes, project, releases, schema
from torchwheels.options.project import Expectation, Project, Values, of_table, preset
from torchwheels.options.releases import RELEASE, Releases, Target, admitted, minor, numbers, sm

__all__ = [
    "RELEASE", "Expectation", "Project", "Releases", "Target", "Values", "admitted", "indexes", "minor",
    "numbers", "of_table", "preset", "project", "releases", "schema", "sm",
]  # fmt: skip
