"""What a project says of its wheels: `[tool.torchwheels]` in pyproject.toml, or a file of its own."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from packaging.utils import canonicalize_name

from torchwheels.errors import UserError
from torchwheels.releases import Releases, Target, sm
from torchwheels.releases import load as load_releases

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Tests:
    """The project's own tests, which run away from its sources."""

    requires: tuple[str, ...] = ()
    """What pip installs for the tests, besides the wheel and pytest."""
    paths: tuple[str, ...] = ()
    """The files and folders of the sources that the tests need."""
    command: str = ""
    """What runs the tests; empty: `python -m pytest` with these paths."""
    require_gpu: str = ""
    """What that command takes for `--require-gpu`; empty: a test fails if the reason of its skip names GPUs or CUDA."""
    network: bool = False
    """Whether the tests may use the network in a container, once all is installed."""
    memory: float = 0.0
    """GB of memory that they may take in a container; 0: four fifths of what the engine has."""
    minutes: float = 60.0
    """How long they may take."""


@dataclass(frozen=True)
class Project:
    """The table, whose keys have dashes where these names have underscores."""

    source: str = "."
    """The sources, as the command line names them; a folder is relative to the file with the table."""
    subdirectory: str = ""
    """The folder of the sources in which the project is."""
    targets: tuple[str, ...] = ()
    """The targets of the project: names, or patterns such as `3.1?-cu130*`; empty: all there are."""
    small: tuple[str, ...] = ()
    """Those of them that CI builds for each change; empty: the first."""
    build_requires: tuple[str, ...] = ()
    """What pip installs for the build, besides what the project's pyproject.toml requires."""
    system_packages: tuple[str, ...] = ()
    """What apt installs in the image."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the build. {label}, {architectures}, {sm}, {jobs}, {cuda_home} and {origin}
    (the commit of the sources, or their hash) are replaced by the values of the build."""
    config_settings: Mapping[str, str | list[str]] = field(default_factory=dict)
    """What the project's build backend is told, as by pip's `--config-settings`; replaced alike."""
    network: bool = False
    """Whether the project's code may use the network while it is built in a container; what it requires is installed
    before."""
    pretend_gpu: bool = False
    """Whether `torch.cuda.is_available()` is true in the build of a CUDA target."""
    patches: tuple[str, ...] = ()
    """Changes to the sources, applied by `patch -p1`."""
    memory_per_job: float = 0.0
    """GB of memory that one compiler process takes; 0: what torch's headers were measured to take."""
    time_limit: float = 0.0
    """Minutes that the build of one target may take; 0: any number."""
    size_budget: float = 0.0
    """MB that the wheel may have; 0: any number."""
    allow_libraries: tuple[str, ...] = ()
    """Patterns of libraries of other projects that the wheel may hold or need."""
    stable: str = ""
    """For libraries that use torch's stable ABI and nothing of Python: the torch to build beside.

    One wheel then works with every Python and every torch of its CUDA version.
    """
    release: str = ""
    """The CUDA version to build a wheel without a label with, for torch of any CUDA; its targets are `3.11-release` and
    the like."""
    torch: str = ""
    """For libraries that use torch's stable ABI: the torch versions that the wheel works with, such as `>=2.10`."""
    yanked: Mapping[str, str] = field(default_factory=dict)
    """Versions that the index withdraws (PEP 592), each with the reason: installers take them only where one
    names them. `0.1.9` means all its wheels, `0.1.9+cu130.torch2.13` one."""
    tests: Tests = Tests()
    imports: tuple[str, ...] = field(default=(), metadata={"key": "import"})
    """The modules whose import is tried; empty: all at the top of the wheel."""
    file: Path | None = field(default=None, metadata={"key": None})
    """Where all this was read; paths in it are relative to its folder."""
    name: str = field(default="", metadata={"key": None})
    """Of the distribution, where the same file says it."""
    table: Mapping[str, Any] = field(default_factory=dict, metadata={"key": None})
    """The options as that file has them."""

    @functools.cached_property
    def releases(self) -> Releases:
        """The table of torch releases, with the targets that this project adds."""
        table = load_releases()
        if self.release and self.release not in table.cudas:
            raise UserError(
                f"the option `release` is {self.release!r}, but one of {', '.join(table.cudas)} is expected"
            )
        return dataclasses.replace(table, release=self.release)

    def chosen_targets(self) -> tuple[Target, ...]:
        """What the project is tested with."""
        return self.releases.matching(self.targets) if self.targets else self.releases.targets

    def small_targets(self) -> tuple[Target, ...]:
        """What CI takes of them for each change."""
        return self.releases.matching(self.small) if self.small else self.chosen_targets()[:1]

    def targets_to_build(self, targets: Iterable[Target]) -> tuple[Target, ...]:
        """The targets whose wheels cover all of `targets`: where one wheel covers several, one of them."""
        if not self.stable:
            return tuple(targets)
        found: dict[str, Target] = {}
        for target in sorted(targets, key=lambda target: target.names_torch):
            found.setdefault(target.label, target)
        return tuple(map(self.target_to_build, found.values()))

    def target_to_build(self, target: Target) -> Target:
        """The target, with the torch that its wheel is built beside."""
        if not self.stable:
            return target
        return dataclasses.replace(target, torch=self.stable, names_torch=False)

    def variables(
        self, target: Target, jobs: str = "1", cuda_home: str = "", origin: str = ""
    ) -> dict[str, str]:
        """The variables of a build of `target` that depend on the project."""
        values = _replacements(target, jobs, cuda_home, origin)
        own = {
            name: _filled(template, values, f"the option `environment` sets {name}")
            for name, template in self.environment.items()
        }
        return {"TORCH_CUDA_ARCH_LIST": values["architectures"], **own}

    def backend_settings(
        self, target: Target, jobs: str, cuda_home: str, origin: str
    ) -> dict[str, str | list[str]]:
        """The config settings of a build of `target`."""
        values = _replacements(target, jobs, cuda_home, origin)
        found: dict[str, str | list[str]] = {}
        for name, given in self.config_settings.items():
            where = f"the option `config-settings` sets {name}"
            if isinstance(given, list):
                found[name] = [_filled(each, values, where) for each in given]
            else:
                found[name] = _filled(given, values, where)
        return found

    def architectures(self, target: Target) -> tuple[str, ...]:
        """The GPU compute capabilities that a wheel of `target` has code for."""
        return tuple(re.findall(r"[^; ]+", self.variables(target)["TORCH_CUDA_ARCH_LIST"]))


