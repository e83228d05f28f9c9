"""The engine of containers, Docker's or podman's: here, or where DOCKER_HOST or a context says."""

import contextlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import docker
from docker.errors import APIError, DockerException, NotFound
from requests.exceptions import RequestException

from torchwheels.errors import UserError, of_code
from torchwheels.system import masked, processes, scratch

BACKENDS = ("docker", "local", "auto")
TIMEOUT = 10  # seconds: an engine behind ssh needs a few, a dead one shall not hold us up
_PATIENCE = 1800  # seconds that it may work without a word, as where it writes an image
NETWORK = "torchwheels"
"""Of all containers: a rootless podman lets none leave its own."""
_FILES = 4 * 10**9  # bytes that come out of a container
_ANSWER = 10**6
_STEP = "from torchwheels.run import inside; inside.main()"


class Engine(NamedTuple):
    """An engine that answers."""

    client: docker.DockerClient
    command: tuple[str, ...]
    """What builds images there, which the API does not as `docker build` does."""


def of_backend(backend: str | None, source: str) -> Engine | None:
    """The engine of the containers in which the code of `source` runs; None where it shall run here."""
    if backend not in (None, *BACKENDS):  # argparse checks no default
        raise UserError(f"TORCHWHEELS_BACKEND is {backend!r}: {', '.join(BACKENDS)} is expected")
    if backend == "local":
        return None
    try:
        return find_engine()
    except UserError as error:
        if backend == "auto":
            print(f"torchwheels: backend local: no Docker engine answers ({error})", flush=True)
            return None
        raise UserError(
            f"no Docker engine answers ({error}), and {source} runs its own code with your rights "
            "outside of one: start an engine, or give `--backend local` if you trust it"
        ) from None


def find_engine() -> Engine:
    """The engine; an error says why none answers."""
    context = docker.ContextAPI.kwargs_from_context()
    where = os.environ.get("DOCKER_HOST") or context.get("base_url", "unix:///var/run/docker.sock")
    try:
        client = docker.from_env(timeout=TIMEOUT, use_ssh_client=True)
        parts = client.version().get("Components", ())
    except (DockerException, RequestException, OSError) as error:
        raise UserError(_explained(where, masked(str(error)))) from None
    client.api.timeout = _PATIENCE
    podman = any("podman" in part["Name"].lower() for part in parts)
    command = ("podman", f"--url={where}") if podman else ("docker",)
    if not shutil.which(command[0]):
        raise UserError(f"{where} answers, but PATH has no {command[0]}, which makes the images")
    return Engine(client, command)


def _explained(where: str, said: str) -> str:
    """Why no engine answers there."""
    socket = Path(where.partition("://")[2])
    if not where.startswith("unix:") or (socket.is_socket() and os.access(socket, os.W_OK)):
        return f"{where}: {said}"
    if not socket.is_socket():
        return f"there is no socket {socket}"
    way_out = f'run `sudo usermod --append --groups {socket.group()} "$USER"` and log in again'
    return f"{socket} is open to the group {socket.group()}: {way_out}"


@contextlib.contextmanager
def doing_its_part() -> Iterator[None]:
    """Says of an engine that fails meanwhile what it said."""
    try:
        yield
    except (DockerException, RequestException) as error:
        raise UserError(
            f"the engine of the containers did not do its part ({masked(str(error))}): `docker info` says how it is, "
            "`docker system df` what fills its disk"
        ) from None


class Container:
    """A container of `image` that lives as long as this, and no longer than we do.

    Its first process reads what we write, and so ends with us; then the engine ends the others.
    """

    def __init__(self, engine: Engine, image: str, **options: Any) -> None:
        with contextlib.suppress(APIError):  # of one that is there
            engine.client.networks.create(NETWORK, check_duplicate=True)
        self._network = engine.client.networks.get(NETWORK)
        self._api = engine.client.api
        self._container = engine.client.containers.create(
            image, entrypoint=["cat"], network=NETWORK, stdin_open=True, auto_remove=True, **options
        )

    def __enter__(self) -> "Container":
        try:
            self._input = self._container.attach_socket(params={"stdin": 1, "stream": 1})
            self._container.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(DockerException, RequestException):  # it may be gone already
            self._container.remove(force=True, v=True)

    def join(self) -> None:
        """Gives it a network, as it has one at first."""
        self._network.connect(self._container)

    def leave(self) -> None:
        """Takes its network away."""
        self._network.disconnect(self._container)

    def put(self, files: Mapping[str, Path | str]) -> None:
        """Copies files and folders to the places that are named, or makes files of texts."""
        with scratch() as folder:
            path = folder / "text"
            with tempfile.TemporaryFile() as archive:
                with tarfile.open(fileobj=archive, mode="w") as tar:
                    for place, file in files.items():
                        if isinstance(file, str):
                            path.write_text(file, encoding="utf-8")
                        tar.add(path if isinstance(file, str) else file, place, filter=_of_root)
                archive.seek(0)
                self._container.put_archive("/", archive)

    def take(self, place: str, into: Path) -> list[Path]:
        """Copies the plain files that are right in a folder, if there is one: all else may be meant to mislead."""
        found = []
        with contextlib.suppress(NotFound), tempfile.TemporaryFile() as archive:
            chunks, _ = self._container.get_archive(place)
            for chunk in chunks:
                if archive.tell() > _FILES:
                    raise UserError(f"its container left over {_FILES / 1e9:g} GB in {place}")
                archive.write(chunk)
            archive.seek(0)
            with tarfile.open(fileobj=archive) as tar:
                for member in tar:
                    if member.isfile() and member.name.count("/") == 1:
                        content = tar.extractfile(member)
                        found.append(into / Path(member.name).name)
                        with found[-1].open("wb") as file:
                            shutil.copyfileobj(content or file, file)
        return found

    def call(self, step: str, variables: Mapping[str, str], limit: float = 0) -> Any:
        """What a step of inside.py answers; its error, where it has one. TimeoutError after `limit` seconds."""
        code, said = self.run(["python", "-c", _STEP, step], variables, limit)
        try:
            answer = json.loads(said)
            if code == 0:
                return answer["result"]
            why = masked(str(answer["error"]))
        except (ValueError, KeyError, TypeError):
            why = f"`{step}` ended with exit code {code}: the messages above say why"
        raise of_code(code)(f"in the container: {why}")

    def run(
        self, command: list[str], variables: Mapping[str, str], limit: float = 0
    ) -> tuple[int, bytes]:
        """Runs a command; passes on what it says to standard error. Returns its exit code, and its other output."""
        made = self._api.exec_create(self._container.id, command, environment=dict(variables))
        output = rest = b""
        with processes.limited(limit, self._container.kill) as late:
            try:
                for out, err in self._api.exec_start(made["Id"], stream=True, demux=True):
                    output = (output + (out or b""))[:_ANSWER]
                    *lines, rest = (rest + (err or b"")).split(b"\n")
                    _show(lines)
            finally:
                _show([rest] if rest else [])
        if late.is_set():
            raise TimeoutError
        return int(self._api.exec_inspect(made["Id"])["ExitCode"]), output

    def commit(self, name: str) -> None:
        """Makes an image of what it holds."""
        self._container.commit(*name.split(":"))


def _show(lines: list[bytes]) -> None:
    for line in lines:  # whole ones, in which no password is cut in two
        print(masked(line.decode(errors="replace")), flush=True)


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Whoever it belongs to here."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
