"""Which targets the wheels of a farm serve."""

from __future__ import annotations

import json

from torchwheels.farm.published import Row
from torchwheels.index import site
from torchwheels.options import Target, minor, numbers, releases


class Serving:
    """Asks once for all wheels of which the same is known: there may be thousands."""

    def __init__(self) -> None:
        self._known: dict[str, list[Target]] = {}

    def targets(self, row: Row) -> list[Target]:
        """The targets that a wheel serves, the newest torch first."""
        build = row["build"]
        said = [build["target"], build["cuda"], row["works_with"]["python"], row["tags"][0]]
        said += [site.label(row), row["requires_python"], *map(str, site.torches(row))]
        key = json.dumps(said)
        if key not in self._known:
            found = [x for x in releases.load().targets if site.works_with(row, x)]
            self._known[key] = sorted(found, key=lambda x: numbers(x.torch), reverse=True)
        return self._known[key]

    def places(self, row: Row) -> list[str]:
        """Where an index lists it, such as `cu130/torch2.13`."""
        return [*dict.fromkeys(f"{x.label}/torch{minor(x.torch)}" for x in self.targets(row))]
