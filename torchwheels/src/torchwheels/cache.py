"""What is kept between builds, in a folder of the user: its size, and its removal."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from torchwheels import environments
from torchwheels.environments import gigabytes, size
from torchwheels.errors import UserError

_IN_PARTS = ("environments", "build")  # of which each part has a lock of its own


def entries() -> Iterator[str]:
    """The names of what is there, such as `environments/3.11-torch2.13.0+cpu-0a1b2c3d`."""
    folder = environments.cache()
    for top in sorted(folder.glob("*")):
        for path in sorted(top.glob("*")) if top.name in _IN_PARTS else [top]:
            if path.is_dir() and top.name in environments.PARTS:
                yield str(path.relative_to(folder))


def lines() -> Iterator[str]:
    """What is there, with its sizes."""
    folder = environments.cache()
    sizes = {name: size(folder / name) for name in entries()}
    width = max(map(len, sizes), default=0)
    yield f"the cache is {folder}: {gigabytes(sum(sizes.values()))}"
    yield from (f"  {name:{width}}  {gigabytes(each)}" for name, each in sizes.items())


def remove(patterns: Sequence[str]) -> Iterator[str]:
    """Removes what the patterns name, and says of each what it was; what is in use stays."""
    names = [x for x in entries() if any(fnmatch.fnmatchcase(x, each) for each in patterns)]
    if patterns != ["*"] and not names:
        raise UserError(
            f"nothing in {environments.cache()} is named {' or '.join(patterns)}: `torchwheels env` lists "
            "what there is"
        )
    freed = 0
    for name in names:
        try:
            taken = environments.remove(name)
        except BlockingIOError:
            yield f"kept {name}: another process uses it"
            continue
        freed += taken
        yield f"removed {name}, {gigabytes(taken)}"
    yield f"freed {gigabytes(freed)}"
