"""Finds the compilers of a build, and says how many jobs this machine can take."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from service import ServiceError
from service.matrix import Variant, load, release

MEMORY_PER_JOB = 512 * 2**20
"""Twice the largest peak measured of one compiler process of this project."""

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
"""Where pip puts its CUDA toolkit, for the Python that runs this."""


@dataclass(frozen=True)
class CudaToolkit:
    """A directory with nvcc in it, and the version that nvcc prints, e.g. `13.0.88`."""

    home: Path
    version: str

    @property
    def nvcc(self) -> Path:
        """The compiler itself."""
        return self.home / "bin" / "nvcc"

    @property
    def libraries(self) -> Path:
        """Where libcudart_static.a is: `lib64` in a system's toolkit, `lib` in pip's."""
        for name in ("lib64", "lib"):
            if (self.home / name / "libcudart_static.a").is_file():
                return self.home / name
        raise ServiceError(
            f"the CUDA toolkit at {self.home} has no libcudart_static.a in lib64 or lib: "
            "install its runtime development package (cuda-cudart-dev or the like)"
        )


def read_toolkit(home: Path) -> CudaToolkit:
    """Asks the nvcc in `home` for its version."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        raise ServiceError(
            f"CUDA_HOME is {home}, but there is no {nvcc}: "
            "set it to the directory of a CUDA toolkit, or unset it"
        )
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d+\.\d+(?:\.\d+)?)", output)
    if found is None:
        raise ServiceError(f"{nvcc} --version does not say which version it is: {output.strip()!r}")
    return CudaToolkit(home, found[1])


def pip_toolkit_requirement(variant: Variant) -> str | None:
    """What pip must install to get the variant's CUDA compiler, None where pip has none."""
    return load().toolkit_requirement.format(version=variant.toolkit) if variant.toolkit else None


def toolkit_of_cuda_home(
    variant: Variant, environ: Mapping[str, str] = os.environ
) -> CudaToolkit | None:
    """The toolkit that CUDA_HOME names, None where it is unset or of another major version."""
    home = environ.get("CUDA_HOME")
    if not home or variant.cuda is None:
        return None
    toolkit = read_toolkit(Path(home))
    return toolkit if release(toolkit.version)[0] == release(variant.cuda)[0] else None


