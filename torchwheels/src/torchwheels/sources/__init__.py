"""Sources: from an index, a folder, an archive, or a commit."""

from torchwheels.sources.fetching import (
    Fetched,
    empty_submodules,
    fetch,
    fetched,
    hash_of_folder,
    on_index,
    parts,
    tags,
    versions,
)

__all__ = [
    "Fetched", "empty_submodules", "fetch", "fetched", "hash_of_folder", "on_index", "parts", "tags",
    "versions",
]  # fmt: skip
