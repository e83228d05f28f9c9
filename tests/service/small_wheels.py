"""Wheels of extops with nothing in them, for the index: real enough for pip and uv to install."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import zipfile
from collections.abc import Iterator, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from service import matrix, site, wheels

METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
"""
OURS = """\
Summary: Operators for PyTorch
Requires-Python: >=3.10
Requires-Dist: torch>=2.4
"""
TAG = "py3-none-manylinux_2_28_x86_64"


def make(
    dist: Path, variant: str, architectures: Sequence[str] = (), commit: str | None = "0" * 40
) -> Path:
    """Writes the wheel of a variant into `dist`; `extops.VARIANT` says which one was installed."""
    version = "0.1.0" if variant == matrix.RELEASE else f"0.1.0+{variant}"
    build_info = {"variant": variant, "architectures": list(architectures), "commit": commit}
    build_info |= {"cuda": None, "cxx": "g++ 12", "torch_headers": "2.13.0"}
    files = {
        "extops/__init__.py": f"VARIANT = {variant!r}\n",
        "extops/_build_info.json": json.dumps(build_info),
    }
    return write(dist, "extops", version, files, OURS)


def write(folder: Path, name: str, version: str, files: dict[str, str], metadata: str = "") -> Path:
    """Writes a wheel of these files into `folder`."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": METADATA.format(name=name, version=version) + metadata,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {TAG}\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{file},,\n" for file in [*files, record])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{TAG}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return wheel


def make_pypi(folder: Path) -> Path:
    """Makes an index that has torch, in name at least, and no extops."""
    torch = write(folder / "torch", "torch", "2.13.0", {"torch/__init__.py": ""})
    (torch.parent / "index.html").write_text(f'<a href="{torch.name}">{torch.name}</a>')
    return folder


def make_site(folder: Path, *variants: str) -> Path:
    """Makes `folder`/site from these variants' wheels, and from what `folder`/dist holds."""
    matrix_here = matrix.load()
    for variant in variants:
        make(folder / "dist", variant, matrix_here.variants[variant].architectures)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheels, "ROOT", folder)  # where the locks are
        site.build(folder / "dist", folder / "site", matrix_here)
    return folder / "site"


@contextlib.contextmanager
def served(site: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves `site` as `python -m http.server` does; gives its address, and what was asked for."""
    requests: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            requests.append(self.path)

    handler = functools.partial(Handler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", requests
        finally:
            server.shutdown()
            thread.join()
