"""Pins the base images by digest, and renews that: `nox -s images`, or `-- 'nvidia/cuda:13*'` for some.

Each image that the table of releases names keeps its tag, and gets the digest that its registry has for the tag now.
docker-compose.yml and the Dockerfile name some of them again.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from http.client import HTTPResponse
from pathlib import Path

from extops_build import ROOT, UserError, errors_for_the_user
from torchwheels.options import Target, releases

FILES = (releases.FILE, ROOT / "Dockerfile", ROOT / "docker-compose.yml")
_IMAGE = re.compile(
    r'(\bimage = "|\bBASE_IMAGE(?:: "?|=))([^\s"@$]+)((?:\$\{\w+-)?)(?:@(sha256:[0-9a-f]{64}))?'
)
# Of what has the image for several machines: the digest of one of them would serve no other.
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_HUB = "registry-1.docker.io"
_SECONDS = 30


def digest(image: str, platforms: Iterable[str]) -> str:
    """The digest of what the registry of `image` has under its tag, for all of `platforms` (`linux/amd64`)."""
    address = _address(image)
    try:
        with _get(address) as answer:
            kind, body = answer.headers.get_content_type(), answer.read()
        listed = json.loads(body).get("manifests", [])
    except (OSError, ValueError, KeyError) as error:  # of urllib, and of what is not as expected
        raise UserError(
            f"{image}: {urllib.parse.urlsplit(address).netloc} does not say which digest it has ({error}): check the "
            "name and the network, or name a copy of an image that was deleted"
        ) from None
    if kind not in _INDEXES:
        raise UserError(f"{image} is for one machine alone ({kind}): name an image for several")
    each = [x.get("platform", {}) for x in listed]
    there = {f"{x.get('os')}/{x.get('architecture')}" for x in each}
    if missing := sorted({*platforms} - there):
        raise UserError(
            f"{image} has nothing for {', '.join(missing)}, which its targets want: name another image"
        )
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def _address(image: str) -> str:
    """Where the registry of an image has its tag."""
    path, _, tag = image.rpartition(":")
    if not path or "/" in tag:
        raise UserError(f"{image} names no tag: write NAME:TAG")
    host, _, repository = path.partition("/")
    if not repository or not ({".", ":"} & {*host} or host == "localhost"):  # Docker's own
        host, repository = _HUB, path if repository else f"library/{path}"
    scheme = "http" if host.partition(":")[0] == "localhost" else "https"
    return f"{scheme}://{host}/v2/{repository}/manifests/{tag}"


def _get(address: str) -> HTTPResponse:
    """The answer of a registry, which first sends whoever asks to fetch a token."""
    request = urllib.request.Request(address, headers={"Accept": ", ".join(_INDEXES)})
    try:
        return _opened(request)
    except urllib.error.HTTPError as error:
        asked = error.headers.get("WWW-Authenticate", "")
        if error.code != 401 or not asked.startswith("Bearer "):
            raise
    said = dict(re.findall(r'(\w+)="([^"]*)"', asked))
    query = urllib.parse.urlencode({key: said[key] for key in ("service", "scope") if key in said})
    with _opened(urllib.request.Request(f"{said.get('realm')}?{query}")) as answer:
        token = json.load(answer)
    request.add_header("Authorization", f"Bearer {token.get('token') or token['access_token']}")
    return _opened(request)


def _opened(request: urllib.request.Request) -> HTTPResponse:
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=_SECONDS)
    return answer


def platforms(image: str, targets: Iterable[Target]) -> set[str]:
    """The platforms for which an image is asked, with or without its digest."""
    return {x.machine.docker for x in targets if x.image.partition("@")[0] == image}


def renew(pattern: str = "*", files: Iterable[Path] = FILES) -> list[str]:
    """Pins the images in `files` that the pattern names; returns those whose digest is another than before.

    An error names the images that cannot be had; the others are renewed all the same.
    """
    texts = {file: file.read_text() for file in files}
    named = [match for text in texts.values() for match in _IMAGE.finditer(text)]
    pinned, failed = {}, []
    for image in fnmatch.filter(dict.fromkeys(match[2] for match in named), pattern):
        try:
            wanted = platforms(image, releases.load().targets)
            pinned[image] = digest(image, wanted)
        except UserError as error:
            failed.append(str(error))
    for file, text in texts.items():
        file.write_text(
            _IMAGE.sub(
                lambda x: f"{x[1]}{x[2]}{x[3]}@{pinned[x[2]]}" if x[2] in pinned else x[0], text
            )
        )
    if failed:
        raise UserError("\n".join(failed))
    others = {match[2] for match in named if match[4] != pinned.get(match[2])}
    return [f"{image}@{each}" for image, each in pinned.items() if image in others]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pins the base images by digest, and renews that.")
    parser.add_argument("pattern", nargs="?", default="*", help="which, such as 'nvidia/cuda:13*'")
    with errors_for_the_user():
        for image in renew(parser.parse_args().pattern):
            print(f"extops: renewed {image}")


if __name__ == "__main__":
    main()
