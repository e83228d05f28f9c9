"""The workplace of a build: a folder, its environments and compilers, and the variables of its processes."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchwheels import environments
from torchwheels.build import toolchain
from torchwheels.environments import Environment
from torchwheels.errors import BuildError
from torchwheels.options import Project, Target, Values, project
from torchwheels.sources import Fetched
from torchwheels.system import cache

_SINCE_1980 = "315532800"  # the oldest time that a zip file can name

# Builds take the wrappers, whatever the folder in which Python's settings have a compiler, and link with nothing else
# that these settings say, such as where this machine's Python is. torch would call a compiler cache, which takes each
# build's wrappers for other compilers.
_COMPILERS = {
    "CC": "gcc", "CXX": "g++", "LDSHARED": "gcc -shared", "LDCXXSHARED": "g++ -shared",
    "TORCH_NO_COMPILER_WRAPPER": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Workplace:
    """A build of one target: its folder, environments and compilers."""

    project: Project
    target: Target
    work: Path
    base: Environment
    """Has the target's torch, and is kept for other builds."""
    environment: Environment
    """Stands upon it, and is this build's own."""
    compiler: toolchain.HostCompiler
    toolkit: toolchain.CudaToolkit | None
    source: Fetched
    fresh: bool

    @property
    def finished(self) -> Path:
        """Its wheel, once that is compiled."""
        (found,) = (self.work / "finished").glob("*.whl")
        return found

    @property
    def driver(self) -> Path:
        """What it links with as CUDA's driver."""
        return self.work / "driver" / "libcuda.so"

    @property
    def variables(self) -> Path:
        """The file with the variables of all that runs in it."""
        return self.work / "variables.json"

    @property
    def home(self) -> Path:
        """The home folder of all that runs in the build."""
        return self.work / "home"

    def failed(self, why: object) -> BuildError:
        """The error that says why."""
        return BuildError(f"{self.target.name} failed: {why}")


def variables_of(place: Workplace) -> dict[str, str]:
    """The variables of the build, and what they name: wrappers, links, what each Python runs first."""
    target, toolkit, work = place.target, place.toolkit, place.work
    prefixes = {
        Path(sys.base_prefix): "/python",
        place.base.folder: "/environment",
        place.environment.folder: "/environment",
        **({toolkit.home: "/cuda"} if toolkit else {}),
        place.home: "/tmp",
        work / "source": ".",
    }
    launcher = toolchain.find_launcher(place.base.folder / "bin", work)
    compilers = work / "compilers"
    commands = [
        toolchain.make_wrappers(compilers, place.compiler, prefixes, launcher),
        place.environment.folder / "bin",
        place.base.folder / "bin",
        *([toolkit.home / "bin"] if toolkit else []),
        *toolchain.common_path(work),
    ]
    usual = toolchain.MEMORY_PER_JOB["cuda" if target.cuda else "cpu"]
    jobs = str(toolchain.parallel_jobs(place.project.memory_per_job or usual))
    variables = {
        **toolchain.cache_variables(_compiler_cache(place), work),
        **environments.clean_variables(place.home),
        **_COMPILERS,
        "PATH": os.pathsep.join(map(str, commands)),
        "MAX_JOBS": jobs,
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", _SINCE_1980),
        "FORCE_CUDA": "1" if toolkit else "0",
    }
    if place.fresh:
        variables |= {"CCACHE_RECACHE": "1", "SCCACHE_RECACHE": "1"}
    if toolkit:
        variables |= toolchain.nvcc_variables(compilers, toolkit, launcher)
        named = place.project.architectures(target)
        variables |= {
            "CUDA_HOME": str(toolkit.home),
            "CUDAToolkit_ROOT": str(toolkit.home),
            "CUDAARCHS": ";".join(map(project.cmake_architecture, named)),
            "LIBRARY_PATH": f"{toolkit.home / 'lib64'}{os.pathsep}{place.driver.parent}",
        }
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    _write_start(place)
    return variables | place.project.variables(values_of(place, variables))


def _compiler_cache(place: Workplace) -> Path:
    """The project's own, wherever its sources lie: a copy of them finds there what was compiled of the first."""
    return cache.use(cache.place() / "compiled") / (place.source.name or "unnamed")


def _write_start(place: Workplace) -> None:
    """Has each Python of the build run start_of_python.py first."""
    name = "torchwheels_start"
    start = place.environment.site_packages / f"{name}.py"
    shutil.copyfile(toolchain.WRAPPERS / "python" / "start_of_python.py", start)
    cuda = place.target.cuda
    named = place.project.architectures(place.target)
    pretended = named[-1].removesuffix("+PTX") if cuda and named else None
    own = place.project.variables(project.values_of(place.target))
    settings = {
        "hide-toolkit": cuda is None,
        "pretend-gpu": pretended if place.project.pretend_gpu else None,
        "architectures": own["TORCH_CUDA_ARCH_LIST"],
        "gencode": [*project.gencode(named)] if cuda else [],
    }
    start.with_suffix(".json").write_text(json.dumps(settings))
    start.with_suffix(".pth").write_text(f"import {name}\n")


def values_of(place: Workplace, variables: Mapping[str, str]) -> Values:
    """What the options of the project are filled in with."""
    given = variables["MAX_JOBS"], variables.get("CUDA_HOME", "")
    return project.values_of(place.target, *given, place.source.origin)
