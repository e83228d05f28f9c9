"""What a project says of its wheels: `[tool.torchwheels]` in pyproject.toml, or a file of its own."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from torchwheels.errors import UserError
from torchwheels.options.releases import ARCHITECTURE, Cuda, Releases, Target, Torch, sm
from torchwheels.options.releases import load as load_releases

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
class Release:
    """A release of torch that the table does not have: a nightly, or NVIDIA's own build."""

    version: str = ""
    """As pip names it, such as `2.16.0.dev20261101+cu130`."""
    cuda: str = ""
    """The CUDA version that it is of; empty: none."""
    pythons: tuple[str, ...] = ()
    """The Pythons that it has a wheel for."""
    index: str = ""
    """The package index that has it; empty: pip's own."""
    image: str = ""
    """Where its targets build in Docker, for a CUDA version that is not known."""
    architectures: tuple[str, ...] = ()
    """What they compile for, likewise."""


@dataclass(frozen=True)
class Project:
    """The table, whose keys have dashes where these names have underscores."""

    source: str = "."
    """The sources, as the command line names them; a folder is relative to the file with the table."""
    subdirectory: str = ""
    """The folder of the sources in which the project is."""
    targets: tuple[str, ...] = ()
    """The targets of the project: names, or patterns such as `3.1?-cu130*`; empty: `3.??-*`."""
    small: tuple[str, ...] = ()
    """Those of them that CI builds for each change; empty: the first."""
    build_requires: tuple[str, ...] = ()
    """What pip installs for the build, besides what the project's pyproject.toml requires."""
    system_packages: tuple[str, ...] = ()
    """What apt installs in the image."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the build; [values of the build](#values-of-the-build) are filled in."""
    config_settings: Mapping[str, str | list[str]] = field(default_factory=dict)
    """What the project's build backend is told, as by pip's `--config-settings`; filled in alike."""
    before_all: str = ""
    """A shell command that runs once before all builds, in each container or on this machine: in a copy of the sources,
    which all builds then take."""
    before_build: str = ""
    """A shell command that runs before each build, in the build's own copy of the sources and with its variables;
    filled in alike."""
    repair: str = ""
    """A shell command in place of `auditwheel repair`: it takes {wheel}, and leaves one wheel in the folder {dest}."""
    network: bool = False
    """Whether the project's code may use the network while it is built in a container; what it requires is installed
    before."""
    pretend_gpu: bool = False
    """Whether the build of a CUDA target finds a GPU: `torch.cuda.is_available()` and what else is asked about one."""
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
    cross_compile: bool = False
    """Whether its wheels can be built on a machine with another processor: its build calls compilers by their names
    alone, and links nothing of torch or Python."""
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
    overrides: tuple[Mapping[str, Any], ...] = ()
    """[Options of some targets](#settings-of-some-targets)."""
    own_releases: tuple[Release, ...] = field(default=(), metadata={"key": "releases"})
    """[Releases of torch](#other-builds-of-torch) that are not in the table."""
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
        own = self.own_releases
        torches = [
            Torch(x.version, (x.cuda,) if x.cuda else (), x.pythons, own=True, index=x.index)
            for x in own
        ]
        cudas = [Cuda(x.cuda, x.version, x.image, x.architectures) for x in own if x.cuda]
        return dataclasses.replace(table.with_own(torches, cudas), release=self.release)

    def in_folder(self, subdirectory: str) -> Project:
        """The options, for the project in that folder of the sources."""
        table = {**self.table, "subdirectory": subdirectory}
        return dataclasses.replace(self, subdirectory=subdirectory, table=table)

    def of_target(self, target: Target, preset: Mapping[str, Any] | None = None) -> Project:
        """The options of one target: those of the table, over those of a `preset`, with what overrides replace."""
        table = merged(_table_of_target(preset or {}, target), _table_of_target(self.table, target))
        if table == self.table:
            return self
        where = f"the options of {target.name}"
        return dataclasses.replace(of_table(table, where), file=self.file, name=self.name)

    def chosen_targets(self) -> tuple[Target, ...]:
        """What the project is tested with."""
        return self.releases.matching(self.targets or ("3.??-*",))

    def small_targets(self) -> tuple[Target, ...]:
        """What CI takes of them for each change."""
        return self.releases.matching(self.small) if self.small else self.chosen_targets()[:1]

    def targets_to_build(self, targets: Iterable[Target]) -> tuple[Target, ...]:
        """The targets whose wheels cover all of `targets`: where one wheel covers several, one of them."""
        if not self.stable:
            return tuple(targets)
        found: dict[str, Target] = {}
        for target in sorted(targets, key=lambda target: target.names_torch):
            found.setdefault(f"{target.label} {target.machine.name}", target)
        return tuple(map(self.target_to_build, found.values()))

    def target_to_build(self, target: Target) -> Target:
        """The target, with the torch that its wheel is built beside."""
        if not self.stable:
            return target
        return dataclasses.replace(
            target, torch=self.stable, names_torch=False, is_extra=False, index=""
        )

    def variables(self, values: Values) -> dict[str, str]:
        """The variables of a build that depend on the project."""
        own = {
            name: filled(template, values, f"the option `environment` sets {name}")
            for name, template in self.environment.items()
        }
        return {"TORCH_CUDA_ARCH_LIST": f"{values['architectures']}", **own}

    def backend_settings(self, values: Values) -> dict[str, str | list[str]]:
        """The config settings of a build."""
        found: dict[str, str | list[str]] = {}
        for name, given in self.config_settings.items():
            where = f"the option `config-settings` sets {name}"
            if isinstance(given, list):
                found[name] = [filled(each, values, where) for each in given]
            else:
                found[name] = filled(given, values, where)
        return found

    def architectures(self, target: Target) -> tuple[str, ...]:
        """The GPU compute capabilities that a wheel of `target` has code for."""
        return tuple(
            re.findall(r"[^; ]+", self.variables(values_of(target))["TORCH_CUDA_ARCH_LIST"])
        )


