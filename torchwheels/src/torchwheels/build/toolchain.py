"""Finds the compilers of a build, and says how many of them this machine can run at once."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchwheels import environments
from torchwheels.build import stubs
from torchwheels.environments import Environment
from torchwheels.errors import UserError
from torchwheels.options import Project, Target, numbers, releases, sm
from torchwheels.system import Machine, processes, sha256
from torchwheels.wheel import DRIVER

MEMORY_PER_JOB = {"cpu": 1.5, "cuda": 3.1}
"""GB: the largest compiler processes measured on a file that includes `torch/extension.h`."""

WRAPPERS = Path(__file__).with_name("wrappers")
"""Programs of a build's environment, rather than modules of this one."""
LINKS = "links"
"""Beside the wrappers, where each leaves what it links."""
_COMPILER = re.compile(r"(c89-|c99-)?(cc|gcc|c\+\+|g\+\+|clang|clang\+\+)(-[\d.]+)?")
_LONGEST_SOCKET = 108  # of sockaddr_un
_COMMON_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


@dataclass(frozen=True)
class CudaToolkit:
    """A folder with nvcc in it, and the version that nvcc prints, e.g. `13.0.88`."""

    home: Path
    version: str


def read_toolkit(home: Path) -> CudaToolkit:
    """Asks the nvcc in `home` for its version."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        way_out = "set it to the folder of a CUDA toolkit, or unset it"
        raise UserError(f"CUDA_HOME is {home}, but there is no {nvcc}: {way_out}")
    output = processes.ask([nvcc, "--version"], check=True).stdout
    (version,) = re.findall(r"\bV(\d+\.\d+(?:\.\d+)?)", output)
    return CudaToolkit(home, version)


def pip_toolkit(target: Target) -> tuple[str, ...]:
    """What pip must install for the target's CUDA compiler: nothing if CUDA_HOME has one."""
    if target.cuda is None or toolkit_of_cuda_home(target):
        return ()
    major = numbers(target.cuda.version)[0]
    if major >= 13:  # pip's wheels of CUDA 12 hold no nvcc
        return (releases.load().toolkit,)
    raise UserError(
        f"{target.name} needs a CUDA {major} compiler, and CUDA_HOME ({os.environ.get('CUDA_HOME')}) names none: set "
        f"it to a CUDA {major} toolkit ({target.cuda.version} or newer), or build in the image "
        f"{target.image} with `--backend docker`"
    )


def toolkit_of_cuda_home(target: Target) -> CudaToolkit | None:
    """The toolkit that CUDA_HOME names; None where it is unset or of another major version."""
    home = os.environ.get("CUDA_HOME")
    if not home or target.cuda is None:
        return None
    toolkit = read_toolkit(Path(home))
    same = numbers(toolkit.version)[0] == numbers(target.cuda.version)[0]
    return toolkit if same else None


def find_toolkit(target: Target, site_packages: Path) -> CudaToolkit | None:
    """The CUDA toolkit of the target: CUDA_HOME's where it fits, else pip's; None in a CPU target."""
    if target.cuda is None:
        return None
    home = site_packages / "nvidia" / f"cu{numbers(target.cuda.version)[0]}"
    toolkit = toolkit_of_cuda_home(target) or read_toolkit(home)
    nvcc = f"{toolkit.home}/bin/nvcc"
    known = processes.ask([nvcc, "--list-gpu-code"], check=True).stdout.split()
    # Where nvcc knows a GPU, it knows the code for it alone (9.0a) and for its family (10.0f).
    missing = [x for x in target.architectures if f"sm_{sm(x).rstrip('af')}" not in known]
    if missing:
        raise UserError(
            f"CUDA {toolkit.version} at {toolkit.home} cannot compile for the GPU architectures "
            f"{', '.join(missing)} of {target.name}: set CUDA_HOME to CUDA {target.cuda.version}, or leave them out"
        )
    return toolkit


def make_driver(folder: Path, toolkit: CudaToolkit, compiler: str) -> Path:
    """The file of a driver to link with, by `-lcuda`, and to import with: a machine that builds may have none.

    Whoever calls it hears that there is no GPU.
    """
    names = {*re.findall(r"\bcu[A-Z]\w+", (toolkit.home / "include" / "cuda.h").read_text())}
    code = "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names))
    folder.mkdir()
    driver = folder / "libcuda.so"
    flags = ["-shared", "-nostdlib", "-fPIC", f"-Wl,-soname,{DRIVER}"]
    command = [compiler, *flags, "-x", "c", "-", "-o", str(driver)]
    subprocess.run(command, input=code, text=True, check=True)
    return driver


