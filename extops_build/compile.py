"""Compiles the native libraries: writes a ninja file, runs ninja, records what the build used.

torch is never imported (its build helper alone takes seconds to load): only its headers are read.
What to compile with and for is in the variables that builds of extensions have: CUDA_HOME,
TORCH_CUDA_ARCH_LIST, MAX_JOBS, and PATH for the C++ compiler.

`python -m extops_build.compile cpu --into FOLDER` compiles only, without making a wheel.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from extops_build import ROOT, UserError, errors_for_the_user, libraries

BUILD_INFO = "_build_info.json"

# torch's libraries are only named, never needed: the linker gets empty ones of the same names.
_STUB = "$cxx -shared -nostdlib -o $out -Wl,-soname,$soname -x c++ /dev/null"
_LINK = "$cxx -shared -o $out $in $flags $sanitizing -Wl,-soname,$soname -Wl,-rpath,'$$ORIGIN'"
_SANITIZERS_RUNTIME = "-lasan -lubsan"


def build_folder(variant: str) -> Path:
    """Where the objects of `variant` are kept between builds."""
    return ROOT / "build" / variant


def build(variant: str, *, sanitized: bool = False) -> list[Path]:
    """Compiles the libraries of `variant`: `cpu`, or one with CUDA.

    Returns them, and the file that says what was used. `sanitized` libraries check each of their
    memory accesses, and need the sanitizers' runtime.
    """
    cxx = shutil.which("g++")
    if cxx is None:
        raise UserError("there is no C++ compiler g++ on PATH: `apt-get install g++` adds one")
    cuda = None if variant == "cpu" else cuda_home()
    headers, torch_version = _torch_headers()
    folder = build_folder(variant)
    folder.mkdir(parents=True, exist_ok=True)
    sanitizers = libraries.SANITIZERS if sanitized else ()
    outputs = _write_ninja(folder, cxx, cuda, headers, sanitizers)
    jobs = os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))
    # Not `python -m ninja`, which would not pass on the signal that ends it.
    ninja = Path(importlib.import_module("ninja").BIN_DIR) / "ninja"
    command = [str(ninja), "-f", str(_relative(folder / "build.ninja")), f"-j{jobs}"]
    start = time.monotonic()
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise UserError(
            f"compiling the libraries of {variant} failed: the messages above say where"
        )
    print(f"extops: compiled {variant} in {time.monotonic() - start:.1f} s", flush=True)
    info = folder / BUILD_INFO
    info.write_text(json.dumps(_build_info(variant, cxx, cuda, torch_version), indent=2) + "\n")
    return [*outputs, info]


def cuda_home() -> Path:
    """The CUDA toolkit: CUDA_HOME, else the one that pip installed."""
    from_pip = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"))
    home = Path(os.environ.get("CUDA_HOME") or (from_pip[-1].parents[1] if from_pip else "none"))
    if not (home / "bin" / "nvcc").is_file():
        raise UserError(
            f"there is no CUDA compiler {home / 'bin' / 'nvcc'}: set CUDA_HOME to the directory of a "
            "CUDA toolkit, or build with `nox -s build-3.11-cu130`"
        )
    return home


def architectures() -> tuple[str, ...]:
    """The GPU compute capabilities to compile for."""
    found = tuple(re.findall(r"[^; ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "")))
    if not found:
        raise UserError(
            "TORCH_CUDA_ARCH_LIST does not say which GPUs to compile for: set it to compute "
            "capabilities such as `8.0;9.0+PTX`"
        )
    for name in found:
        if not re.fullmatch(r"(\d\.\d|9\.0a|\d\d\.\d[af]?)(\+PTX)?", name):
            raise UserError(
                "TORCH_CUDA_ARCH_LIST: expected compute capabilities such as `8.0`, `9.0a`, `10.0f` or "
                f"`12.0+PTX`, with `;` between them, but got `{name}`"
            )
    # The kernels for Hopper are compiled for 9.0a anyway, and no others use what `a` and `f` add:
    # without it, code runs on the same GPUs, and on more.
    return tuple(dict.fromkeys(re.sub("[af]", "", name) for name in found))


def _torch_headers() -> tuple[Path, str]:
    """torch's include directory and version, found without importing torch."""
    oldest = libraries.STABLE_TORCH
    need = f"the headers of torch >= {'.'.join(map(str, oldest))} are needed"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError(f"{need}, and {sys.executable} has no torch: run `pip install torch`")
    version = importlib.metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) < oldest:
        raise UserError(f"{need}, and torch is {version}: run `pip install --upgrade torch`")
    return Path(spec.origin).parent / "include", version


def _words(*words: object) -> str:
    """Words of a command as a ninja file has them: quoted for the shell, `$` doubled for ninja."""
    return shlex.join(map(str, words)).replace("$", "$$")


def _relative(path: Path) -> Path:
    """Relative to the source tree, on whose place objects and compiler cache then do not depend."""
    return path.relative_to(ROOT)


