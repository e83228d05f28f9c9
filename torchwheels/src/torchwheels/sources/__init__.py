"""Sources: from an index, a folder, an archive, or a commit."""

from torchwheels.sources.fetching import (
    Fetched,
    empty_submodules,
    fetch,
    hash_of_folder,
    name_of,
    parts,
    versions,
)

__all__ = [
    "Fetched",
    "empty_submodules",
    "fetch",
    "hash_of_folder",
    "name_of",
    "parts",
    "versions",
]
