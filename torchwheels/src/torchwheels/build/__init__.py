"""The build of a wheel on this machine: compilers, and the project's own build backend."""

from torchwheels.build import toolchain
from torchwheels.build.backend import too_long
from torchwheels.build.steps import STEPS, before_all, build_wheel, project_folder

__all__ = ["STEPS", "before_all", "build_wheel", "project_folder", "too_long", "toolchain"]
