"""The steps of a build and of a test that containers.py has a container do, as the file of its job says.

A step answers in JSON on standard output; all that is printed meanwhile goes to standard error.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from torchwheels import build, environments
from torchwheels.build import toolchain
from torchwheels.errors import UserError
from torchwheels.options import of_table
from torchwheels.run import testing
from torchwheels.sources import Fetched
from torchwheels.system import DEBUG, processes

JOB, SOURCE, OPTIONS, DIST = "/job.json", "/source", "/options", "/dist"
TESTS, RESULTS = "/tmp/tests", "/tmp/results"  # podman makes / read only without capabilities


def main() -> None:
    """Does the step that the first argument names."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        code = 0
        try:
            said = {"result": _do(sys.argv[1], json.loads(Path(JOB).read_text()))}
        except (UserError, OSError, subprocess.CalledProcessError) as error:
            if os.environ.get(DEBUG):
                traceback.print_exc()
            code = error.code if isinstance(error, UserError) else 1
            said = {"error": processes.explained(error)}
        json.dump(said, answer)
    sys.exit(code)


def _do(step: str, job: dict[str, Any]) -> Any:
    file = Path(OPTIONS) / "options.toml"
    project = of_table(job["options"], "the job of the container", file, job["name"])
    target = project.releases.target(job["target"])
    if job["is_built"]:
        (target,) = project.targets_to_build([target])
    if step == "torch":
        environments.with_torch(target, (), any_cuda=True)
    elif step == "compilers":
        _, toolkit, compiler = toolchain.tools(project, target)
        return {"cxx": compiler.version, "nvcc": toolkit.version if toolkit else None}
    elif step == "install-tests":
        testing.install(project, target, Path("/", job["wheel"]), Path(TESTS))
    elif step == "test":
        Path(RESULTS).mkdir()
        given = Path(TESTS), Path(SOURCE), job["arguments"], job["require_gpu"], Path(RESULTS)
        return testing.run_here(project, target, *given)
    else:
        source = Fetched(Path(SOURCE), job["origin"], name=job["source"])
        if step == "requirements" and project.before_all:
            build.before_all(project.before_all, source.folder)
        build.build_wheel(project, target, source, Path(DIST), [step], job["fresh"])
    return None
