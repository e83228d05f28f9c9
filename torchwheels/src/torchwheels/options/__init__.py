"""What is wanted: the options of a project, the table of torch releases, and where packages come from."""

from torchwheels.options import indexes, project, releases, schema
from torchwheels.options.project import (
    Expectation,
    Project,
    Values,
    cmake_architecture,
    expectation_of,
    filled,
    gencode,
    of_table,
    preset,
)
from torchwheels.options.releases import (
    RELEASE,
    Releases,
    Target,
    admitted,
    minor,
    numbers,
    openmp,
    recorded,
    runs_on,
    sm,
)

__all__ = [
    "RELEASE", "Expectation", "Project", "Releases", "Target", "Values", "admitted", "cmake_architecture",
    "expectation_of", "filled", "gencode", "indexes", "minor", "numbers", "of_table", "openmp",
    "preset", "project", "recorded", "releases", "runs_on", "schema", "sm",
]  # fmt: skip
