"""The bill of materials inside a wheel: what it was made of, and with (CycloneDX, PEP 770).

It follows from the wheel's other files alone, so the same sources give the same bytes, and the
audit can make it again and compare.
"""

from __future__ import annotations

import email
import hashlib
import json
from collections.abc import Mapping
from email.message import Message
from typing import Any
from urllib.parse import quote

from service import ServiceError

PATH = "sboms/extops.cdx.json"
"""Inside the wheel's .dist-info folder."""


def text(metadata: bytes, info: Mapping[str, Any], libraries: Mapping[str, bytes]) -> str:
    """The document: of the wheel's METADATA, its build information, and its libraries by name."""
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _wheel(email.message_from_bytes(metadata), info)},
        "components": [
            *(_library(name, data) for name, data in sorted(libraries.items())),
            *_linked_in(info),
            *_only_used(info),
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def minimum_torch(metadata: Message) -> str:
    """The oldest torch that the wheel installs with."""
    requirements = metadata.get_all("Requires-Dist") or []
    versions = [found for x in requirements if (found := x.removeprefix("torch>=")) != x]
    if len(versions) != 1:
        raise ServiceError("its METADATA does not require `torch>=` one version")
    return versions[0]


def _wheel(metadata: Message, info: Mapping[str, Any]) -> dict[str, Any]:
    properties = {
        "commit": info["commit"] or "unknown",
        "variant": info["variant"],
        "architectures": " ".join(info["architectures"]) or "none",
        "minimum-torch": minimum_torch(metadata),
        "requires-python": metadata["Requires-Python"],
    }
    return {
        "type": "library",
        "name": "extops",
        "version": metadata["Version"],
        "purl": f"pkg:pypi/extops@{quote(metadata['Version'])}",
        "properties": [{"name": f"extops:{key}", "value": properties[key]} for key in properties],
    }


def _library(name: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    return {"type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def _linked_in(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What of others is inside the libraries."""
    found = [_component("library", "libstdc++.a", info["cxx"], "what an older libstdc++ lacks")]
    if info["cuda"]:
        runtime = "the CUDA runtime of the toolkit of this version, linked statically"
        found.append(_component("library", "libcudart_static.a", info["cuda"], runtime))
    return found


def _only_used(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the build used, and the wheel does not hold."""
    torch = _component("library", "torch", info["torch_headers"], "its headers")
    torch["purl"] = f"pkg:pypi/torch@{quote(info['torch_headers'])}"
    found = [torch, _component("application", "g++", info["cxx"], "the C++ compiler")]
    if info["cuda"]:
        found.append(_component("application", "nvcc", info["cuda"], "the CUDA compiler"))
    return [{**component, "scope": "excluded"} for component in found]


def _component(kind: str, name: str, version: str, description: str) -> dict[str, Any]:
    return {"type": kind, "name": name, "version": version, "description": description}