def with_usual_layout(
    toolkit: CudaToolkit, folder: Path, driver: Path, libraries: Path | None = None
) -> CudaToolkit:
    """The toolkit as CMake and linkers expect it: links in `folder`, where pip's is laid out otherwise.

    pip's has no `lib64`, libraries with their version only, which `-lcudart` does not find, and none for `driver`.
    `libraries` are those of another machine, in place of its own.
    """
    usual = ("lib64", "nvvm/lib64")
    if all((toolkit.home / each).is_dir() for each in usual) and libraries is None:
        return toolkit
    own = toolkit.home / ("lib64" if (toolkit.home / "lib64").is_dir() else "lib")
    # File by file: nvcc looks for the rest around the folder that it was called in.
    copied = {"bin": toolkit.home / "bin", "lib64": libraries or own, "nvvm": toolkit.home / "nvvm"}
    for name, original in copied.items():
        shutil.copytree(original, folder / name, copy_function=os.symlink)
    for file in sorted((folder / "lib64").glob("*.so.*")):
        link = file.with_name(f"{file.name.partition('.so')[0]}.so")
        if not link.exists():
            link.symlink_to(file.readlink())
    if not (folder / "lib64" / "stubs").exists():
        (folder / "lib64" / "stubs").symlink_to(driver.parent)
    (folder / "lib").symlink_to("lib64")
    (folder / "include").symlink_to(toolkit.home / "include")
    nvvm = folder / "nvvm" / "lib64"
    if not nvvm.exists():  # where nvlink looks for what optimises all files (-dlto)
        nvvm.mkdir()
        for file in (toolkit.home / "lib").glob("libnvvm.so.*"):
            (nvvm / "libnvvm.so").symlink_to(file)
    return CudaToolkit(folder, toolkit.version)


@dataclass(frozen=True)
class HostCompiler:
    """The C and C++ compilers for a machine, this one or another, and what they say they are."""

    cc: str
    cxx: str
    version: str
    machine: Machine


def host_compiler(machine: Machine) -> HostCompiler:
    """gcc and g++ for `machine`, where PATH has them."""
    cc, cxx = machine.compiler("gcc"), machine.compiler("g++")
    said = processes.ask([cxx, "--version"], check=True).stdout
    return HostCompiler(cc, cxx, said.partition("\n")[0], machine)


def tools(project: Project, target: Target) -> tuple[Environment, CudaToolkit | None, HostCompiler]:
    """What a build of the target takes on this machine: the environment with its torch, CUDA and compilers."""
    compiler = host_compiler(target.machine)  # before a torch is fetched for nothing
    base = environments.with_torch(target, pip_toolkit(target), any_cuda=bool(project.stable))
    return base, find_toolkit(target, base.site_packages), compiler


def compilers_of(target: Target) -> str:
    """Which compilers a build of the target takes on this machine; empty where that build will say what is missing."""
    try:
        compiler, toolkit = host_compiler(target.machine), toolkit_of_cuda_home(target)
    except UserError:
        return ""
    nvcc = f"{toolkit.version} in {toolkit.home}" if toolkit else pip_toolkit(target)
    return f"{compiler.version}, {compiler.cxx}, nvcc {nvcc}"


def make_wrappers(
    folder: Path, compiler: HostCompiler, prefixes: Mapping[Path, str], launcher: str = ""
) -> Path:
    """Makes the compilers of a build in `folder`; returns the folder for PATH.

    `prefixes` says what paths of this machine are called in what is built, `launcher` what each compiler
    is called through.
    """
    baseline = folder / "baseline"
    made = stubs.stubs(compiler.cc, releases.load().manylinux, compiler.machine)
    for file, data in made.items():
        (baseline / file).parent.mkdir(parents=True, exist_ok=True)
        (baseline / file).write_bytes(data)
    commands = folder / "bin"
    commands.mkdir()
    (folder / LINKS).mkdir()
    # One that changes code belongs in cached_compiler, by whose text the cache goes: these only name paths.
    flags = [f"-ffile-prefix-map={path}={name}" for path, name in prefixes.items()]
    settings = {
        "launcher": launcher,
        "baseline": str(baseline),
        "loader": compiler.machine.loader.partition(".so")[0],
        "links": str(folder / LINKS),
        "flags": shlex.join([*flags, "-isystem", f"{baseline}/include"]),
    }
    lines = [f"# {compiler.version}", *(f"{k}={shlex.quote(v)}" for k, v in settings.items())]
    # Error messages of torch's headers hold paths, which GCC would take from the targets of links
    # instead where those are shorter. Clang does not, and does not know the flag. Where they want another C++, one
    # file has 150000 lines of errors, of which the first says why.
    more = "-fno-canonical-system-headers -fmax-errors=20"
    lines += [f'case ${{0##*/}} in *clang*) ;; *) flags="$flags {more}" ;; esac']
    lines += ["case ${0##*/} in"]
    (commands / "cached").mkdir()
    cached = (WRAPPERS / "shell" / "cached_compiler").read_text()
    for name, path in _compilers(compiler).items():
        lines += [f"    {name}) compiler={shlex.quote(path)} ;;"]
        shutil.copy(WRAPPERS / "shell" / "compiler", commands / name)
        (commands / name).chmod(0o755)
        (commands / "cached" / name).write_text(f"{cached}# {sha256(Path(path))}\n")
        (commands / "cached" / name).chmod(0o755)
    (commands / "settings").write_text("\n".join([*lines, "esac", ""]))
    return commands


