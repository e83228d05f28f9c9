"""Runs a cell's tests in a container, through the Python SDK of Docker.

Its output is passed on while it runs, its exit code is ours, and it is gone when we are: after an
interrupt at once, and after a `kill -9`, which leaves no time for that, at the cell's next run.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import docker.types
import requests

from service import ROOT, ServiceError, place

NO_GPU = (
    "a GPU is required, but this Docker engine cannot give one to a container: install the NVIDIA "
    "driver and the NVIDIA Container Toolkit, run `nvidia-ctk runtime configure` and restart the "
    "engine, or leave `--require-gpu` out"
)


def require_gpu() -> None:
    """Raises an error where the engine cannot give a GPU to a container."""
    with _engine() as client:
        if not _has_gpus(client):
            raise ServiceError(NO_GPU)


def run(image: str, command: list[str], cell: str, output: tuple[str, Path] | None = None) -> int:
    """Runs `command` in a container of `image`, and returns its exit code.

    `output` is a folder in the container, and where a copy of it goes if there is one in the end.
    One container of a cell exists at a time: the caller holds the cell's lock.
    """
    with _engine() as client:
        labels = {"extops.cell": cell, "extops.tree": str(ROOT)}
        _remove(client, labels)
        gpus = docker.types.DeviceRequest(count=-1, capabilities=[["gpu"]])
        container = client.containers.create(
            image,
            command,
            labels=labels,
            init=True,  # so that it heeds signals, and no process outlives its parent as a zombie
            device_requests=[gpus] if _has_gpus(client) else [],
        )
        with _removed_at_the_end(container):
            container.start()
            for chunk in container.logs(stream=True, follow=True):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            code = int(container.wait()["StatusCode"])
            if output:
                _copy_out(container, *output)
            return code


@contextlib.contextmanager
def _engine() -> Iterator[Any]:
    """A client of the engine; what goes wrong with it becomes one sentence."""
    try:
        client = docker.from_env()
        with contextlib.closing(client):
            yield client
    except docker.errors.ImageNotFound as error:
        raise ServiceError(f"Docker has no such image: {error.explanation}") from None
    except docker.errors.APIError as error:
        if "could not select device driver" in str(error):
            raise ServiceError(NO_GPU) from None
        raise ServiceError(f"the Docker engine refused: {error.explanation or error}") from None
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise ServiceError(
            f"no Docker engine answers ({place.explained(str(error))}): start one, or use `--backend local`"
        ) from None


def _has_gpus(client: Any) -> bool:
    return "nvidia" in client.info().get("Runtimes", {})


def _remove(client: Any, labels: dict[str, str]) -> None:
    wanted = [f"{name}={value}" for name, value in labels.items()]
    for container in client.containers.list(all=True, filters={"label": wanted}):
        container.remove(force=True)


def _copy_out(container: Any, folder: str, target: Path) -> None:
    try:
        chunks, _ = container.get_archive(folder)
    except docker.errors.NotFound:
        return
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        # With the filter the files are ours, and not those of the container's root; Pythons before 3.11.4 may lack it.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(target)


@contextlib.contextmanager
def _removed_at_the_end(container: Any) -> Iterator[None]:
    """Removes the container, however we end."""
    try:
        yield
    finally:
        with contextlib.suppress(docker.errors.APIError, requests.exceptions.RequestException):
            container.remove(force=True, v=True)
