"""Fetches the wheels that a run of GitHub's CI has left as artifacts."""

from __future__ import annotations

import fnmatch
import io
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from torchwheels.errors import UserError
from torchwheels.system import marked, whole

_TIMEOUT = 60  # seconds without an answer


def fetch(pattern: str, repository: str, run: str, dist: Path) -> list[Path]:
    """Puts the files of the newest artifacts that `pattern` names into `dist`; of one `run`, where that is named."""
    place = f"repos/{repository or _repository_here()}/actions"
    place += f"/runs/{run}/artifacts" if run else "/artifacts"
    with _client() as client:
        listed = _ask(client, f"{place}?per_page=100").json()["artifacts"]
        newest: dict[str, dict[str, Any]] = {}
        for each in listed:  # the newest first
            if fnmatch.fnmatchcase(each["name"], pattern) and not each["expired"]:
                newest.setdefault(each["name"], each)
        if not newest:
            there = ", ".join(sorted({x["name"] for x in listed})) or "none"
            raise UserError(
                f"no run has an artifact named {pattern}: there are {there}, and GitHub keeps each for some weeks"
            )
        return [
            path
            for each in newest.values()
            for path in _unpacked(_ask(client, each["archive_download_url"]).content, dist)
        ]


def _unpacked(data: bytes, dist: Path) -> Iterator[Path]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            path = marked(dist) / name
            if name.endswith("/"):
                continue
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise UserError(f"an artifact names {name}, which is outside of {dist}")
            content = archive.read(name)
            if path.exists() and path.read_bytes() != content:
                raise UserError(f"{path} is there already, and another file: take that away first")
            with whole(path) as file:
                file.write_bytes(content)
            yield path


def _client() -> httpx2.Client:
    return httpx2.Client(
        base_url=os.environ.get("GITHUB_API_URL", "https://api.github.com"),
        headers={"Authorization": f"Bearer {_token()}", "Accept": "application/vnd.github+json"},
        timeout=_TIMEOUT,
        follow_redirects=True,  # to a host that gets no token
    )


def _ask(client: httpx2.Client, address: str) -> httpx2.Response:
    try:
        return client.get(address).raise_for_status()
    except httpx2.HTTPError as error:
        raise UserError(
            f"GitHub does not hand out {address.partition('?')[0]} ({str(error).splitlines()[0]}): check the names, "
            "and that the token may read Actions"
        ) from None


def _token() -> str:
    """GitHub hands artifacts to nobody whom it does not know."""
    for name in ("GH_TOKEN", "GITHUB_TOKEN"):
        if token := os.environ.get(name):
            return token
    said = ""
    if shutil.which("gh"):
        said = subprocess.run(
            ["gh", "auth", "token"], capture_output=True, text=True
        ).stdout.strip()
    if not said:
        raise UserError(
            "GitHub hands artifacts only to whom it knows: run `gh auth login`, or set GH_TOKEN to a token that may "
            "read Actions"
        )
    return said


def _repository_here() -> str:
    command = ["git", "remote", "get-url", "origin"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    found = re.search(r"[:/]([\w.-]+/[\w.-]+?)(\.git)?/?$", said)
    if not found:
        raise UserError(
            "there is no repository here with a remote `origin`: name one, `--repository OWNER/NAME`"
        )
    return found[1]