def find_launcher(folder: Path, work: Path) -> str:
    """The compiler cache of a build in `work`: this machine's ccache, else the sccache in `folder`; empty where there
    is neither, or the kernel takes no socket in so long a path.
    """
    # With one in its temporary folder, the home, sccache's server says that it has started.
    socket = len(os.fsencode(work / "home" / "sccache123456" / "sock")) < _LONGEST_SOCKET
    return shutil.which("ccache") or (socket and shutil.which("sccache", path=folder)) or ""


def cache_variables(kept: Path, work: Path) -> dict[str, str]:
    """What has either compiler cache of a build in `work` keep its files in `kept`."""
    found = {"CCACHE_DIR": str(kept / "ccache"), "SCCACHE_DIR": str(kept / "sccache")}
    # What another target's build has compiled of the same text serves this one. In the text are paths of our headers,
    # which do not count, and maybe of sources, which do: where a macro has them, the compiled code has them, too.
    found["SCCACHE_BASEDIRS"] = str(work / "compilers")
    # It would look for other headers where the build had them that compiled first.
    found["SCCACHE_DIRECT"] = "false"
    # The time of the wrapper that nvcc takes for its host compiler is each build's own.
    return {**found, "CCACHE_COMPILERCHECK": "content", "SCCACHE_SERVER_UDS": str(work / "s")}


def nvcc_variables(folder: Path, toolkit: CudaToolkit, launcher: str) -> dict[str, str]:
    """What has torch and CMake call nvcc through `launcher`, where `make_wrappers` has made `folder`."""
    if not launcher:
        return {}
    through = folder / "nvcc_launcher"
    shutil.copy(WRAPPERS / "shell" / "nvcc_launcher", through)
    through.chmod(0o755)
    nvcc = shlex.join([str(through), str(toolkit.home / "bin" / "nvcc")])
    return {"PYTORCH_NVCC": nvcc, "CMAKE_CUDA_COMPILER_LAUNCHER": str(through)}


def _compilers(compiler: HostCompiler) -> dict[str, str]:
    """Every command that compiles for the machine, with its path.

    Distributions give each several names, and Python, CMake and others take one or another of them:
    Debian's Python links with x86_64-linux-gnu-g++.
    """
    machine = processes.ask([compiler.cc, "-dumpmachine"], check=True).stdout.strip()
    found = {"cc": compiler.cc, "gcc": compiler.cc, "c++": compiler.cxx, "g++": compiler.cxx}
    for folder in (*_COMMON_FOLDERS, Path(compiler.cc).parent):
        for path in Path(folder).glob("*"):
            plain = path.name.removeprefix(f"{machine}-")
            # Without the prefix, those of a machine that compiles for another one are its own.
            if _COMPILER.fullmatch(plain) and (compiler.machine.is_here or plain != path.name):
                found.setdefault(path.name, str(path))
    return found


def common_path(folder: Path) -> list[str]:
    """The system's folders of commands, without any nvcc: a link in `folder` stands for each other."""
    found = [*_COMMON_FOLDERS]
    for number, common in enumerate(map(Path, _COMMON_FOLDERS)):
        if (common / "nvcc").exists():
            shadow = folder / f"commands-{number}"
            shadow.mkdir(parents=True)
            for command in (x for x in common.iterdir() if x.name != "nvcc"):
                (shadow / command.name).symlink_to(command)
            found[number] = str(shadow)
    return found


def parallel_jobs(memory_per_job: float, root: Path = Path("/")) -> int:
    """How many compilers to run at once: MAX_JOBS, or what the cores and the memory (GB) allow."""
    if asked := asked_jobs():
        return asked
    cores, memory = [float(len(os.sched_getaffinity(0)))], []
    # The files of both versions of cgroups.
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        said = [x for x in _cgroup_values(root, *names) if x[0] not in ("max", "-1")]
        cores += [int(quota) / int(period) for quota, period in said]
    for name in ("memory.max", "memory.limit_in_bytes"):
        memory += [int(x) for (x,) in _cgroup_values(root, name) if x != "max"]
    text = (root / "proc/meminfo").read_text()
    memory += [int(x) * 1024 for x in re.findall(r"(?m)^MemAvailable:\s+(\d+) kB", text)]
    return max(1, int(min(*cores, min(memory) / (memory_per_job * 1e9))))


def asked_jobs() -> int:
    """What MAX_JOBS asks for; 0: nothing."""
    asked = os.environ.get("MAX_JOBS")
    if asked and not re.fullmatch(r"0*[1-9][0-9]*", asked):
        raise UserError(f"MAX_JOBS is {asked!r}, but a number of jobs from 1 is expected")
    return int(asked or 0)


def _cgroup_values(root: Path, *names: str) -> Iterator[list[str]]:
    """The words of the files `names` in this process's cgroup and those above, of both versions.

    A container often sees its own cgroup mounted at the top, under another path than
    /proc/self/cgroup says: walking up to the mount point finds it there.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for mount in (root / "sys/fs/cgroup" / x for x in controllers.split(",")):
            inside = mount / path.lstrip("/")
            for folder in (x for x in (inside, *inside.parents) if x.is_relative_to(mount)):
                files = [folder / name for name in names]
                if all(file.is_file() for file in files):
                    yield [word for file in files for word in file.read_text().split()]
