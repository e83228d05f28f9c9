"""Compiles one variant: setuptools' side of it. extops_build/compile.py compiles, and torchwheels makes the wheel."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from extops_build import UserError, compile, libraries, memory_model  # noqa: E402

PACKAGE = ROOT / "package" / "extops"


VARIANT = os.environ.get("EXTOPS_VARIANT")
"""Unset for the source archive, which serves all."""


class BuildLibraries(Command):
    """Compiles the libraries, and puts them into the package."""

    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False  # set by `pip install -e`

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        if not VARIANT:  # no default: nobody shall get a CPU-only build by accident
            raise UserError(
                "building extops from source needs to know for what: set EXTOPS_VARIANT to `cpu`, or to "
                "another name for one with CUDA, or run `nox -s build-3.11-cu130` or the like, or install "
                "a wheel"
            )
        outputs = compile.build(VARIANT)
        if VARIANT != "cpu":
            memory_model.check(outputs[0].with_name(f"{libraries.CUDA.name}.so"))
        self._package().mkdir(parents=True, exist_ok=True)
        for stale in set(self._package().glob("libextops_*.so")):
            if stale.name not in {path.name for path in outputs}:
                stale.unlink()  # of another variant, left by an earlier `pip install -e`
        for built in outputs:
            target = self._package() / built.name
            # By way of another name: a process that has the old library loaded keeps it.
            shutil.copy2(built, target.with_name(f".{target.name}"))
            target.with_name(f".{target.name}").replace(target)
        self._copy_headers()

    def _copy_headers(self) -> None:
        """What a cell of a user's own includes: csrc/extops_cell.h and csrc/extops_cell.cuh, and what these do."""
        include, csrc = self._package() / "include", ROOT / "csrc"
        shutil.rmtree(include, ignore_errors=True)
        for path in sorted(csrc.rglob("*")):
            if path.suffix in (".h", ".cuh"):
                copied = include / path.relative_to(csrc)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copied)

    def _package(self) -> Path:
        assert self.build_lib is not None
        return PACKAGE if self.editable_mode else Path(self.build_lib) / "extops"

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.*"))]

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    """Starts from an empty folder: setuptools would pack what an earlier build left there."""

    sub_commands: ClassVar[list[Any]] = [("build_libraries", None), *build.sub_commands]

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BinaryDistribution(Distribution):
    """Has machine code, though no Python extension module."""

    def has_ext_modules(self) -> bool:
        return True


class BdistWheel(bdist_wheel):
    """One wheel for every Python: the libraries know nothing of Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def urls() -> dict[str, str]:
    """Where the sources are, of which only CI knows."""
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    repository = os.environ.get("GITHUB_REPOSITORY")
    address = f"{server}/{repository}"
    return {"Source": address, "Issues": f"{address}/issues"} if repository else {}


try:
    # A folder for each variant: setuptools would mix their files otherwise.
    folder = str(ROOT / "build" / (VARIANT or "sdist"))
    Path(folder).mkdir(parents=True, exist_ok=True)
    setup(
        version=runpy.run_path(str(PACKAGE / "_version.py"))["__version__"],
        project_urls=urls(),
        cmdclass={"build": Build, "build_libraries": BuildLibraries, "bdist_wheel": BdistWheel},
        distclass=BinaryDistribution,
        options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}},
    )
except UserError as error:
    sys.exit(f"extops: {error}")
