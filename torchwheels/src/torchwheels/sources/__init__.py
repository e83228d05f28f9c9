"""Sources: from an index, a folder, an archive, or a commit."""

from torchwheels.sources.fetching import (
    Fetched,
    empty_submodules,
    fetch,
    fetched,
    hash_of_folder,
    is_elsewhere,
    on_index,
    parts,
    pythons_of,
    tags,
    versions,
)

__all__ = [
    "Fetched", "empty_submodules", "fetch", "fetched", "hash_of_folder", "is_elsewhere", "on_index", "parts",
    "pythons_of", "tags", "versions",
]  # fmt: skip
