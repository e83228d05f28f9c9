"""A JSON schema of the options in [tool.torchwheels], by which editors complete and explain them."""

import ast
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from torchwheels.options.project import Options, Override, Release, Table, Tests


def schema() -> dict[str, Any]:
    """That of the table."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **of(Options)}


def of(kind: type[Table]) -> dict[str, Any]:
    """What a table may hold, by the fields of `kind` and the texts below them."""
    tables: dict[str, Any] = msgspec.json.schema(kind)["$defs"]
    kinds: set[type[Table]] = {kind, Override, Release, Tests}
    for each in kinds:
        options = tables.get(each.__name__, {}).get("properties", {})
        texts = dict(_texts(each))
        for field in msgspec.structs.fields(each) if options else ():
            options[field.encode_name]["description"] = texts.get(field.name, "")
    return {"$defs": tables, **tables[kind.__name__]}


def _texts(kind: type[Table]) -> Iterator[tuple[str, str]]:
    """The fields of a class, each with the text below it."""
    for each in inspect.getmro(kind):
        if issubclass(each, Table):
            (body,) = ast.parse(inspect.getsource(each)).body
            for field, text in itertools.pairwise(getattr(body, "body", ())):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    yield ast.unparse(field.target), " ".join(ast.literal_eval(text.value).split())
