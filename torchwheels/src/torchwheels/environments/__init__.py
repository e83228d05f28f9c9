"""Python environments: one with the target's torch, kept between builds, and small ones on top of it."""

from torchwheels.environments.torch import cuda_runtime, torch_requirement, with_torch
from torchwheels.environments.virtual import Environment, clean_variables, install, on_top_of

__all__ = [
    "Environment", "clean_variables", "cuda_runtime", "install", "on_top_of", "torch_requirement", "with_torch",
]  # fmt: skip