def _replacements(target: Target, jobs: str, cuda_home: str, origin: str) -> dict[str, str]:
    return {
        "label": target.label,
        "architectures": ";".join(target.architectures),
        "sm": ";".join(map(sm, target.architectures)),
        "jobs": jobs,
        "cuda_home": cuda_home,
        "origin": origin,
    }


def _filled(template: object, values: Mapping[str, str], where: str) -> str:
    if not isinstance(template, str):
        raise UserError(f'{where} to {template!r}, but a text is expected: "..."')
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError):
        raise UserError(
            f"{where} to {template!r}: it may hold {', '.join(f'{{{key}}}' for key in values)}, and "
            "other braces doubled"
        ) from None


def load(file: Path) -> Project:
    """The project that `file` describes: its `[tool.torchwheels]`, else the whole file."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"there is no {file}: `--config` names a TOML file with the options, or the "
            "pyproject.toml that has them under [tool.torchwheels]"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not TOML: {error}") from None
    table = data if file.name != "pyproject.toml" else {}
    table = data.get("tool", {}).get("torchwheels", table)
    name = canonicalize_name(data.get("project", {}).get("name", ""))
    found = of_table(table, f"{file}: [tool.torchwheels]")
    return dataclasses.replace(found, file=file, name=name)


def of_table(table: Mapping[str, Any], where: str) -> Project:
    """The project that a table describes; an error names it by `where`."""
    return dataclasses.replace(_read(Project, table, where), table=table)


_Table = TypeVar("_Table", Project, Tests)

# Of options that were renamed; they are taken for one more release.
_EARLIER_NAMES = {"cells": "targets"}


def _read(kind: type[_Table], table: Mapping[str, Any], where: str) -> _Table:
    options = {
        key: option
        for option in dataclasses.fields(kind)
        if (key := option.metadata.get("key", option.name.replace("_", "-")))
    }
    values: dict[str, Any] = {}
    defaults = kind()
    for given, value in table.items():
        key = _EARLIER_NAMES.get(given, given)
        if key not in options:
            near = difflib.get_close_matches(key, options, n=1, cutoff=0.0)[0]
            raise UserError(f"{where} has no option {key!r}: did you mean {near!r}?")
        name = options[key].name
        values[name] = _converted(value, getattr(defaults, name), f"{where}: {key}")
    return kind(**values)


def _converted(value: Any, default: Any, where: str) -> Any:
    """`value` as what `default` is; an error where it is something else."""
    if isinstance(default, Tests) and isinstance(value, dict):
        return _read(Tests, value, where)
    if isinstance(default, tuple):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise UserError(f'{where} is {value!r}, but a list of texts is expected: ["...", "..."]')
    if isinstance(default, float) and isinstance(value, (int, float)):
        if not isinstance(value, bool) and value > 0:
            return float(value)
    elif isinstance(value, type(default)):
        return value
    names = {str: "a text", bool: "true or false", float: "a positive number"}
    raise UserError(f"{where} is {value!r}, but {names.get(type(default), 'a table')} is expected")
