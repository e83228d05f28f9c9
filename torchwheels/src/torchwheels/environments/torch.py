"""The environments with a target's torch, which are kept between builds."""

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchwheels.environments import virtual
from torchwheels.environments.virtual import Environment, clean_variables, install
from torchwheels.errors import UserError
from torchwheels.options import Target, indexes, releases
from torchwheels.system import cache, scratch


def torch_requirement(target: Target) -> str:
    """The target's torch; never a CPU-only one in a CUDA target, which lacks what to link with."""
    any_label = target.cuda and "+" not in target.torch
    return f"torch=={target.torch}" + (f",!={target.torch}+cpu" if any_label else "")


def _variables(target: Target, home: Path) -> dict[str, str]:
    """Those of uv where it looks for torch: also on an index that pip's configuration does not name, or only there."""
    variables = clean_variables(home)
    if target.index:
        variables["UV_INDEX"] = f"{variables.get('UV_INDEX', '')} {target.index}".strip()
    elif index := os.environ.get("TORCHWHEELS_TORCH_INDEX"):
        variables["UV_DEFAULT_INDEX"] = index.replace("{label}", target.label)
    return variables


def with_torch(target: Target, toolkit: tuple[str, ...], any_cuda: bool = False) -> Environment:
    """An environment with the target's torch, the build tools and pip's CUDA `toolkit`; kept.

    All targets share one for which uv finds the same torch. `any_cuda`: of whichever CUDA that is.
    """
    # Not that of a virtual environment.
    python = os.path.realpath(virtual.find_python(target.python))
    with cache.locked(f"environments/{_name(target, python)}") as folder:
        environment, complete = Environment(cache.use(folder)), folder / "complete"
        if not complete.is_file():
            shutil.rmtree(folder)
            _install_torch(target, python, environment)
            complete.touch()
        if missing := [x for x in toolkit if x not in complete.read_text().splitlines()]:
            print(f"torchwheels: installing CUDA's compiler for {target.name}, once", flush=True)
            # Named again, since torch pins the rest of the toolkit.
            wanted = [torch_requirement(target), *missing]
            install(environment, wanted, _variables(target, folder))
            complete.write_text("".join(f"{x}\n" for x in toolkit))
    said: dict[str, str | None] = {}
    exec((environment.site_packages / "torch" / "version.py").read_text(), said)
    wanted_cuda = target.cuda.version if target.cuda and not any_cuda else None
    if wanted_cuda and str(said["cuda"]).split(".")[0] != wanted_cuda.split(".")[0]:
        raise UserError(
            f"{target.name} needs a torch of CUDA {wanted_cuda}, but it got "
            f"{said['__version__']} of CUDA {said['cuda']}: let pip's configuration name an index with "
            f"torch {target.torch} for {target.label}, or choose another target"
        )
    of_cuda = f" of CUDA {said['cuda']}" if said["cuda"] else ""
    print(f"torchwheels: using torch {said['__version__']}{of_cuda} in {folder}", flush=True)
    return environment


def _name(target: Target, python: str) -> str:
    """What the environment with the target's torch is called: by the file that uv finds, which is asked once."""
    tools = releases.load().tools
    wanted = torch_requirement(target)
    given = [python, *tools, wanted, target.index, indexes.places_of_torch()]
    folder = cache.own() / "environments"
    known = folder / f"{_key(given)}.name"
    if known.is_file() and (folder / known.read_text() / "complete").is_file():
        return known.read_text()
    with scratch() as work:
        asked, lock = work / "torch.in", work / "pylock.toml"
        asked.write_text(wanted)
        words = ["--quiet", "--no-deps", f"--python={python}", f"--output-file={lock}", str(asked)]
        virtual.uv_pip("compile", words, wanted, _variables(target, work))
        (found,) = msgspec.toml.decode(lock.read_bytes())["packages"]
    file = found["wheels"][0]
    key = _key([python, *tools, json.dumps(file.get("hashes") or file["url"])])
    name = f"{target.python}-torch{found['version']}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    known.write_text(name)
    return name


def _key(given: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(given).encode()).hexdigest()[:8]


def _install_torch(target: Target, python: str, environment: Environment) -> None:
    """Makes an environment with the target's torch and the build tools, or none."""
    home = environment.folder
    what = f"torch {target.torch} for {target.name}"
    room = f"{1 if '+cpu' in home.name else 5} GB in {cache.place()}"
    print(f"torchwheels: installing {what}, once: it takes {room}", flush=True)
    try:
        virtual.make(python, home)
        install(environment, releases.load().tools, clean_variables(home), hashed=True)
        # PyTorch's own index has smaller builds, for the CPU alone, and nothing of the tools.
        install(environment, [torch_requirement(target)], _variables(target, home))
    except BaseException:
        # A partial installation is useless, and may have filled the disk. What cannot go now does with the next.
        shutil.rmtree(home, ignore_errors=True)
        raise


def cuda_runtime(environment: Environment, target: Target, folder: Path) -> Path:
    """Installs the CUDA runtime of `environment` for the target's machine into `folder`: that of its libraries."""
    package = "nvidia-cuda-runtime"
    (found,) = importlib.metadata.distributions(name=package, path=[str(environment.site_packages)])
    options = ["--only-binary=:all:", "--no-deps", f"--target={folder}"]
    options += [f"--python-platform={target.machine.name}-manylinux_2_28"]
    wanted = [*options, f"{package}=={found.version}"]
    install(environment, wanted, clean_variables(environment.folder))
    assert target.cuda is not None
    return folder / "nvidia" / f"cu{target.cuda.version.split('.')[0]}" / "lib"
