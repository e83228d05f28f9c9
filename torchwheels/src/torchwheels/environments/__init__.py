"""Python environments: one with the target's torch, kept between builds, and small ones on top of it."""

from torchwheels.environments.torch import cuda_runtime, torch_requirement, with_torch
from torchwheels.environments.virtual import (
    Environment,
    clean_variables,
    on_top_of,
    pip_install,
)

__all__ = [
    "Environment",
    "clean_variables",
    "cuda_runtime",
    "on_top_of",
    "pip_install",
    "torch_requirement",
    "with_torch",
]
