"""Wheels out of CI, from a server that answers as GitHub's does."""

from __future__ import annotations

import http.server
import io
import json
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchwheels import cli

LISTED = {
    "artifacts": [
        {"name": "wheel-3.11-cpu", "expired": False, "file": "new"},
        {"name": "wheel-3.11-cpu", "expired": False, "file": "old"},
        {"name": "wheel-3.12-cpu", "expired": True, "file": "gone"},
        {"name": "site", "expired": False, "file": "site"},
    ]
}


class GitHub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        host = f"http://{self.headers['Host']}"
        path, _, name = self.path.partition("/download/")
        token = self.headers["Authorization"] == "Bearer secret"
        if name and "localhost" not in host:  # another host, as GitHub's storage is
            self.send_response(302 if token else 401)
            port = host.rpartition(":")[2]
            self.send_header("Location", f"http://localhost:{port}{self.path}")
            self.end_headers()
            return
        data = io.BytesIO()
        if name:
            assert "Authorization" not in self.headers
            with zipfile.ZipFile(data, "w") as archive:
                archive.writestr("../outside.whl" if name == "site" else f"{name}.whl", name)
                archive.writestr("variants/x.whl", "a variant")
        elif path.startswith("/repos/owner/name/actions/") and token:
            listed = [
                {**x, "archive_download_url": f"{host}/download/{x['file']}"}
                for x in LISTED["artifacts"]
            ]
            data.write(json.dumps({"artifacts": listed if "/runs/" not in path else []}).encode())
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data.getvalue())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    monkeypatch.setenv("GH_TOKEN", "secret")
    subprocess.run(["git", "init", "--quiet"], check=True)
    origin = ["git", "remote", "add", "origin", "git@github.com:owner/name.git"]
    subprocess.run(origin, check=True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), GitHub) as server:
        monkeypatch.setenv("GITHUB_API_URL", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever).start()
        yield
        server.shutdown()


def test_the_newest_artifact_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["fetch", "--target=3.11-cpu"])
    assert capsys.readouterr().out.splitlines() == [
        "torchwheels: fetched dist/new.whl",
        "torchwheels: fetched dist/variants/x.whl",
    ]
    cli.main(["fetch"])  # the same again
    assert (tmp_path / "dist" / "new.whl").read_text() == "new"
    (tmp_path / "dist" / "new.whl").write_text("mine")
    with pytest.raises(SystemExit, match=r"dist/new\.whl is there already, and another file"):
        cli.main(["fetch"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--target=3.12-cpu"],
            r"no run has an artifact named wheel-3\.12-cpu: there are site, wheel",
        ),
        (["--run=7"], r"no run has an artifact named wheel-\*: there are none"),
        (["--name=site"], r"an artifact names \.\./outside\.whl, which is outside of dist"),
        (
            ["--repository=owner/other"],
            r"GitHub does not hand out repos/owner/other/actions/artifacts",
        ),
    ],
)
def test_what_is_not_there_is_said(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        cli.main(["fetch", *words])


def test_it_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GH_TOKEN")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(SystemExit, match="run `gh auth login`, or set GH_TOKEN"):
        cli.main(["fetch"])
    subprocess.run(["git", "remote", "remove", "origin"], check=True)
    with pytest.raises(SystemExit, match="name one, `--repository OWNER/NAME`"):
        cli.main(["fetch"])
