"""Compiles the native libraries: writes a ninja file, runs ninja, records what the build used.

torch is never imported (its build helper alone takes seconds to load): only its headers are read,
so that any build of a torch >= 2.10 serves, a CPU-only one for CUDA code too.

`python -m service.compile cpu --into FOLDER` compiles only, without making a wheel.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from service import (
    ROOT,
    ServiceError,
    baseline,
    errors_for_the_user,
    native_libraries,
    processes,
    toolchain,
)
from service.matrix import Variant, load, release

BUILD_INFO = "_build_info.json"

# What is linked but not built here: the linker gets a stand-in, of the same name. torch's libraries
# are only named, never needed, so theirs are empty.
_STAND_IN = "$cxx -shared -nostdlib -o $out -Wl,-soname,$soname $flags"
_EMPTY = "-x c++ /dev/null"
_LINK = (
    "$cxx -shared -nodefaultlibs -o $out $in $flags $linking -Wl,--build-id=none "
    "-Wl,-soname,$soname -Wl,-rpath,'$$ORIGIN'"
)
_STRIP = "-s"
_SANITIZERS_RUNTIME = "-lasan -lubsan"


def build_folder(variant: Variant) -> Path:
    """Where the objects of `variant` are kept between builds."""
    return ROOT / "build" / variant.name


def build(variant: Variant, *, sanitized: bool = False) -> list[Path]:
    """Compiles the libraries of `variant`; returns them, and the file that says what was used.

    `sanitized` libraries check each of their memory accesses, and need the sanitizers' runtime.
    """
    cxx = toolchain.host_compiler()
    toolkit = toolchain.find_cuda(variant) if variant.cuda else None
    for tool in ("ninja", "auditwheel"):
        if importlib.util.find_spec(tool) is None:
            raise ServiceError(f"there is no {tool} for {sys.executable}: run `pip install {tool}`")
    headers, torch_version = _torch_headers()
    folder = build_folder(variant)
    folder.mkdir(parents=True, exist_ok=True)
    sanitizers = native_libraries().SANITIZERS if sanitized else ()
    outputs = _write_ninja(folder, variant, cxx, toolkit, headers, sanitizers)
    jobs = toolchain.parallel_jobs()
    # Not `python -m ninja`, which would not pass on the signal that ends it.
    ninja = Path(importlib.import_module("ninja").BIN_DIR) / "ninja"
    command = [str(ninja), "-f", str(_relative(folder / "build.ninja")), f"-j{jobs}"]
    start = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, preexec_fn=processes.terminate_with_parent)
    if ended.returncode != 0:
        raise ServiceError(
            f"compiling the libraries of {variant.name} failed: the messages above say where"
        )
    seconds = time.monotonic() - start
    print(
        f"extops: compiled {variant.name} in {seconds:.1f} s, up to {jobs} files at once",
        flush=True,
    )
    info = folder / BUILD_INFO
    info.write_text(json.dumps(_build_info(variant, cxx, toolkit, torch_version), indent=2) + "\n")
    return [*outputs, info]


def _torch_headers() -> tuple[Path, str]:
    """torch's include directory and version, found without importing torch."""
    needed = ".".join(map(str, native_libraries().STABLE_TORCH))
    mend = f"run `pip install --no-deps torch=={load().headers_torch}`"
    need = f"the headers of torch >= {needed} are needed"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ServiceError(f"{need}, and {sys.executable} has no torch: {mend}")
    version = importlib.metadata.version("torch")
    if release(version) < native_libraries().STABLE_TORCH:
        raise ServiceError(f"{need}, and torch is {version}: {mend}")
    return Path(spec.origin).parent / "include", version


def _words(*words: object) -> str:
    """Words of a command as a ninja file has them: quoted for the shell, `$` doubled for ninja."""
    return shlex.join(map(str, words)).replace("$", "$$")


def _relative(path: Path) -> Path:
    """Relative to the source tree, on whose place objects and compiler cache then do not depend."""
    return path.relative_to(ROOT)


def _write_ninja(
    folder: Path,
    variant: Variant,
    cxx: str,
    toolkit: toolchain.CudaToolkit | None,
    headers: Path,
    sanitizers: tuple[str, ...],
) -> list[Path]:
    """Writes build.ninja into `folder` and returns the libraries that it makes."""
    writer: Any = importlib.import_module("ninja.ninja_syntax").Writer
    native = native_libraries()
    launcher = "ccache " if shutil.which("ccache") else ""
    outputs = []
    with (folder / "build.ninja").open("w") as file:
        ninja = writer(file)
        ninja.variable("builddir", str(_relative(folder)))
        ninja.variable("cxx", _words(cxx))
        ninja.variable("sanitizers", " ".join(sanitizers))
        ninja.variable("linking", _SANITIZERS_RUNTIME if sanitizers else _STRIP)
        compile_cxx = f"{launcher}$cxx -MD -MF $out.d $flags $sanitizers -c $in -o $out"
        ninja.rule("cxx", compile_cxx, depfile="$out.d", deps="gcc", description="C++ $in")
        if toolkit:
            nvcc = _words(toolkit.nvcc)
            compile_cuda = f"{launcher}{nvcc} -ccbin $cxx -MD -MF $out.d $flags -c $in -o $out"
            ninja.rule("cuda", compile_cuda, depfile="$out.d", deps="gcc", description="CUDA $in")
        ninja.rule("stand-in", _STAND_IN, description="STAND-IN $out")
        ninja.rule("link", _LINK, description="LINK $out")
        _write_stand_ins(ninja, folder, cxx)
        for library in native.libraries(cuda=toolkit is not None):
            objects = _write_objects(ninja, folder, library, variant, headers)
            outputs.append(_write_link(ninja, folder, library, objects, toolkit))
        ninja.default([str(_relative(path)) for path in outputs])
    return outputs


