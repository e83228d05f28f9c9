"""The build of a wheel on this machine: compilers, and the project's own build backend."""

from torchwheels.build import toolchain
from torchwheels.build.backend import too_long
from torchwheels.build.steps import STEPS, before_all, build_wheel

__all__ = ["STEPS", "before_all", "build_wheel", "too_long", "toolchain"]
