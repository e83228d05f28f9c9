"""What a project and a target promise of a wheel."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from torchwheels.project import Project
from torchwheels.releases import Target, load, minor
from torchwheels.wheel import Wheel, admitted


@dataclass(frozen=True)
class Expectation:
    """What the project and the target promise of a wheel."""

    target: Target
    manylinux: str
    architectures: tuple[str, ...]
    """GPU compute capabilities, as TORCH_CUDA_ARCH_LIST has them: `9.0`, `12.0+PTX`."""
    size_budget: float = 0.0
    """In MB (10**6 bytes); 0 where there is none."""
    allow_libraries: tuple[str, ...] = ()
    """Patterns of the further libraries that the wheel may bundle or need."""
    torches: str = ""
    """A specifier of the torches that its libraries work with, where the project declares one."""
    of_others: bool = False
    """Whether another tool has built it, which writes no label and no build record."""


def promised_torches(wheel: Wheel, expectation: Expectation) -> list[str]:
    """The minor releases of torch that the wheel is for, the oldest first."""
    one = SpecifierSet(f"=={minor(expectation.target.torch)}.*")
    declared = SpecifierSet(expectation.torches) if expectation.torches else None
    return admitted(declared or wheel.torch_requirement or one) or admitted(one)


def expectation_of(project: Project, target: Target, of_others: bool = False) -> Expectation:
    """What `project` promises of its wheel for `target`."""
    return Expectation(
        target=target,
        manylinux=load().manylinux,
        architectures=project.architectures(target),
        size_budget=project.size_budget,
        allow_libraries=project.allow_libraries,
        torches=project.torch,
        of_others=of_others,
    )
