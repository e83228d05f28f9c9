"""Which targets the wheels of a farm serve."""

import json

from torchwheels.farm.published import Row
from torchwheels.index import site
from torchwheels.options import RELEASE, Target, minor, numbers, releases


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
        """Where an index lists it, such as `cu130/torch2.13`: also what the table of today no longer has."""
        found = [f"{x.label}/torch{minor(x.torch)}" for x in self.targets(row)]
        label = row["build"]["target"].split("-")[1]
        own = [f"{label}/torch{minor(row['build']['torch'])}"] if label != RELEASE else []
        return [*dict.fromkeys(found + own)]

    def pythons(self, row: Row) -> list[str]:
        """Which Pythons it serves."""
        own = row["build"]["target"].split("-")[0]
        return sorted({own, *(x.python for x in self.targets(row))})
