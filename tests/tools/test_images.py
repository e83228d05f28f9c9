"""Base images are pinned by what their registry says; a small one answers here in its place."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from extops_build import UserError
from tools import images

AMD64, ARM64 = "linux/amd64", "linux/arm64"
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def index(*platforms: str, text: str = "") -> bytes:
    """What a registry has for an image of these platforms."""
    pairs = [dict(zip(("os", "architecture"), x.split("/"), strict=True)) for x in platforms]
    return json.dumps({"manifests": [{"platform": x} for x in pairs], "text": text}).encode()


class Registry(ThreadingHTTPServer):
    """Has images by the paths of their tags, for whoever fetches a token for them first."""

    def __init__(self) -> None:
        super().__init__(("localhost", 0), Answers)
        self.images: dict[str, tuple[str, bytes]] = {}
        self.host = f"localhost:{self.server_port}"

    def has(self, image: str, body: bytes, kind: str = INDEX) -> str:
        """Adds an image, and returns its name."""
        name, _, tag = image.partition(":")
        self.images[f"/v2/{name}/manifests/{tag}"] = kind, body
        return f"{self.host}/{image}"


class Answers(BaseHTTPRequestHandler):
    """As the protocol of registries has it."""

    def do_GET(self) -> None:
        """A token, or an image."""
        assert isinstance(self.server, Registry)
        place = urlsplit(self.path)
        if place.path == "/token":
            (scope,) = parse_qs(place.query)["scope"]
            return self.answer(200, json.dumps({"token": f"for {scope}"}).encode())
        name = place.path.removeprefix("/v2/").partition("/manifests/")[0]
        scope = f"repository:{name}:pull"
        if self.headers["Authorization"] != f"Bearer for {scope}":
            realm = f'Bearer realm="http://{self.server.host}/token",service="x",scope="{scope}"'
            return self.answer(401, b"", **{"WWW-Authenticate": realm})
        if place.path not in self.server.images or INDEX not in self.headers["Accept"]:
            return self.answer(404, b"")
        kind, body = self.server.images[place.path]
        return self.answer(200, body, **{"Content-Type": kind})

    def answer(self, code: int, body: bytes, **headers: str) -> None:
        """Sends it."""
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def registry() -> Iterator[Registry]:
    """One that answers."""
    with Registry() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_digest_is_that_of_the_image_for_all_machines(registry: Registry) -> None:
    body = index(AMD64, ARM64)
    image = registry.has("nvidia/cuda:13.0", body)
    assert images.digest(image, {AMD64, ARM64}) == sha256(body)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (index(AMD64), INDEX, "x:1 has nothing for linux/arm64, which its targets want: name an"),
        (index(), MANIFEST, f"x:1 is for one machine alone ({MANIFEST}): name an image for"),
        (b"<html>", INDEX, " does not say which digest it has (Expecting value: line 1 column 1"),
        (
            None,
            INDEX,
            " does not say which digest it has (HTTP Error 404: Not Found): check the name",
        ),
    ],
)
def test_images_that_cannot_be_pinned(
    registry: Registry, body: bytes | None, kind: str, message: str
) -> None:
    image = registry.has("x:1", body, kind) if body is not None else f"{registry.host}/x:1"
    with pytest.raises(UserError) as error:
        images.digest(image, {AMD64, ARM64})
    assert message in str(error.value)


def test_a_registry_that_does_not_answer() -> None:
    with Registry() as closed:
        host = closed.host
    with pytest.raises(UserError, match=rf"^{host}/x:1: {host} does not say .* refused"):
        images.digest(f"{host}/x:1", [])


@pytest.mark.parametrize(
    ("image", "address"),
    [
        ("ubuntu:22.04", "https://registry-1.docker.io/v2/library/ubuntu/manifests/22.04"),
        ("nvidia/cuda:13.0", "https://registry-1.docker.io/v2/nvidia/cuda/manifests/13.0"),
        ("ghcr.io/a/b/c:1", "https://ghcr.io/v2/a/b/c/manifests/1"),
        ("localhost:5000/a:1", "http://localhost:5000/v2/a/manifests/1"),
    ],
)
def test_where_an_image_is(image: str, address: str) -> None:
    assert images._address(image) == address


@pytest.mark.parametrize("image", ["ubuntu", "localhost:5000/ubuntu"])
def test_an_image_without_a_tag(image: str) -> None:
    with pytest.raises(UserError, match=f"^{image} names no tag: write NAME:TAG$"):
        images._address(image)


def test_renewed_images_keep_their_tags(registry: Registry, tmp_path: Path) -> None:
    one = registry.has("x:1", index())
    two = registry.has("y:2", index(text="two"))
    table, compose = tmp_path / "releases.toml", tmp_path / "docker-compose.yml"
    table.write_text(f'cpu = {{ image = "{one}", torch = "2" }}\nimage = "{two}@{sha256(b"")}"\n')
    dockerfile = tmp_path / "Dockerfile"
    compose.write_text(f"x:\n  BASE_IMAGE: {two}${{NONE-@{sha256(b'')}}}\n  CUDA_HOME: /x\n")
    dockerfile.write_text(f"ARG BASE_IMAGE={one}\n")
    files = table, compose, dockerfile
    ones, twos = f"{one}@{sha256(index())}", f"{two}@{sha256(index(text='two'))}"
    assert images.renew(files=files) == [ones, twos]
    assert table.read_text() == f'cpu = {{ image = "{ones}", torch = "2" }}\nimage = "{twos}"\n'
    pinned = f"{two}${{NONE-@{twos.partition('@')[2]}}}"
    assert compose.read_text() == f"x:\n  BASE_IMAGE: {pinned}\n  CUDA_HOME: /x\n"
    assert dockerfile.read_text() == f"ARG BASE_IMAGE={ones}\n"
    assert images.renew(files=files) == []
    registry.has("x:1", index(text="newer"))
    registry.has("y:2", index(text="newer"))
    assert images.renew(f"{registry.host}/x*", files) == [f"{one}@{sha256(index(text='newer'))}"]
    assert twos in table.read_text()


def test_an_image_that_is_gone_keeps_no_other_from_being_renewed(
    registry: Registry, tmp_path: Path
) -> None:
    there, table = registry.has("y:2", index()), tmp_path / "releases.toml"
    gone = f'image = "{registry.host}/x:1@{sha256(b"")}"\n'
    table.write_text(f'{gone}image = "{there}"\n')
    with pytest.raises(UserError, match=f"^{registry.host}/x:1: "):
        images.renew(files=[table])
    assert table.read_text() == f'{gone}image = "{there}@{sha256(index())}"\n'


def test_images_are_for_the_machines_of_their_targets() -> None:
    from torchwheels.options import releases

    targets = releases.load().targets
    cuda = next(x for x in targets if x.cuda and x.machine.docker == ARM64)
    assert images.platforms(cuda.image.partition("@")[0], targets) == {AMD64, ARM64}
    assert images.platforms("nvidia/cuda:12.1.1-devel-ubuntu22.04", targets) == {AMD64}
