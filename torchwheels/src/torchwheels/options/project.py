"""What a project says of its wheels: `[tool.torchwheels]` in pyproject.toml, or a file of its own."""

import contextlib
import difflib
import fnmatch
import functools
import keyword
import re
import shlex
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import Version

from torchwheels.errors import UserError
from torchwheels.options import indexes, releases
from torchwheels.options.releases import Cuda, Releases, Target, Torch, admitted, minor, sm
from torchwheels.system import files

Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0, lt=10**6)]
Limit: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=10**6)]
Some: TypeAlias = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


Values: TypeAlias = Mapping[str, object]
"""What the placeholders of a project's options stand for in a build."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Options, whose keys have dashes where these names have underscores."""

    def __post_init__(self) -> None:
        """Raises ValueError where an option has the right type, and is none all the same."""
        for field in msgspec.structs.fields(self):
            _check(field.name, getattr(self, field.name), field.encode_name)


class Tests(Table, frozen=True):
    """The project's own tests, which run away from its sources."""

    requires: tuple[str, ...] = ()
    """What is installed for the tests, besides the wheel and pytest."""
    paths: tuple[str, ...] = ()
    """The files and folders of the sources that the tests need."""
    command: str = ""
    """The shell's command that runs the tests; empty: `python -m pytest` with these paths."""
    require_gpu: str = ""
    """What that command takes for `--require-gpu`; empty: it runs pytest, where a test fails if the reason of its skip
    names GPUs or CUDA."""
    network: bool = False
    """Whether the tests may use the network in a container, once all is installed."""
    memory: Limit = 0.0
    """GB of memory that they may take in a container; 0: four fifths of what the engine has."""
    minutes: Positive = 60.0
    """How long they may take."""


class Release(Table, frozen=True):
    """A release of torch that the table does not have: a nightly, or NVIDIA's own build."""

    version: str
    """As pip names it, such as `2.16.0.dev20261101+cu130`."""
    pythons: Some
    """The Pythons that it has a wheel for."""
    cuda: str = ""
    """The CUDA version that it is of; empty: none."""
    place: str = msgspec.field(default="", name="index")
    """The package index that has it; empty: pip's own."""
    image: str = ""
    """Where its targets build in Docker, for a CUDA version that is not known."""
    architectures: tuple[str, ...] = ()
    """What they compile for, likewise."""

    def __post_init__(self) -> None:
        """Raises ValueError where its CUDA is one of which nothing is known, or another than that of its version."""
        Table.__post_init__(self)
        known = releases.load().cudas
        if self.cuda not in ("", *known) and not (self.image and self.architectures):
            raise ValueError(
                f"torch {self.version} is of CUDA {self.cuda}, and only {', '.join(known)} are known: add `image` and "
                "`architectures`"
            )
        own = f"cu{self.cuda.replace('.', '')}" if self.cuda else "cpu"
        if re.fullmatch(rf"(?!{own}$)(cpu|cu\d+)", Version(self.version).local or ""):
            raise ValueError(f"torch {self.version} is not of CUDA {self.cuda!r}: correct `cuda`")


class OfTarget(Table, frozen=True):
    """What may be said of some targets alone."""

    build_requires: tuple[str, ...] = ()
    """What is installed for the build, besides what the project's pyproject.toml requires."""
    system_packages: tuple[str, ...] = ()
    """What apt installs in the image."""
    environment: dict[str, str] = {}
    """Variables of the build; [values of the build](#values-of-the-build) are filled in."""
    config_settings: dict[str, str | list[str]] = {}
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
    memory_per_job: Limit = 0.0
    """GB of memory that one compiler process takes; 0: what torch's headers were measured to take."""
    time_limit: Limit = 0.0
    """Minutes that the build of one target may take; 0: any number."""
    size_budget: Limit = 0.0
    """MB that the wheel may have; 0: any number."""
    allow_libraries: tuple[str, ...] = ()
    """Patterns of libraries of other projects that the wheel may hold or need."""
    tests: Tests = msgspec.field(default_factory=Tests)
    imports: tuple[str, ...] = msgspec.field(default=(), name="import")
    """The modules whose import is tried; empty: all at the top of the wheel."""


