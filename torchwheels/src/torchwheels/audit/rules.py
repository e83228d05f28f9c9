"""The rules that a wheel must keep, checked on every library in it. None passes because there is nothing to check."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from packaging.specifiers import SpecifierSet

from torchwheels.audit import libraries, metadata
from torchwheels.errors import UserError
from torchwheels.options import Expectation, Releases, Target, numbers
from torchwheels.system import machines, processes
from torchwheels.wheel import Wheel

Rule = Callable[[Wheel, Expectation], Iterator[str]]

RULES: tuple[Rule, ...] = tuple(
    rule
    for module in (libraries, metadata)
    for name, rule in vars(module).items()
    if getattr(rule, "__module__", "") == module.__name__ and not name.startswith("_")
)
"""All public functions of these modules, in their order."""

# What only torchwheels writes.
_OF_OUR_BUILDS = (metadata.build_record, metadata.bill_of_materials)

# They check the metadata and the file. The others check libraries, and so fail if there is none.
_OF_THE_FILE = ("size", "metadata", "installed_files", "record", "build_record")

NO_LIBRARY = "it holds no shared library: its setup has compiled nothing"


def findings(wheel: Wheel, expectation: Expectation) -> dict[str, list[str]]:
    """The faults that each rule finds in the wheel."""
    found = {}
    for rule in (x for x in RULES if not (expectation.of_others and x in _OF_OUR_BUILDS)):
        has_some = wheel.libraries or rule.__name__ in _OF_THE_FILE
        try:
            found[rule.__name__] = [*rule(wheel, expectation)] if has_some else [NO_LIBRARY]
        # Of any kind: of auditwheel, say, or about a bill of materials that is no JSON.
        except Exception as error:
            if processes.is_of_full_disk(error):
                raise
            found[rule.__name__] = [f"it cannot be checked: {type(error).__name__}: {error}"]
    return found


def target_of(wheel: Wheel, torch: str, releases: Releases) -> Target:
    """The target of a wheel without a build record, built against `torch`: by its tag, its label and its libraries."""
    release = releases.torch(torch)
    image = releases.cpu["image"]
    machine = machines.of_name(min(tag.platform for tag in wheel.tags))
    usual = release.version, None, image, True
    targets = (Target(each, *usual, machine=machine) for each in release.pythons)
    target = next(filter(wheel.takes, targets), None)
    if target is None:
        raise UserError(
            f"{wheel.path.name} is for Python {wheel.pythons}, but torch {release.version} is for "
            f"{', '.join(release.pythons)}"
        )
    toolkits = [x.gpu_code.toolkit for x in wheel.libraries.values() if x.gpu_code.toolkit]
    needed = wheel.cuda or ("".join(toolkits[:1]) and f"=={numbers(toolkits[0])[0]}.*")
    if not needed and not any(library.gpu_code for library in wheel.libraries.values()):
        return target
    # torch is published for several versions of CUDA; a wheel names its own, or takes that of PyPI's torch.
    fitting = [x for x in releases.cudas.values() if SpecifierSet(needed or "").contains(x.version)]
    named = [x for x in fitting if x.label in (wheel.version.local or "").split(".")]
    default = [x for x in fitting if x.version == release.cudas[0]]
    if not fitting:
        known = ", ".join(releases.cudas)
        raise UserError(f"{wheel.path.name} needs CUDA {needed}, but only {known} are known")
    cuda = (named or default or fitting[::-1])[0]
    return replace(target, cuda=cuda, image=cuda.image)
