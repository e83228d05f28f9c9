"""A JSON schema of the options in [tool.torchwheels], by which editors complete and explain them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from torchwheels.options.project import OF_ALL_TARGETS, Project, Release, Tests

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}


def schema() -> dict[str, Any]:
    """That of the table."""
    found = of(Project)
    options: dict[str, Any] = found["properties"]
    settings = {"anyOf": [_TEXT, _TEXTS]}
    options["config-settings"]["additionalProperties"] = settings
    options["releases"] |= {"type": "array", "items": of(Release)}
    all_targets = {name.replace("_", "-") for name in OF_ALL_TARGETS} | {"releases"}
    of_some = {key: value for key, value in options.items() if key not in all_targets}
    override = {"type": "object", "required": ["select"], "additionalProperties": False}
    override["properties"] = {"select": settings, **of_some}
    options["overrides"] |= {"type": "array", "items": override}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **found}


def of(kind: type[Any]) -> dict[str, Any]:
    """What a table may hold, by the fields of `kind` and the texts below them."""
    (body,) = (
        x.body for x in ast.parse(inspect.getsource(kind)).body if isinstance(x, ast.ClassDef)
    )
    texts = {
        ast.unparse(field.target): inspect.cleandoc(ast.literal_eval(text.value))
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    properties = {}
    defaults = kind()
    for field in dataclasses.fields(kind):
        if key := field.metadata.get("key", field.name.replace("_", "-")):
            said = " ".join(texts.get(field.name, "").split())
            properties[key] = {**_type(getattr(defaults, field.name)), "description": said}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _type(default: object) -> dict[str, Any]:
    if isinstance(default, Tests):
        return of(Tests)
    if isinstance(default, Mapping):
        return {"type": "object", "additionalProperties": _TEXT}
    if isinstance(default, tuple):
        return _TEXTS
    if isinstance(default, bool):
        return {"type": "boolean"}
    return {"type": "number", "exclusiveMinimum": 0} if isinstance(default, float) else _TEXT