class Override(OfTarget, frozen=True, kw_only=True):
    """Options of some targets, over those of all."""

    select: str | Some
    """Patterns of their names, such as `*-cu13*`."""


class Options(OfTarget, frozen=True):
    """`[tool.torchwheels]`."""

    source: str = "."
    """The sources, as the command line names them; a folder is relative to the file with the table."""
    subdirectory: str = ""
    """The folder of the sources in which the project is."""
    targets: tuple[str, ...] = ()
    """The targets of the project: names, or patterns such as `3.1?-cu130*`; empty: `3.??-*`."""
    small: tuple[str, ...] = ()
    """Those of them that CI builds for each change; empty: the first."""
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
    yanked: dict[str, str] = {}
    """Versions that the index withdraws (PEP 592), each with the reason: installers take them only where one
    names them. `0.1.9` means all its wheels, `0.1.9+cu130.torch2.13` one."""
    overrides: tuple[Override, ...] = ()
    """[Options of some targets](#settings-of-some-targets)."""
    own_releases: tuple[Release, ...] = msgspec.field(default=(), name="releases")
    """[Releases of torch](#other-builds-of-torch) that are not in the table."""

    def __post_init__(self) -> None:
        """Raises ValueError where two releases have targets of one name, or differ in what a CUDA version is."""
        OfTarget.__post_init__(self)
        cudas: dict[str, object] = dict.fromkeys(["", *releases.load().cudas], ("", ()))
        for x in self.own_releases:
            if (own := (x.image, x.architectures)) != cudas.setdefault(x.cuda, own):
                said = f"releases has `image` or `architectures` for CUDA {x.cuda!r}"
                why = "other than what is known by then: leave them out, or make them equal"
                raise ValueError(f"{said}, {why}")
        seen: dict[tuple[str, ...], str] = {}
        for each, python in ((x, y) for x in self.own_releases for y in x.pythons):
            key = python, each.cuda, minor(each.version)
            if key in seen:
                raise ValueError(
                    f"releases has torch {seen[key]} and {each.version} for Python {python}, and a target is named by "
                    f"their {key[-1]}: leave one out"
                )
            seen[key] = each.version