def _write_ninja(
    folder: Path, cxx: str, cuda: Path | None, headers: Path, sanitizers: tuple[str, ...]
) -> list[Path]:
    """Writes build.ninja into `folder` and returns the libraries that it makes."""
    writer: Any = importlib.import_module("ninja.ninja_syntax").Writer
    outputs = []
    with (folder / "build.ninja").open("w") as file:
        ninja = writer(file)
        ninja.variable("builddir", str(_relative(folder)))
        ninja.variable("cxx", _words(cxx))
        ninja.variable("sanitizers", " ".join(sanitizers))
        ninja.variable("sanitizing", _SANITIZERS_RUNTIME if sanitizers else "")
        compile_cxx = "$cxx -MD -MF $out.d $flags $sanitizers -c $in -o $out"
        ninja.rule("cxx", compile_cxx, depfile="$out.d", deps="gcc", description="C++ $in")
        if cuda:
            # The C++ compiler of a build has the compiler cache in front of it already.
            launcher = "ccache " if shutil.which("ccache") else ""
            nvcc = f"{launcher}{_words(cuda / 'bin' / 'nvcc')} -ccbin $cxx"
            compile_cuda = f"{nvcc} {_compression(cuda)} -MD -MF $out.d $flags -c $in -o $out"
            ninja.rule("cuda", compile_cuda, depfile="$out.d", deps="gcc", description="CUDA $in")
        ninja.rule("stub", _STUB, description="STUB $out")
        ninja.rule("link", _LINK, description="LINK $out")
        for name in sorted({name for x in libraries.LIBRARIES for name in x.torch_links}):
            variables = {"soname": f"lib{name}.so"}
            ninja.build(str(_relative(folder / f"lib{name}.so")), "stub", variables=variables)
        for library in libraries.libraries(cuda=cuda is not None):
            objects = _write_objects(ninja, folder, library, headers)
            outputs.append(_write_link(ninja, folder, library, objects, cuda))
        ninja.default([str(_relative(path)) for path in outputs])
    return outputs


def _compression(cuda: Path) -> str:
    """The flags of nvcc that compress GPU code: in wheels, not in what is compiled for one machine."""
    # `size` asks for a driver of CUDA 12.4, which wheels of CUDA 12 do not: theirs may be of CUDA 12.0.
    mode = "" if nvcc_version(cuda).startswith("12.") else " -compress-mode=size"
    return f"-Xfatbin=-compress-all{mode}"


def _write_objects(
    ninja: Any, folder: Path, library: libraries.Library, headers: Path
) -> list[str]:
    cxx_flags = libraries.cxx_flags(library, strict=True)
    if library.torch_links:
        cxx_flags += ["-isystem", str(headers)]  # not -I: they are not held to our warnings
    objects = []
    for source in library.sources(ROOT / "csrc"):
        cuda = source.suffix == ".cu"
        flags = cxx_flags
        if cuda:
            chosen = libraries.architectures_of(source, architectures())
            flags = libraries.nvcc_flags(chosen, strict=True)
        target = str(_relative(folder / "objects" / f"{source.relative_to(ROOT / 'csrc')}.o"))
        rule = "cuda" if cuda else "cxx"
        ninja.build(target, rule, str(_relative(source)), variables={"flags": _words(*flags)})
        objects.append(target)
    return objects


def _write_link(
    ninja: Any, folder: Path, library: libraries.Library, objects: list[str], cuda: Path | None
) -> Path:
    output = folder / f"{library.name}.so"
    needed = [*library.links, *(f"lib{name}" for name in library.torch_links)]
    shared = [str(_relative(folder / f"{name}.so")) for name in needed]
    # What is linked here is needed at run time, even where the linker sees no use of it.
    flags = ["-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", *shared, "-Wl,--as-needed"]
    if not library.torch_links:
        flags.append("-Wl,--no-undefined")
    if cuda and library.cuda and not library.torch_links:
        # The CUDA runtime inside the library: it then runs with torch of any CUDA version.
        folders = [cuda / name for name in ("lib64", "lib")]  # a system's toolkit, and pip's
        flags += [*(f"-L{each}" for each in folders), "-l:libcudart_static.a"]
        flags += ["-lpthread", "-ldl", "-lrt"]
    variables = {"flags": _words(*flags), "soname": output.name}
    ninja.build(str(_relative(output)), "link", objects, implicit=shared, variables=variables)
    return output


def _build_info(variant: str, cxx: str, cuda: Path | None, torch_version: str) -> dict[str, Any]:
    return {
        "variant": variant,
        "cuda": nvcc_version(cuda) if cuda else None,
        "architectures": libraries.compiled_architectures(architectures()) if cuda else [],
        # Without the label of torch's own build: what is used of the headers is the same in all.
        "torch_headers": torch_version.partition("+")[0],
        "cxx": _output(cxx, "--version").partition("\n")[0],
        "commit": commit(),
    }


def nvcc_version(cuda: Path) -> str:
    """The version that nvcc prints, such as `13.0.88`."""
    found = re.search(r"\bV(\d+\.\d+(?:\.\d+)?)", _output(str(cuda / "bin" / "nvcc"), "--version"))
    return found[1] if found else "unknown"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commit() -> str | None:
    """The commit of the sources, or a hash: EXTOPS_COMMIT, or else what git says; None where nobody knows."""
    given = os.environ.get("EXTOPS_COMMIT", "").removeprefix("git:")
    return given or git("describe", "--always", "--abbrev=40", "--dirty")


@functools.cache
def git(*arguments: str) -> str | None:
    """What git says of the source tree; None where it says nothing."""
    # git would look in the folders above, too.
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m extops_build.compile", description=build.__doc__
    )
    parser.add_argument("variant", help="`cpu`, or a name for one with CUDA, such as cu130")
    parser.add_argument("--into", type=Path, required=True, help="where to copy the libraries")
    parser.add_argument("--sanitized", action="store_true", help="with AddressSanitizer and UBSan")
    arguments = parser.parse_args()
    with errors_for_the_user():
        outputs = build(arguments.variant, sanitized=arguments.sanitized)
    arguments.into.mkdir(parents=True, exist_ok=True)
    for output in outputs:
        shutil.copy2(output, arguments.into)


if __name__ == "__main__":
    main()