@dataclass(frozen=True)
class Expectation:
    """What the project and the target promise of a wheel."""

    target: Target
    manylinux: str
    architectures: tuple[str, ...]
    """GPU compute capabilities, as TORCH_CUDA_ARCH_LIST has them: `9.0`, `12.0+PTX`."""
    size_budget: float = 0.0
    """In MB (10**6 bytes); 0 where there is none."""
    allow_libraries: tuple[str, ...] = ()
    """Patterns of the further libraries that the wheel may bundle or need."""
    torches: str = ""
    """A specifier of the torches that its libraries work with, where the project declares one."""
    of_others: bool = False
    """Whether another tool has built it, which writes no label and no build record."""


def expectation_of(project: Project, target: Target, of_others: bool = False) -> Expectation:
    """What `project` promises of its wheel for `target`."""
    return Expectation(
        target=target,
        manylinux=load_releases().manylinux,
        architectures=project.architectures(target),
        size_budget=project.size_budget,
        allow_libraries=project.allow_libraries,
        torches=project.torch,
        of_others=of_others,
    )


Values: TypeAlias = Mapping[str, object]
"""What the placeholders of a project's options stand for in a build."""


class _List(tuple[str, ...]):
    """What a placeholder of several values stands for: `{sm}` is `90;120`, and `{sm:,}` is `90,120`."""

    def __format__(self, separator: str) -> str:
        return (separator or ";").join(self)