class Project(Options, frozen=True, dict=True):
    """A project: its options, and where it says them."""

    file: Path | None = None
    """Where they were read; paths in them are relative to its folder."""
    name: str = ""
    """Of the distribution, where the same file says it."""
    table: Mapping[str, Any] = {}
    """The options as that file has them."""

    @functools.cached_property
    def releases(self) -> Releases:
        """The table of torch releases, with the targets that this project adds."""
        table = releases.load()
        torches, cudas = [*table.torches], {**table.cudas}
        for x in self.own_releases:
            of_cuda = (x.cuda,) if x.cuda else ()
            torches.append(Torch(x.version, of_cuda, x.pythons, own=True, index=x.place))
            if x.cuda:
                cudas.setdefault(x.cuda, Cuda(x.cuda, x.version, x.image, x.architectures))
        return replace(table, torches=tuple(torches), cudas=cudas, release=self.release)

    def in_folder(self, subdirectory: str) -> "Project":
        """The options, for the project in that folder of the sources."""
        table = {**self.table, "subdirectory": subdirectory}
        return of_table(table, "the options", self.file, self.name)

    def of_target(self, target: Target, preset: Mapping[str, Any] | None = None) -> "Project":
        """The options of one target: those of the table, over those of a `preset`, with what overrides replace."""
        table = merged(_table_of_target(preset or {}, target), _table_of_target(self.table, target))
        if table == self.table:
            return self
        return of_table(table, f"the options of {target.name}", self.file, self.name)

    def chosen_targets(self) -> tuple[Target, ...]:
        """What the project is tested with."""
        return self.releases.matching(self.targets or ("3.??-*",))

    def small_targets(self) -> tuple[Target, ...]:
        """What CI takes of them for each change."""
        return self.releases.matching(self.small) if self.small else self.chosen_targets()[:1]

    def targets_to_build(self, targets: Iterable[Target]) -> tuple[Target, ...]:
        """The targets whose wheels cover all of `targets`: where one wheel covers several, one of them.

        It then has the torch that the wheel is built beside.
        """
        if not self.stable:
            return tuple(targets)
        self.releases.torch(self.stable, "stable: torch")
        found: dict[str, Target] = {}
        for target in sorted(targets, key=lambda target: target.names_torch):
            built = replace(target, torch=self.stable, names_torch=False, is_extra=False, index="")
            found.setdefault(f"{target.label} {target.machine.name}", built)
        return tuple(found.values())

    def variables(self, values: Values) -> dict[str, str]:
        """The variables of a build that depend on the project."""
        own = {name: template.format(**values) for name, template in self.environment.items()}
        return {"TORCH_CUDA_ARCH_LIST": f"{values['architectures']}", **own}

    def backend_settings(self, values: Values) -> dict[str, str | list[str]]:
        """The config settings of a build."""
        return {
            name: given.format(**values)
            if isinstance(given, str)
            else [each.format(**values) for each in given]
            for name, given in self.config_settings.items()
        }

    def architectures(self, target: Target) -> tuple[str, ...]:
        """The GPU compute capabilities that a wheel of `target` has code for."""
        said = self.variables(values_of(target))["TORCH_CUDA_ARCH_LIST"]
        return tuple(re.findall(r"[^; ]+", said))

    def allows(self, names: Iterable[str]) -> bool:
        """Whether the wheel may hold or need a library of one of these names."""
        return any(fnmatch.fnmatchcase(x, each) for x in names for each in self.allow_libraries)

    def expectation(self, target: Target, of_others: bool = False) -> "Expectation":
        """What the project promises of its wheel for `target`."""
        return Expectation(target, self, self.architectures(target), self.torch, of_others)


@dataclass(frozen=True)
class Expectation:
    """What the project and the target promise of a wheel."""

    target: Target
    options: Project
    """Those of the target."""
    architectures: tuple[str, ...]
    """GPU compute capabilities, as TORCH_CUDA_ARCH_LIST has them: `9.0`, `12.0+PTX`."""
    torches: str = ""
    """A specifier of the torches that its libraries work with, where the project declares one."""
    of_others: bool = False
    """Whether another tool has built it, which writes no label and no build record."""


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
        if any(fnmatch.fnmatchcase(target.name, each) for each in _several(override["select"])):
            found = merged(found, {k: v for k, v in override.items() if k != "select"})
    return found