def _write_stand_ins(ninja: Any, folder: Path, cxx: str) -> None:
    for name in sorted({name for x in native_libraries().LIBRARIES for name in x.torch_links}):
        variables = {"soname": f"lib{name}.so", "flags": _EMPTY}
        ninja.build(str(_relative(folder / f"lib{name}.so")), "stand-in", variables=variables)
    baseline.write_sources(folder / "system", cxx)
    for name in baseline.LIBRARIES:
        path = _relative(folder / "system" / name)
        variables = {"soname": name, "flags": _words(*baseline.compiler_flags(path))}
        sources = [str(source) for source in baseline.sources(path)]
        ninja.build(str(path), "stand-in", implicit=sources, variables=variables)


def _write_objects(
    ninja: Any, folder: Path, library: Any, variant: Variant, headers: Path
) -> list[str]:
    native = native_libraries()
    cxx_flags = native.cxx_flags(library)
    if library.torch_links:
        # Not -I: torch's headers are not held to our warnings. Their error messages hold paths, which
        # GCC would take from the targets of links instead where those are shorter.
        cxx_flags += ["-isystem", str(headers), "-fno-canonical-system-headers"]
        cxx_flags.append(f"-ffile-prefix-map={headers}=torch")
    objects = []
    for source in library.sources(ROOT / "csrc"):
        cuda = source.suffix == ".cu"
        flags = native.nvcc_flags(variant.architectures) if cuda else cxx_flags
        target = str(_relative(folder / "objects" / f"{source.relative_to(ROOT / 'csrc')}.o"))
        rule = "cuda" if cuda else "cxx"
        ninja.build(target, rule, str(_relative(source)), variables={"flags": _words(*flags)})
        objects.append(target)
    return objects


def _write_link(
    ninja: Any,
    folder: Path,
    library: Any,
    objects: list[str],
    toolkit: toolchain.CudaToolkit | None,
) -> Path:
    output = folder / f"{library.name}.so"
    needed = [*library.links, *(f"lib{name}" for name in library.torch_links)]
    shared = [str(_relative(folder / f"{name}.so")) for name in needed]
    # What is linked here is needed at run time, even where the linker sees no use of it.
    flags = ["-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", *shared]
    system = {name: str(_relative(folder / "system" / name)) for name in baseline.LIBRARIES}
    if not library.torch_links:
        flags.append("-Wl,--no-undefined")
    if toolkit and library.cuda and not library.torch_links:
        # The CUDA runtime inside the library: it then runs with torch of any CUDA version.
        flags.append(str(toolkit.libraries / "libcudart_static.a"))
        flags += [system[name] for name in baseline.FORMER_PARTS_OF_LIBC]
    # What an older C++ library lacks comes from the static one, as GCC's toolsets for RHEL do it.
    flags += [
        "-Wl,--as-needed",
        system[baseline.LIBSTDCXX],
        "-l:libstdc++.a",
        system[baseline.LIBM],
    ]
    flags += ["-lgcc", system[baseline.LIBGCC], system[baseline.LIBC], "-l:libc_nonshared.a"]
    flags.append(system[baseline.LOADER])
    variables = {"flags": _words(*flags), "soname": output.name}
    implicit = [*shared, *system.values()]
    ninja.build(str(_relative(output)), "link", objects, implicit=implicit, variables=variables)
    return output


def _build_info(
    variant: Variant, cxx: str, toolkit: toolchain.CudaToolkit | None, torch_version: str
) -> dict[str, Any]:
    return {
        "variant": variant.name,
        "cuda": toolkit.version if toolkit else None,
        "architectures": list(variant.architectures),
        # Without the label of torch's own build: what is used of the headers is the same in all.
        "torch_headers": torch_version.partition("+")[0],
        "cxx": _output(cxx, "--version").partition("\n")[0],
        "commit": commit(),
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


_DESCRIBE = ("describe", "--always", "--abbrev=40", "--dirty")


def commit() -> str | None:
    """The commit of the sources: EXTOPS_COMMIT, or else what git says; None where nobody knows.

    In an image there is no git: who builds there passes the variable.
    """
    return os.environ.get("EXTOPS_COMMIT") or git(*_DESCRIBE)


def why_no_commit() -> str:
    """Why git does not say which commit the sources are of; empty where it does."""
    done = _run_git(*_DESCRIBE)
    return " ".join(done.stderr.split()) if done.returncode != 0 else ""


def git(*arguments: str) -> str | None:
    """What git says of the source tree; None where it says nothing."""
    done = _run_git(*arguments)
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def _run_git(*arguments: str) -> subprocess.CompletedProcess[str]:
    failed = functools.partial(subprocess.CompletedProcess, arguments, 1, "")
    if not (ROOT / ".git").exists():  # git would look in the folders above, too
        return failed(f"{ROOT} has no .git")
    if shutil.which("git") is None:
        return failed("there is no `git` command")
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m service.compile", description=build.__doc__)
    parser.add_argument("variant", help="a variant of matrix.toml, e.g. cpu")
    parser.add_argument("--into", type=Path, required=True, help="where to copy the libraries")
    parser.add_argument("--sanitized", action="store_true", help="with AddressSanitizer and UBSan")
    arguments = parser.parse_args()
    processes.end_with_parent()
    with errors_for_the_user():
        outputs = build(load().variant(arguments.variant), sanitized=arguments.sanitized)
    arguments.into.mkdir(parents=True, exist_ok=True)
    for output in outputs:
        shutil.copy2(output, arguments.into)


if __name__ == "__main__":
    main()
