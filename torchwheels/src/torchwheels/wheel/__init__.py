"""A wheel: what is in it, what it works with, and how it is finished. Nothing of it runs."""

from torchwheels.wheel import elf, finish, linux, stable_functions, variants
from torchwheels.wheel.archive import metadata_of, record_hash
from torchwheels.wheel.contents import BUILD_RECORD, CUDA_LIBRARY, Wheel, read, serves, wheels_in
from torchwheels.wheel.elf import DRIVER, Library, demangle
from torchwheels.wheel.finish import Used

__all__ = [
    "BUILD_RECORD", "CUDA_LIBRARY", "DRIVER", "Library", "Used", "Wheel", "demangle", "elf", "finish",
    "linux", "metadata_of", "read", "record_hash", "serves", "stable_functions", "variants", "wheels_in",
]  # fmt: skip
