"""Builds what a farm lacks, one wheel after the other: a failure is noted and stops nothing, and time is kept to."""

import itertools
import multiprocessing
import os
import re
import subprocess
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path

from torchwheels import __version__, sources
from torchwheels.audit import reports
from torchwheels.errors import RefusedError, UserError, of_code
from torchwheels.farm.listing import ONE_NAME
from torchwheels.farm.published import Known, Row, files_of, note_failure, row_of
from torchwheels.farm.wanted import Wanted
from torchwheels.index import site
from torchwheels.options import Project
from torchwheels.run import Engine, Order, pipeline, testing
from torchwheels.system import cache, processes, read_json

_LEAST = 60  # seconds in which a build may get somewhere


@dataclass(frozen=True)
class Run:
    """How a run builds."""

    dist: Path
    engine: Engine | None = None
    seconds: float = float("inf")
    """How long all of it may take."""
    cache: float = 5.0
    """GB of compiled files that are kept."""
    again: bool = False
    """Whether what there is already is built again."""


def build(wanted: Sequence[Wanted], published: Sequence[Row], known: Known, run: Run) -> list[str]:
    """Builds what is wanted and not known; returns what is left for the next run."""
    end = time.monotonic() + run.seconds
    left = {each.key: each for each in wanted}
    for number, each in enumerate(wanted):
        rest = end - time.monotonic()
        if rest < min(_LEAST, run.seconds / 2):
            break
        if known.wheel(each):  # by now: one wheel may serve several targets
            del left[each.key]
            continue
        said = "" if rest == float("inf") else f", {rest / 60:.0f} minutes left"
        print(f"torchwheels: {each.key}: {len(left)} to build{said}", flush=True)
        told, compiled = _told(each, published), _compiled()
        try:
            known.add(_in_time(rest, _attempt, each, told, run))
        except TimeoutError:
            print(f"torchwheels: {each.key} was stopped; the next run goes on with it", flush=True)
            if number == 0 and not run.engine and _compiled() == compiled:
                why = f"not one file of it compiles in {rest / 60:.0f} minutes: raise `--minutes`"
                note_failure(told, UserError(why), run.dist)
            break
        except UserError as error:
            print(f"torchwheels: {each.key} failed: {error}", flush=True)
            note_failure(told, error, run.dist)
        del left[each.key]
    _bound(cache.place() / "compiled", run.cache * 1e9)
    return [*left]


def overwritten(
    wanted: Iterable[Wanted], published: Container[object], known: Known, dist: Path
) -> Iterator[Wanted]:
    """Notes as failures those whose place in `dist` another wheel of their name has taken.

    But of what is `published`, by its hash, there is a file elsewhere.
    """
    for each in wanted:
        row = known.wheel(each)
        if not row or row["sha256"] in published:
            continue
        if read_json(reports.report_file(dist / row["wheel"])).get("farm") != row["farm"]:
            took = f"another wheel of its name, {row['wheel']}, took its place in {dist}"
            print(f"torchwheels: {each.key}: {took}: {ONE_NAME}", flush=True)
            note_failure(row["farm"], RefusedError(f"{took}: {ONE_NAME}"), dist)
            yield each


def _told(wanted: Wanted, published: Sequence[Row]) -> Row:
    """What the report of the wheel says of the farm: what it is, and its release."""
    told = {"project": wanted.project, "version": wanted.version, "target": wanted.target.name}
    earlier = [x["farm"].get("build", 0) for x in published if {**x["farm"], **told} == x["farm"]]
    number = max(earlier, default=0) + 1
    first = re.sub(r"[^\w.-]+", "-", f"{wanted.project}-{wanted.version}")
    # Sources may come back after others, which the index had in their place.
    replaced = {tag for x in published for tag in x["farm"].get("replaced", ())}
    numbered = (f"{first}-{x}" if x > 1 else first for x in itertools.count(number))
    tag = next(x for x in numbered if x not in replaced)
    return {
        **told,
        "digest": wanted.digest,
        "settings": wanted.settings,
        "build": number,
        "tag": tag,
        "built": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torchwheels": __version__,
    }


def _attempt(wanted: Wanted, told: Row, run: Run) -> Row:
    """Builds a wheel into the folder `dist`, runs the project's tests, if it names some, and notes it all."""
    start = time.monotonic()
    source, name, folder = sources.parts(wanted.source)
    options = wanted.options.in_folder(folder) if folder else wanted.options
    with sources.fetched(source, name, options.subdirectory) as found:
        own = options.of_target(wanted.target)
        testing.check_paths(own, found.folder)  # not after hours
        order = Order(options, [wanted.target], found, run.dist, run.engine, keep=not run.again)
        (path,) = pipeline.run(order)
        if own.tests.paths or own.tests.command:
            pipeline.test(own, wanted.target, path, found.folder, run.dist, run.engine)
    return _noted(path, own, {**told, "seconds": round(time.monotonic() - start)})


def _noted(path: Path, options: Project, told: Row) -> Row:
    """Adds to the report of a wheel what the farm knows, and puts the metadata beside the files."""
    try:
        report: Row = read_json(reports.report_file(path))
    except (OSError, ValueError):  # of a wheel that was there already, and has just been tested
        reports.report_file(path).unlink(missing_ok=True)
        report = reports.audited(path, options)
    report["tests"] = reports.tests_of(path.parent / "tests", report["sha256"])
    files = files_of(report, path.parent)
    report["farm"] = {**told, "metadata": {x.name: site.write_metadata(x, x.parent) for x in files}}
    reports.write(report, path)
    return row_of(report)


def _in_time(seconds: float, function: Callable[..., Row], *given: object) -> Row:
    """What a function returns in a process of its own. TimeoutError is raised after so many seconds.

    However that process ends, all that it has started ends with it, and this one goes on.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, given))
    process.start()
    theirs.close()
    try:
        if not ours.poll(None if seconds == float("inf") else seconds):
            raise TimeoutError
        code, said = ours.recv()
    except EOFError:
        raise UserError("its build has died: memory may have run out") from None
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()
    if code:
        raise of_code(code)(said)
    found: Row = said
    return found


def _answer(pipe: Connection, function: Callable[..., Row], given: Sequence[object]) -> None:
    """Sends what a function returns, or the code and the text of its error."""
    processes.end_with_parent()
    try:
        pipe.send((0, function(*given)))
    except KeyboardInterrupt:
        return
    except (UserError, OSError, subprocess.CalledProcessError) as error:
        pipe.send((getattr(error, "code", 1), processes.explained(error)))
    except Exception as error:  # of ours: it ends no other build
        traceback.print_exc()
        pipe.send((1, f"{type(error).__name__}: {error}"))


def _compiled() -> int:
    """How many files the compiler caches hold."""
    return sum(len(names) for _, _, names in os.walk(cache.place() / "compiled"))


def _bound(folder: Path, most: float) -> None:
    """Removes of the compiled files those that nobody has used for the longest time, until they take no more."""
    files = [x for x in folder.rglob("*") if x.is_file() and not x.is_symlink()]
    taken = sum(x.stat().st_size for x in files)
    for file in sorted(files, key=lambda x: x.stat().st_mtime):
        if taken <= most:
            break
        taken -= file.stat().st_size
        file.unlink(missing_ok=True)