def missing_requirements(
    variant: Variant, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """What pip must install before a build of `variant`; an error where no compiler can be had."""
    host_compiler()
    if variant.cuda is None or toolkit_of_cuda_home(variant, environ):
        return ()
    requirement = pip_toolkit_requirement(variant)
    if requirement is None:
        raise ServiceError(_no_toolkit(variant, environ))
    return (requirement,)


def find_cuda(
    variant: Variant,
    environ: Mapping[str, str] = os.environ,
    site_packages: Path = SITE_PACKAGES,
) -> CudaToolkit:
    """The CUDA toolkit for `variant`: CUDA_HOME's where it fits, else the one pip installed."""
    assert variant.cuda is not None
    major = release(variant.cuda)[0]
    toolkit = toolkit_of_cuda_home(variant, environ)
    pip_home = site_packages / "nvidia" / f"cu{major}"
    if toolkit is None and (pip_home / "bin" / "nvcc").is_file():
        toolkit = read_toolkit(pip_home)
    if toolkit is None:
        raise ServiceError(_no_toolkit(variant, environ))
    _check_architectures(toolkit, variant)
    print(
        f"extops: compiling {variant.name} with CUDA {toolkit.version} at {toolkit.home}",
        flush=True,
    )
    if release(toolkit.version)[:2] != release(variant.cuda):
        print(
            f"extops: note: {variant.name} names CUDA {variant.cuda}, another CUDA {major} serves",
            flush=True,
        )
    return toolkit


def _no_toolkit(variant: Variant, environ: Mapping[str, str]) -> str:
    assert variant.cuda is not None
    major = release(variant.cuda)[0]
    home = environ.get("CUDA_HOME")
    found = (
        f"CUDA_HOME ({home}) is of CUDA {read_toolkit(Path(home)).version}"
        if home
        else "CUDA_HOME is not set"
    )
    ways = [f"set CUDA_HOME to a CUDA {major} toolkit ({variant.cuda} or newer)"]
    requirement = pip_toolkit_requirement(variant)
    if requirement:
        ways.append(f"run `pip install '{requirement}'`")
    ways.append(f"build in the image {variant.image} with Docker")
    return f"{variant.name} needs a CUDA {major} compiler, and {found}: {', or '.join(ways)}"


def _check_architectures(toolkit: CudaToolkit, variant: Variant) -> None:
    output = subprocess.run(
        [toolkit.nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True
    ).stdout
    known = set(output.split())
    wanted = [architecture.removesuffix("+PTX") for architecture in variant.architectures]
    missing = [number for number in wanted if "sm_" + number.replace(".", "") not in known]
    if missing:
        raise ServiceError(
            f"CUDA {toolkit.version} at {toolkit.home} cannot compile for the GPU architectures "
            f"{', '.join(missing)} of {variant.name}: set CUDA_HOME to CUDA {variant.cuda} or newer, "
            f"or build in the image {variant.image} with Docker"
        )


def find_compute_sanitizer(
    environ: Mapping[str, str] = os.environ, site_packages: Path = SITE_PACKAGES
) -> Path:
    """NVIDIA's checker of memory accesses and races: the system's, or the one pip installed."""
    from_pip = sorted(site_packages.glob("nvidia/cu*/bin/compute-sanitizer"))
    found = [*_systems_compute_sanitizer(environ), *from_pip]
    if not found:
        raise ServiceError(
            "there is no compute-sanitizer in CUDA_HOME or on PATH: set CUDA_HOME to the directory "
            f"of a CUDA toolkit, or run `pip install {' '.join(load().tools['sanitizer'])}`"
        )
    return found[0]


def missing_sanitizer(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What pip must install before `find_compute_sanitizer`."""
    return () if _systems_compute_sanitizer(environ) else load().tools["sanitizer"]


def _systems_compute_sanitizer(environ: Mapping[str, str]) -> list[Path]:
    folders = [f"{environ['CUDA_HOME']}/bin"] if environ.get("CUDA_HOME") else []
    path = os.pathsep.join([*folders, environ.get("PATH", "")])
    found = shutil.which("compute-sanitizer", path=path)
    return [Path(found)] if found else []


def host_compiler() -> str:
    """The path of g++."""
    found = shutil.which("g++")
    if found is None:
        raise ServiceError(
            "there is no C++ compiler g++ on PATH: install one, e.g. `apt-get install g++`"
        )
    return found


def parallel_jobs(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """How many compilers to run at once: MAX_JOBS, or what the cores and the memory allow."""
    asked = environ.get("MAX_JOBS")
    if asked:
        if not asked.isdigit() or int(asked) == 0:
            raise ServiceError(f"MAX_JOBS is {asked!r}, but a number of jobs from 1 is expected")
        return int(asked)
    cores = min([float(len(os.sched_getaffinity(0))), *_cpu_quotas(root)])
    memory = min([_available_memory(root), *_memory_limits(root)])
    return max(1, min(int(cores), memory // MEMORY_PER_JOB))


def _available_memory(root: Path) -> int:
    found = re.search(
        r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE
    )
    assert found is not None
    return int(found[1]) * 1024


def _cgroup_values(root: Path, controller: str, *names: str) -> Iterator[list[str]]:
    """The words of the files `names` in this process's cgroup and those above, of both versions.

    A container often sees its own cgroup mounted at the top, under another path than
    /proc/self/cgroup says: walking up to the mount point finds it there.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        inside = mount / path.lstrip("/")
        for folder in (inside, *inside.parents):
            if not folder.is_relative_to(mount):
                break
            files = [folder / name for name in names]
            if all(file.is_file() for file in files):
                yield [word for file in files for word in file.read_text().split()]


def _cpu_quotas(root: Path) -> list[float]:
    values = [
        *_cgroup_values(root, "cpu", "cpu.max"),
        *_cgroup_values(root, "cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
    ]
    return [int(quota) / int(period) for quota, period in values if quota not in ("max", "-1")]


def _memory_limits(root: Path) -> list[int]:
    values = [
        *_cgroup_values(root, "memory", "memory.max"),
        *_cgroup_values(root, "memory", "memory.limit_in_bytes"),
    ]
    return [int(limit) for (limit,) in values if limit != "max"]