def _several(texts: str | Iterable[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else [*texts]


@functools.cache
def preset(name: str) -> dict[str, Any]:
    """The options that a project of others is known to want, by its normalised name."""
    text = Path(__file__).with_name("presets.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, dict[str, Any]]).get(name, {})


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


def read_file(file: Path, expected: str) -> dict[str, Any]:
    """What a TOML file says; an error says what is `expected` where there is none."""
    try:
        found: dict[str, Any] = files.read(file, msgspec.toml.decode)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): {expected}") from None
    except ValueError as error:
        raise UserError(f"{file} is not TOML: {error}") from None
    return found


def load(file: Path) -> Project:
    """The project that `file` describes: its `[tool.torchwheels]`, else the whole file."""
    usual = "the pyproject.toml that has them under [tool.torchwheels]"
    data = read_file(file, f"`--config` names a TOML file with the options, or {usual}")
    for key in ("tool", "project"):
        if not isinstance(said := data.get(key, {}), dict):
            way_out = f"a table is expected: write [{key}], or leave it out"
            raise UserError(f"{file}: {key} is {said!r}, but {way_out}")
    whole = data if file.name != "pyproject.toml" else {}
    table = data.get("tool", {}).get("torchwheels", whole)
    said = str(data.get("project", {}).get("name", ""))
    try:
        name = canonicalize_name(said, validate=bool(said))
    except InvalidName:
        why = "but a name of letters, digits, `-`, `_` and `.` is expected"
        raise UserError(f"{file}: [project] has the name {said!r}, {why}") from None
    return of_file(table, file, f"{file}: [tool.torchwheels]", name)


def of_file(table: Mapping[str, Any], file: Path, where: str, name: str = "") -> Project:
    """The project that a table in `file` describes, which has the files that it names; an error says `where`."""
    found = of_table(table, where, file=file, name=name)
    for option in ("targets", "small"):
        try:
            found.releases.matching(getattr(found, option))
        except UserError as error:
            raise UserError(f"{where}: {option}: {error}") from None
    if others := {*found.small_targets()} - {*found.chosen_targets()}:
        name = min(x.name for x in others)
        raise UserError(f"{where}: small names {name}, which is none of the project's targets")
    names = [target.name for target in found.releases.targets]
    for pattern in (x for each in found.overrides for x in _several(each.select)):
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"{where}: overrides select {pattern!r}, but no target is named so (`torchwheels targets` lists all)"
            )
    for patch in (x for each in (found, *found.overrides) for x in each.patches):
        if not (file.parent / patch).is_file():
            raise UserError(f"{where}: patches has {patch!r}, but there is no such file beside it")
    return found


def of_table(
    table: Mapping[str, Any], where: str, file: Path | None = None, name: str = ""
) -> Project:
    """The project that a table describes; an error names it by `where`."""
    known: Any = table
    if isinstance(table, dict):
        known = {_EARLIER_NAMES.get(str(x), str(x)): table[x] for x in table}
    options = read(Options, known, where)
    values = {each: getattr(options, each) for each in options.__struct_fields__}
    return Project(**values, file=file, name=name, table=table)


_Kind = TypeVar("_Kind", bound=Table)


def read(kind: type[_Kind], table: Any, where: str) -> _Kind:
    """What a table says, whose keys are the fields of `kind`."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise UserError(_explained(error, kind, table, where)) from None


# Of options that were renamed; they are taken for one more release.
_EARLIER_NAMES = {"cells": "targets"}

_TABLES: dict[str, type[Table]] = {"tests": Tests, "overrides": Override, "releases": Release}


def _explained(error: msgspec.ValidationError, kind: type[Table], value: Any, where: str) -> str:
    """What msgspec's error says of a table, with the option, its value, and what is expected."""
    said, _, path = str(error).partition(" - at `$")
    for key, number in re.findall(r"\.([\w-]+)|\[(\d+)\]", path.partition("[...]")[0]):
        value = value[key or int(number)]
        where, kind = (f"{where}: {key}", _TABLES.get(key, kind)) if key else (where, kind)
    if isinstance(error.__cause__, ValueError):  # of `Table`
        return f"{where}: {said}"
    (quoted, *_) = re.findall(r"(?s)`(.*?)`", said)
    if said.startswith("Object contains"):
        names = [x.encode_name for x in msgspec.structs.fields(kind)]
        near = difflib.get_close_matches(quoted, names, n=1, cutoff=0.0)[0]
        return f"{where} has no option {quoted!r}: did you mean {near!r}?"
    if said.startswith("Object missing"):
        return f"{where} lacks the option {quoted!r}"
    return f"{where} is {value!r}: {said[0].lower()}{said[1:]}"


def _like(pattern: str) -> Callable[[str], object]:
    return re.compile(pattern).fullmatch


def _is_inside(text: str) -> bool:
    return bool(text) and not Path(text).is_absolute() and ".." not in Path(text).parts


def _is_for_pip(text: str) -> object:
    is_no_name = re.fullmatch(r"--?\w\S*|[^\s<>=!~,;-][^\s<>=!~,;]*/\S*|/\S+", text)
    return is_no_name or Requirement(text)  # an option, a path or an address


def _is_module(text: str) -> bool:
    return all(x.isidentifier() and not keyword.iskeyword(x) for x in text.split("."))


# For options of one kind of texts: which, and what returns None or False, or raises ValueError, at another.
_TEXTS: dict[str, tuple[str, Callable[[str], object]]] = {
    "subdirectory": ("a folder in the sources is", _is_inside),
    "paths": ("a path in the sources is", _is_inside),
    "build_requires": ("a requirement such as 'numpy>=2' is", Requirement),
    "requires": ("a requirement such as 'numpy>=2' is", _is_for_pip),
    "system_packages": ("a package of apt is", _like(r"[a-z0-9][\w.+:~-]*(=[\w.+:~-]+)?")),
    "environment": ("the name of a variable is", _like(r"[A-Za-z_]\w*")),
    "stable": ("the version of a torch, such as '2.13.0', is", lambda x: not Version(x).local),
    "version": (
        "that of a torch, such as '2.16.0.dev20261101+cu130', is",
        lambda x: Version(x).major == 2,
    ),
    "repair": ("a command with {wheel} and {dest} is", _like(r"(?s)(?=.*\{wheel\}).*\{dest\}.*")),
    "torch": ("versions such as '>=2.10' are", lambda x: bool(admitted(SpecifierSet(x)))),
    "release": ("a known CUDA version, such as '13.0', is", lambda x: x in releases.load().cudas),
    "yanked": ("a version such as '0.1.9' is", lambda text: SpecifierSet(f"=={text}")),
    "imports": ("the name of a module is", _is_module),
    "command": ("a command is", lambda text: bool(shlex.split(text, comments=True))),
    "place": ("an address such as 'https://example.org/nightly' is", _like(f"{indexes.ADDRESS}.*")),
    "pythons": ("a Python such as '3.12' or '3.14t' is", _like(r"3\.\d+t?")),
    "cuda": ("a version such as '13.0' is", _like(r"\d+\.\d+")),
    "architectures": ("a compute capability such as '9.0' is", _like(releases.ARCHITECTURE)),
}


def _texts_in(value: Any) -> list[str]:
    """All texts of an option; a table in it has checked its own."""
    if isinstance(value, dict):
        value = (*value, *value.values())
    inner = value if isinstance(value, tuple | list) else ()
    return [value] if isinstance(value, str) else [x for each in inner for x in _texts_in(each)]


def _check(name: str, value: Any, where: str) -> None:
    for text in _texts_in(value):
        if "\0" in text:  # no command, variable or path can have one
            why = "but a text without NUL is expected: leave the character out"
            raise ValueError(f"{where} has {text!r}, {why}")
    if name in _TEXTS and (value != "" or name == "version"):
        expected, check = _TEXTS[name]
        for text in _several(value):
            with contextlib.suppress(ValueError):
                if check(text) not in (None, False):
                    continue
            raise ValueError(f"{where} has {text!r}, but {expected} expected")
    if name == "repair":
        _filled(value, {"wheel": "", "dest": ""}, f"{where} is set")
    if name == "before_build":
        _filled(value, _any_values(), f"{where} is set")
    for key, given in value.items() if name in ("environment", "config_settings") else ():
        for text in _several(given):
            if name == "environment" and key in ("PATH", "HOME", "TMPDIR"):
                raise ValueError(f"{where} sets {key}, which is the build's own: leave it out")
            filled = _filled(text, _any_values(), f"{where} sets {key}")
            if key == "TORCH_CUDA_ARCH_LIST":
                _check("architectures", re.findall(r"[^; ]+", filled), f"{where}: {key}")


def _filled(template: str, values: Values, where: str) -> str:
    """`template` with the values of its placeholders; an error says `where` it stands."""
    try:
        for _, name, form, conversion in string.Formatter().parse(template):
            # No attribute of a value, and no form but what is put between several: `{jobs:>9999999999}` is long.
            is_list = isinstance(values.get(name or ""), _List)
            if name and (name not in values or conversion or (form and not is_list)):
                raise KeyError
        return template.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        raise ValueError(
            f"{where} to {template!r}: it may hold {', '.join(f'{{{key}}}' for key in values)}, and "
            "other braces doubled"
        ) from None


def _any_values() -> Values:
    return values_of(next(target for target in releases.load().targets if not target.cuda))
