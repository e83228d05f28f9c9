"""The command line."""

import argparse
import dataclasses
import fnmatch
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchwheels import __version__, sources
from torchwheels.audit import reports
from torchwheels.build import toolchain
from torchwheels.errors import UserError
from torchwheels.farm import command as farm_command
from torchwheels.index import kept, make_site
from torchwheels.options import Project, Target, indexes, project, schema
from torchwheels.run import Order, engines, pipeline, testing
from torchwheels.system import X86_64, cache, files, machines, output, processes, scratch
from torchwheels.wheel import wheels_in

ARCHITECTURES = "TORCHWHEELS_ARCHITECTURES"
"""The variable that says for which GPU architectures builds compile."""

_LAST_TIME = 4354819198  # that a zip file can name: the end of 2107


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `torchwheels`: an error is one sentence, and an exit code for its kind."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    output.mask_streams()
    os.environ.setdefault("PATH", os.defpath)  # `env -i` leaves none
    end = words.index("--") if "--" in words else len(words)
    # Until 0.2 targets were cells.
    own = [re.sub(r"^--cell(?==|$)", "--target", word) for word in words[:end]]
    parser = _parser()
    given, others = parser.parse_known_args(own)
    if others and given.run != _test:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if given.run != _test and any(re.fullmatch("(--[^=]+=)?", word) for word in own):
        parser.error("an argument is empty: name something, or leave it out")
    given.arguments = [*others, *words[end + 1 :]]
    for number in processes.STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as below `nohup`
            signal.signal(number, _stop)
    if os.environ.get("TORCHWHEELS_PARENT") == str(os.getppid()):
        processes.end_with_parent()  # nox may be killed, and cannot tell us then
    if given.debug:
        os.environ[output.DEBUG] = "1"
    try:
        if "source" in given:
            _find_source(given)
        given.run(given)
        sys.stdout.flush()
    except BrokenPipeError:  # `torchwheels targets | head`
        # Python writes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (UserError, OSError, subprocess.CalledProcessError) as error:
        if os.environ.get(output.DEBUG):
            raise
        said = f"torchwheels: {processes.explained(error)}"
        if not isinstance(error, UserError) or error.code == 1:
            sys.exit(said)
        print(said, file=sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:
        how = "keeps what the next build can use (`torchwheels clean` removes it)"
        print(f"torchwheels: stopped; {cache.place()} {how}", file=sys.stderr)
        sys.exit(130)


def _stop(number: int, frame: object) -> None:
    """Treats every termination signal like Ctrl-C, which cleans up; a second one does not interrupt that."""
    for each in processes.STOPPING:
        signal.signal(each, lambda *_: None)  # SIG_IGN has Python complain of one that is pending
    raise KeyboardInterrupt


# What several commands take.
_SHARED: dict[str, dict[str, Any]] = {
    "source": {
        "nargs": "?",
        "help": "NAME==VERSION from PyPI, a folder, an archive, or git+URL@COMMIT (default: the project whose "
        "pyproject.toml is here, which `--backend auto` then trusts)",
    },
    "--subdirectory": {"help": "the folder of the sources in which the project is", "default": ""},
    "--config": {"help": "a TOML file with the options of the project", "type": Path},
    "--dist": {"help": "the folder of the wheels (default: dist)", "type": Path, "default": "dist"},
    "--site": {"help": "the folder to write (default: site)", "type": Path, "default": "site"},
    "--backend": {
        "choices": engines.BACKENDS,
        "help": "where the project's own code runs: in a container of the target's image, on this machine, or with "
        "`auto` there where no engine answers (default: docker; the engine is that of DOCKER_HOST, or of the context)",
    },
    "--debug": {
        "action": "store_true",
        "help": "show whole commands and tracebacks (default: an error is a sentence)",
    },
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchwheels",
        description="Builds, tests, audits and indexes wheels of PyTorch extensions, from unmodified sources.",
        epilog="`torchwheels build torchsort==0.1.9 --target 3.11-cpu --backend local` needs no Docker; "
        "`torchwheels COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"torchwheels {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = functools.partial(_add, commands)
    source = ("source", "--subdirectory", "--config", "--backend")

    command = add(_build, "build", "build, audit and import wheels", *source, "--dist")
    said = "a Python and a CUDA, such as 3.11-cpu or 3.11-cu130 (repeatable; default: as the torch at hand)"
    command.add_argument("--target", action="append", default=[], help=said)
    said = "all targets of the project, where none is named"
    command.add_argument("--all", action="store_true", help=said)
    said = "run the project's tests on a wheel; what follows `--` is for their command"
    command = add(_test, "test", said, *source, "--dist")
    command.add_argument("--target", required=True, help="a Python and a CUDA, such as 3.11-cpu")
    command.add_argument("--wheel", type=Path, help="which wheel (default: the target's in --dist)")
    said = "fail where a GPU test is skipped"
    command.add_argument("--require-gpu", action="store_true", help=said)
    said = "check wheels, and write a build report beside each"
    command = add(_audit, "audit", said, "--config", "--dist")
    said = "for wheels that another tool has built, without a build report: beside which torch, such as 2.13"
    command.add_argument("--torch", metavar="VERSION", help=said)
    command.add_argument("wheel", type=Path, nargs="*", help="which (default: all in --dist)")
    said = "make a package index and its page of wheels that are fit to publish"
    add(_index, "index", said, "--config", "--dist", "--site")
    command = add(_merge, "merge", "put the wheels of several builds into one folder", "--dist")
    command.add_argument("folder", type=Path, nargs="+", help="where a build left its wheels")
    command = add(_reproduce, "reproduce", "build twice, and compare", *source)
    command.add_argument("--target", action="append", required=True, help="which (repeatable)")
    command.set_defaults(all=False)
    farm = commands.add_parser("farm", help="build many projects, and index them all")
    of_farm = farm.add_subparsers(required=True, metavar="COMMAND")
    farm_command.add(functools.partial(_add, of_farm))
    command = add(_fetch, "fetch", "fetch wheels that CI has built, from GitHub", "--dist")
    named = command.add_mutually_exclusive_group()
    named.add_argument("--target", default="*", help="which, such as 3.11-cpu (default: all)")
    named.add_argument("--name", help="an artifact of another name than wheel-TARGET, or a pattern")
    command.add_argument("--repository", default="", help="OWNER/NAME (default: git's origin)")
    said = "the number of a run (default: the newest of each)"
    command.add_argument("--run", dest="run_number", default="", help=said)
    command = add(_matrix, "matrix", "print the jobs of CI", "--config")
    command.add_argument("targets", choices=["small", "full"], help="which targets of the project")
    said = "list the targets there can be"
    command = add(_targets, "targets", said, "--config", aliases=["cells"])
    said = "which, such as 3.11-cpu, '3.1?-cu13*' or a part: cu130, torch2.9"
    command.add_argument("pattern", nargs="*", help=said)
    said = "print a JSON schema of the options, for editors"
    add(lambda _: print(json.dumps(schema.schema(), indent=2)), "schema", said)
    said = "say what is kept between builds, and how large it is"
    add(lambda _: print(*cache.lines(), sep="\n"), "env", said)
    command = add(_clean, "clean", "remove what is kept between builds")
    said = "which, as `env` names it, such as 'build/*' (default: all)"
    command.add_argument("pattern", nargs="*", default=["*"], help=said)
    return parser


def _add(
    commands: Any, run: Callable[[argparse.Namespace], None], name: str, does: str, *options: str, **others: Any
) -> argparse.ArgumentParser:  # fmt: skip
    """Adds a command that takes these of the options which several do."""
    said = f"{does[0].upper()}{does[1:]}."
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=does, description=said, allow_abbrev=False, **others
    )
    for option in (*options, "--debug"):
        command.add_argument(option, **_SHARED[option])
    command.set_defaults(run=run)
    if "--backend" in options:
        command.set_defaults(backend=os.environ.get("TORCHWHEELS_BACKEND") or None)
    return command


def _find_source(given: argparse.Namespace) -> None:
    """The source that is named, or the project's own, whose code may run on this machine where no engine answers."""
    if not given.source:
        given.config = given.config or Path("pyproject.toml").resolve()
        if not given.config.is_file():
            raise UserError(f"no source is named, and there is no {given.config} of a project here")
        own = project.load(given.config)
        assert own.file
        there = own.file.parent / own.source
        is_here = there.exists() or not sources.is_elsewhere(own.source)
        given.source = str(there) if is_here else own.source
        given.backend = given.backend or "auto"
    given.source, name, folder = sources.parts(given.source)
    given.name, given.subdirectory = name, given.subdirectory or folder


def _build(given: argparse.Namespace) -> None:
    options = _options(given)
    # What would else end a build once it has compiled everything.
    files.check_writable(given.dist, "--dist")
    toolchain.asked_jobs()
    indexes.of_torch("")
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "0")
    if not re.fullmatch(r"\d{1,10}", epoch) or int(epoch) > _LAST_TIME:
        why = (
            f"but a number of seconds is expected, at most {_LAST_TIME} (a wheel has no later time)"
        )
        raise UserError(f"SOURCE_DATE_EPOCH is {epoch!r}, {why}")
    targets = _chosen_targets(given, options)
    if not given.all and len(targets) == 1 and Path(given.source).is_dir():
        _build_for_own_gpu(targets[0])
    engine = engines.of_backend(given.backend, given.source)
    with sources.fetched(given.source, given.name, options.subdirectory) as source:
        pipeline.run(Order(options, targets, source, given.dist, engine))


def _build_for_own_gpu(target: Target) -> None:
    """Has a build for CUDA compile for this machine's GPU alone, but in CI, and where the user says for which.

    Who builds sources at hand, and one wheel of them, wants to use it here.
    """
    if not target.cuda or target.is_release or {"CI", ARCHITECTURES} & os.environ.keys():
        return
    if found := target.for_gpus(machines.gpus()):
        os.environ[ARCHITECTURES] = found
        what = f"for the GPU of this machine alone, by code of compute capability {found}"
        others = f"`{ARCHITECTURES}=all` builds it for {' '.join(target.cuda.architectures)}"
        print(f"torchwheels: {target.name} {what}: {others}", flush=True)


def _options(given: argparse.Namespace) -> Project:
    """Those of the command's source, perhaps with the folder of the project that the command names."""
    found = _project(given.source, given.config)
    return found.in_folder(given.subdirectory) if given.subdirectory else found


def _project(source: str, config: Path | None) -> Project:
    """The options of `--config`, else those of the folder that is the source."""
    if config:
        return project.load(config)
    own = Path(source) / "pyproject.toml"
    return project.load(own) if own.is_file() else Project()


def _chosen_targets(given: argparse.Namespace, options: Project) -> tuple[Target, ...]:
    table = options.releases
    found = [table.target(name) for name in given.target]
    if not found:
        own = options.chosen_targets() if given.all else ()
        active = os.environ.get("VIRTUAL_ENV")
        python = Path(active, "bin", "python") if active else Path(sys.executable)
        found = [*own] or [table.current_target(python)]
    return options.targets_to_build(found)


def _test(given: argparse.Namespace) -> None:
    whole = options = _options(given)
    target = options.releases.target(given.target)
    name, versions = sources.named(given.source, given.name, options.subdirectory)
    if given.wheel and not (given.wheel.is_file() and given.wheel.suffix == ".whl"):
        raise UserError(f"there is no wheel {given.wheel}: `--wheel` names the file to test")
    path = given.wheel or testing.find_wheel(given.dist, target, name, versions)
    if given.wheel:
        testing.check_wheel(path, target, name)
    options = options.of_target(target)
    if not options.tests.paths and not options.tests.command:
        raise UserError(
            "the project names no tests: the option `tests` says where they are, such as "
            '`tests = { paths = ["tests"] }` in [tool.torchwheels]'
        )
    engine = engines.of_backend(given.backend, given.source)
    files.check_writable(given.dist, "--dist")
    given_to = given.dist, engine, given.arguments, given.require_gpu
    with sources.fetched(given.source, given.name, options.subdirectory) as source:
        if not given.wheel:  # that of these very sources, if there is one
            order = Order(whole, whole.targets_to_build([target]), source, given.dist, engine)
            path = pipeline.built_of(order) or path
        pipeline.test(options, target, path, source.folder, *given_to)


def _audit(given: argparse.Namespace) -> None:
    paths = given.wheel or wheels_in(given.dist)
    if not paths:
        raise UserError(f"there is no wheel in {given.dist}: build one first")
    if "+" in (given.torch or ""):
        why = "and the wheel itself says of which CUDA it is: name the release alone, such as 2.13"
        raise UserError(f"`--torch` names {given.torch}, with a label, {why}")
    found = []
    for path in paths:
        own = _project(".", given.config)
        options = own if given.config else reports.promised(path, own)
        if given.torch:
            report = reports.audited(path, options, torch=given.torch)
        else:
            report = reports.write_report(path, options)
        print(f"{path.name} ({report['size'] / 1e6:.2f} MB, sha256 {report['sha256']})")
        for rule in report["rules"]:
            line = f"  {'ok  ' if rule['passed'] else 'FAIL'}  {rule['rule']}  {rule['detail']}"
            print(line.rstrip())
        found.append(report)
    reports.refuse(found)
    print(f"torchwheels: {len(paths)} of {len(paths)} wheels are fit to publish", flush=True)


def _index(given: argparse.Namespace) -> None:
    files.check_writable(given.dist, "--dist")  # of the reports
    names = make_site(given.dist, given.site, _project(".", given.config))
    print(f"torchwheels: made {given.site} with {', '.join(names)}", flush=True)


def _merge(given: argparse.Namespace) -> None:
    files.check_writable(given.dist, "--dist")
    if all(folder.is_dir() and not wheels_in(folder) for folder in given.folder):
        named = " and ".join(map(str, given.folder))
        raise UserError(
            f"there is no wheel in {named}: name the folders in which builds left wheels"
        )
    copied = kept.merge(given.folder, given.dist)
    print(f"torchwheels: put {len(copied)} files into {given.dist}", flush=True)


def _reproduce(given: argparse.Namespace) -> None:
    options, engine = _options(given), engines.of_backend(given.backend, given.source)
    targets = _chosen_targets(given, options)
    own = given.source, given.name, options.subdirectory
    with sources.fetched(*own) as source, scratch() as work:
        moved = work / "another-folder" / "with-a-longer-name"
        shutil.copytree(source.folder, moved, symlinks=True)
        both = {"one": source, "two": dataclasses.replace(source, folder=moved)}
        for target in targets:
            wheels: list[Path] = []
            for name, each in both.items():
                where = work / name, engine
                order = Order(options, [target], each, *where, fresh=True, keep=False)
                wheels += pipeline.run(order)
            if found := differences(*wheels):
                raise UserError(f"{target.name} is not reproducible: {'; '.join(found)}")
            said = f"{target.name}, sha256 {files.sha256(wheels[0])}"
            print(f"torchwheels: built twice, and equal byte by byte: {said}", flush=True)


def differences(first: Path, second: Path) -> list[str]:
    """What differs between two wheels; empty where they are equal byte by byte."""
    if first.name != second.name:
        return [f"the names {first.name} and {second.name}"]
    if first.read_bytes() == second.read_bytes():
        return []
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        names = sorted({*one.namelist(), *other.namelist()})
        ours, theirs = ({x: z.read(x) for x in z.namelist()} for z in (one, other))
    found = [name for name in names if ours.get(name) != theirs.get(name)]
    return found or ["the archives themselves, in none of their files"]


def _fetch(given: argparse.Namespace) -> None:
    """Has GitHub's command fetch artifacts: the newest of each, or those of one run."""
    name = given.name or f"wheel-{given.target}"
    files.check_writable(given.dist, "--dist")
    # A part of `gh`'s own address or command could be something else than a name.
    word = r"\w[\w.-]*"
    for option, said, form, expected in (
        ("--repository", given.repository, f"({word}/)?{word}/{word}", "OWNER/NAME"),
        ("--run", given.run_number, r"\d+", "the number of a run"),
    ):
        if said and not re.fullmatch(form, said):
            raise UserError(f"`{option}` names {said!r}, but {expected} is expected")
    if not shutil.which("gh"):
        raise UserError(
            "there is no `gh`, GitHub's command, which hands out artifacts: install it, and run `gh auth login`"
        )
    with scratch() as folder:
        command = ["gh", "run", "download", *filter(None, [given.run_number])]
        command += [f"--repo={given.repository}"] if given.repository else []
        done = processes.ask([*command, f"--pattern={name}", f"--dir={folder}"])
        if done.returncode:
            raise UserError(
                f"`gh` cannot fetch {name} ({' '.join(done.stderr.split())}): check the names, and that you may "
                "read Actions there; GitHub keeps each for some weeks"
            )
        for path in kept.merge(sorted(folder.iterdir()), given.dist):
            print(f"torchwheels: fetched {path}")


def _matrix(given: argparse.Namespace) -> None:
    options = _project(".", given.config)
    chosen = options.small_targets() if given.targets == "small" else options.chosen_targets()
    # On a GPU one Python is enough: the kernels do not depend on it.
    gpu = {(x.label, x.torch): x for x in reversed(chosen) if x.cuda and x.machine == X86_64}
    built, on_gpus = options.targets_to_build(chosen), reversed(gpu.values())
    for name, targets in {"build": built, "test": chosen, "gpu": on_gpus}.items():
        jobs = []
        for x in targets:
            what = {"target": x.name, "label": f"{x.label}{x.machine.suffix}", "python": x.python}
            jobs.append({**what, "runner": x.machine.runner})
        print(f"{name}={json.dumps(jobs)}")


def _targets(given: argparse.Namespace) -> None:
    patterns = [x if {*"*?["} & {*x} else f"*{x}*" for x in given.pattern] or ["*"]
    rows = [("target", "Python", "torch", "CUDA", "image")]
    for x in _project(".", given.config).releases.targets:
        if any(fnmatch.fnmatchcase(f"{x.name} torch{x.torch}", f"{each}*") for each in patterns):
            cuda = x.cuda.version if x.cuda else "-"
            rows.append((x.name, x.python, x.torch, cuda, x.image.partition("@")[0]))
    if len(rows) == 1:
        named = " or ".join(given.pattern)
        raise UserError(f"no target is named {named}: `torchwheels targets` lists all")
    print(*output.in_columns(rows), sep="\n")


def _clean(given: argparse.Namespace) -> None:
    for line in cache.remove(given.pattern):
        print(f"torchwheels: {line}", flush=True)