def merged(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`table` with what another one says in its place; tables in it, such as the environment, are merged."""
    both = {key: merged(table[key], over[key]) for key in table if isinstance(over.get(key), dict)}
    return {**table, **over, **both}


def _table_of_target(table: Mapping[str, Any], target: Target) -> dict[str, Any]:
    found = {key: value for key, value in table.items() if key != "overrides"}
    for override in table.get("overrides", ()):
        if any(fnmatch.fnmatchcase(target.name, each) for each in _selected(override["select"])):
            found = merged(found, {k: v for k, v in override.items() if k != "select"})
    return found


def _selected(patterns: str | list[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else patterns


@functools.cache
def preset(name: str) -> dict[str, Any]:
    """The options that a project of others is known to want, by its normalised name."""
    table: dict[str, dict[str, Any]] = tomllib.loads(
        Path(__file__).with_name("presets.toml").read_text()
    )
    return table.get(name, {})


def values_of(target: Target, jobs: str = "1", cuda_home: str = "", origin: str = "") -> Values:
    """What templates may hold, in the forms that projects want their GPU architectures in."""
    return {
        "label": target.label,
        "architectures": _List(target.architectures),
        "capabilities": _List(x.removesuffix("+PTX") for x in target.architectures),
        "sm": _List(map(sm, target.architectures)),
        "sm_names": _List(f"sm_{sm(x)}" for x in target.architectures),
        "cmake": _List(map(cmake_architecture, target.architectures)),
        "gencode": _List(gencode(target.architectures)),
        "jobs": jobs,
        "cuda_home": cuda_home,
        "origin": origin,
    }


def cmake_architecture(architecture: str) -> str:
    """`90-real`, or `90` where there shall be PTX, too: as CMAKE_CUDA_ARCHITECTURES has it."""
    return sm(architecture) + ("" if architecture.endswith("+PTX") else "-real")


def gencode(architectures: Iterable[str]) -> Iterator[str]:
    """What nvcc is told of GPU architectures."""
    for each in architectures:
        number = sm(each)
        yield f"-gencode=arch=compute_{number},code=sm_{number}"
        if each.endswith("+PTX"):
            yield f"-gencode=arch=compute_{number},code=compute_{number}"


def filled(template: object, values: Values, where: str) -> str:
    """`template` with the values of its placeholders; an error says `where` it stands."""
    if not isinstance(template, str):
        raise UserError(f'{where} to {template!r}, but a text is expected: "..."')
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not TOML: {error}") from None
    table = data if file.name != "pyproject.toml" else {}
    try:
        table = data.get("tool", {}).get("torchwheels", table)
        name = canonicalize_name(data.get("project", {}).get("name", ""))
    except AttributeError:
        raise UserError(f"{file}: [tool] and [project] are tables, and a name is a text") from None
    return dataclasses.replace(of_file(table, file, f"{file}: [tool.torchwheels]"), name=name)


def of_file(table: Mapping[str, Any], file: Path, where: str) -> Project:
    """The project that a table in `file` describes, which has the files that it names; an error says `where`."""
    found = of_table(table, where)
    for pattern in (x for each in found.overrides for x in _selected(each["select"])):
        if not any(fnmatch.fnmatchcase(target.name, pattern) for target in found.releases.targets):
            raise UserError(
                f"{where}: overrides select {pattern!r}, but no target is named so (`torchwheels targets` lists all)"
            )
    patches = [x for each in found.overrides for x in each.get("patches", ())]
    for patch in (*found.patches, *patches):
        if not (file.parent / patch).is_file():
            raise UserError(f"{where}: patches has {patch!r}, but there is no such file beside it")
    return dataclasses.replace(found, file=file)


def of_table(table: Mapping[str, Any], where: str) -> Project:
    """The project that a table describes; an error names it by `where`."""
    return dataclasses.replace(read(Project, table, where), table=table)


_Table = TypeVar("_Table", bound="DataclassInstance")

# What an override cannot say: it holds for all targets.
OF_ALL_TARGETS = (
    "source", "subdirectory", "targets", "small", "stable", "cross-compile", "release", "torch", "yanked", "overrides",
    "own_releases",
)  # fmt: skip

# Of options that were renamed; they are taken for one more release.
_EARLIER_NAMES = {"cells": "targets"}


def read(kind: type[_Table], table: Mapping[str, Any], where: str) -> _Table:
    """What a table says, whose keys are the fields of `kind`."""
    return kind(**_values(kind, table, where))


def _values(
    kind: type[_Table], table: Mapping[str, Any], where: str, without: Iterable[str] = ()
) -> dict[str, Any]:
    """The values of `table`, by the names that `kind` has."""
    if not isinstance(table, dict):
        raise UserError(f"{where} is {table!r}, but a table is expected")
    options = {
        key: option
        for option in dataclasses.fields(kind)
        if (key := option.metadata.get("key", option.name.replace("_", "-")))
        and option.name not in without
    }
    values: dict[str, Any] = {}
    defaults = kind()
    for given, value in table.items():
        key = _EARLIER_NAMES.get(given, given)
        if key not in options:
            near = difflib.get_close_matches(key, options, n=1, cutoff=0.0)[0]
            raise UserError(f"{where} has no option {key!r}: did you mean {near!r}?")
        name = options[key].name
        if name == "overrides":
            values[name] = _overrides(value, f"{where}: {key}")
        elif name == "own_releases":
            values[name] = _own_releases(value, f"{where}: {key}")
        else:
            values[name] = _converted(value, getattr(defaults, name), f"{where}: {key}")
            _check(name, values[name], f"{where}: {key}")
    return values


def _like(pattern: str) -> Callable[[str], object]:
    def check(text: str) -> None:
        if not re.fullmatch(pattern, text):
            raise ValueError

    return check


def _is_inside(text: str) -> None:
    if Path(text).is_absolute() or ".." in Path(text).parts:
        raise ValueError


def _is_for_pip(text: str) -> None:
    if not text.startswith("-") and "/" not in text:  # else an option, a path or an address
        Requirement(text)


# For options of one kind of texts: which, and what raises ValueError at another.
_TEXTS: dict[str, tuple[str, Callable[[str], object]]] = {
    "subdirectory": ("a folder in the sources is", _is_inside),
    "paths": ("a path in the sources is", _is_inside),
    "build_requires": ("a requirement such as 'numpy>=2' is", Requirement),
    "requires": ("a requirement such as 'numpy>=2' is", _is_for_pip),
    "system_packages": ("a package of apt is", _like(r"[a-z0-9][\w.+:~-]*(=[\w.+:~-]+)?")),
    "environment": ("the name of a variable is", _like(r"[A-Za-z_]\w*")),
    "stable": ("the version of a torch, such as '2.13.0', is", Version),
    "torch": ("versions such as '>=2.10' are", SpecifierSet),
    "yanked": ("a version such as '0.1.9' is", lambda text: SpecifierSet(f"=={text}")),
    "imports": ("the name of a module is", _like(r"[^\W\d]\w*(\.[^\W\d]\w*)*")),
    "command": ("a command is", shlex.split),
    "pythons": ("a Python such as '3.12' or '3.14t' is", _like(r"3\.\d+t?")),
    "cuda": ("a version such as '13.0' is", _like(r"\d+\.\d+")),
    "architectures": ("a compute capability such as '9.0' is", _like(ARCHITECTURE)),
}


def _check(name: str, value: Any, where: str) -> None:
    """Raises an error where the value of an option has the right type, and is none all the same."""
    if name in _TEXTS:
        expected, check = _TEXTS[name]
        for text in filter(None, [value] if isinstance(value, str) else value):
            try:
                check(text)
            except ValueError:
                raise UserError(f"{where} has {text!r}, but {expected} expected") from None
    if name in ("before_build", "repair"):
        paths = {"wheel": "", "dest": ""}
        filled(value, paths if name == "repair" else _any_values(), f"{where} is set")
    for key, given in value.items() if isinstance(value, Mapping) else ():
        several = name == "config_settings" and isinstance(given, list)
        for text in given if several else [given]:
            if not isinstance(text, str):
                raise UserError(f"{where}: {key} is {given!r}, but a text is expected")
            if name != "yanked":
                text = filled(text, _any_values(), f"{where} sets {key}")
            if key == "TORCH_CUDA_ARCH_LIST":
                _check("architectures", re.findall(r"[^; ]+", text), f"{where}: {key}")


def _any_values() -> Values:
    return values_of(next(target for target in load_releases().targets if not target.cuda))


def _tables(tables: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        name = where.rpartition(" ")[2]
        raise UserError(
            f"{where} is {tables!r}, but tables are expected: [[tool.torchwheels.{name}]]"
        )
    return tables


def _own_releases(tables: Any, where: str) -> tuple[Release, ...]:
    found = tuple(read(Release, table, where) for table in _tables(tables, where))
    for each in found:
        try:
            Version(each.version)
        except InvalidVersion:
            raise UserError(
                f"{where} has version = {each.version!r}, but that of a torch is expected, such as "
                "2.16.0.dev20261101+cu130"
            ) from None
        if not each.pythons:
            raise UserError(f'{where}: torch {each.version} has no `pythons`, such as ["3.12"]')
        known = load_releases().cudas
        if each.cuda and each.cuda not in known and not (each.image and each.architectures):
            raise UserError(
                f"{where}: torch {each.version} is of CUDA {each.cuda}, and only {', '.join(known)} are known: "
                "add `image` and `architectures`"
            )
    return found


def _overrides(tables: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """The tables as they are, whose options are right."""
    for table in _tables(tables, where):
        patterns = _selected(table.get("select", []))
        if not patterns or not all(isinstance(each, str) for each in patterns):
            raise UserError(
                f"{where} has select = {table.get('select')!r}, but a pattern of targets is expected, such "
                'as "*-cu13*", or a list of some'
            )
        options = {key: value for key, value in table.items() if key != "select"}
        _values(Project, options, where, OF_ALL_TARGETS)
    return tuple(tables)


def _converted(value: Any, default: Any, where: str) -> Any:
    """`value` as what `default` is; an error where it is something else."""
    if isinstance(default, Tests) and isinstance(value, dict):
        return read(Tests, value, where)
    if isinstance(default, tuple):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise UserError(f'{where} is {value!r}, but a list of texts is expected: ["...", "..."]')
    if isinstance(default, float) and isinstance(value, (int, float)):
        if not isinstance(value, bool) and 0 < value < 10**6:
            return float(value)
    elif isinstance(value, type(default)):
        return value
    names = {str: "a text", bool: "true or false", float: "a positive number"}
    raise UserError(f"{where} is {value!r}, but {names.get(type(default), 'a table')} is expected")
