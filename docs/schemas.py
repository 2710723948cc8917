"""JSON schemas of everything that `--json` prints, made of the dataclasses of reports."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from inspect import cleandoc, getsource
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# Name of a schema -> class of the report. Names of classes are unique in the package.
REPORTS = {
    "array-values": "ArrayValues",
    "branch": "Branch",
    "chunks": "ChunksReport",
    "collection": "CollectionListing",
    "copy": "CopyReport",
    "diagnosis": "Diagnosis",
    "diff": "DiffReport",
    "error": "JsonError",
    "family-check": "FamilyCheck",
    "family-summary": "FamilySummary",
    "file-verification": "FileVerification",
    "hash": "HashReport",
    "hosts": "HostsListing",
    "maxtext-config": "MaxTextConfig",
    "page": "Page",
    "part": "PartReceipt",
    "plan": "PlanReport",
    "plan-status": "PlanStatus",
    "plan-training": "TrainingPlan",
    "plan-written": "PlanWritten",
    "progress": "ProgressEvent",
    "prune": "PruneReport",
    "published-plan": "PublishedPlan",
    "receipt": "Receipt",
    "resharded": "Resharded",
    "resolution": "Resolution",
    "run": "RunListing",
    "stats": "StatsReport",
    "summary": "Summary",
    "tree": "TreeReport",
    "verification": "Verification",
}
_WRITTEN = ("receipt", "plan")
_WRITING = (
    *("adapter extract", "adapter merge", "adapter to-maxtext", "adapter to-peft", "average", "cast"),
    *("quantize", "remap", "select", "shrink", "stack", "stitch", "strip-optimizer", "synth", "unstack"),
)
_CONVERSIONS = ("hf-to-maxtext", "maxtext-to-hf", "to-orbax", "to-safetensors", "to-zarr3")
# Command -> the schemas of what it prints.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_WRITING, _WRITTEN),
    **{f"convert {name}": (*_WRITTEN, "reports") for name in _CONVERSIONS},
    "PATH": ("summary",),
    "assemble": (*_WRITTEN, "hosts"),
    "cat": ("array-values",),
    "copy": ("copy",),
    "diff": ("diff",),
    "doctor": ("diagnosis", "doctor-list"),
    "families": ("families",),
    "families check": ("family-check",),
    "families show": ("family",),
    "formats": ("formats",),
    "hash": ("hash",),
    "inspect chunks": ("chunks-and-advice",),
    "inspect report": ("page",),
    "inspect stats": ("stats",),
    "inspect tree": ("tree", "run", "collection"),
    "ls": ("run", "collection", "listings"),
    "maxtext-config": ("maxtext-config",),
    "plan": ("plan-written",),
    "plan-training": ("plan-training",),
    "prune": ("prune",),
    "reshard": ("resharded", "plan"),
    "resolve": ("resolution",),
    "run": ("part", "plan-status", "receipt", "resharded", "published-plan", "part-and-published"),
    "verify": ("verification", "file-verification"),
}
_VERSION = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n {4,}.*)*)", re.MULTILINE)


class _Definitions:
    """The schemas of dataclasses that a report refers to, by class name."""

    def __init__(self) -> None:
        self.schemas: dict[str, Any] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """Return the schema of a type."""
        origin, args = get_origin(kind), get_args(kind)
        if kind is Any or kind is object:
            return {}
        if origin in (Union, UnionType):
            return _any_of([self.of(item) for item in args])
        if origin is Literal:
            return {"enum": list(args)}
        if origin in (tuple, list) or (isinstance(origin, type) and issubclass(origin, Collection)):
            return self._of_collection(origin, args)
        if isinstance(kind, type) and is_dataclass(kind):
            return self._of_dataclass(kind)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return {"enum": [item.value for item in kind]}
        if isinstance(kind, type) and issubclass(kind, tuple):
            return {"type": "array"}
        # NaN and infinity, which JSON lacks, become null.
        plain = {NoneType: "null", bool: "boolean", int: "integer", float: ["number", "null"]}
        return {"type": plain.get(kind, "string")}

    def _of_collection(self, origin: Any, args: tuple[Any, ...]) -> dict[str, Any]:
        if issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(args[1])}
        if origin in (set, frozenset):
            return {"type": "string"}
        if origin is tuple and args and args[-1] is not Ellipsis:
            items = [self.of(item) for item in args]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        return {"type": "array", "items": self.of(args[0])} if args else {"type": "array"}

    def _of_dataclass(self, kind: type) -> dict[str, Any]:
        name = kind.__name__
        if name not in self.schemas:
            self.schemas[name] = {}
            self.schemas[name].update(self.body(kind))
        return {"$ref": f"#/$defs/{name}"}

    def body(self, kind: type) -> dict[str, Any]:
        """Return the schema of a dataclass in place."""
        texts, types = dict(_attributes(kind)), _types(kind)
        properties = {}
        for field in fields(kind):
            text = {"description": texts[field.name]} if field.name in texts else {}
            properties[field.name] = {**text, **self.of(types[field.name])}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }


def _any_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a schema that allows several, in one list of types if possible."""
    if {} in choices:
        return {}
    if all(set(item) == {"type"} for item in choices):
        names: list[str] = []
        for item in choices:
            names += item["type"] if isinstance(item["type"], list) else [item["type"]]
        kinds = list(dict.fromkeys(names))
        return {"type": kinds[0] if len(kinds) == 1 else kinds}
    return {"anyOf": choices}


def _types(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, also those imported for type checkers alone."""
    names: dict[str, Any] = {}
    for base in kind.__mro__[::-1]:
        if base is not object:
            names |= vars(sys.modules[base.__module__])
            names |= dict(_checked_imports(base.__module__))
    return get_type_hints(kind, globalns=names, localns=names)


def _checked_imports(module: str) -> Iterator[tuple[str, Any]]:
    for node in ast.parse(getsource(sys.modules[module])).body:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for item in node.body:
                if isinstance(item, ast.ImportFrom) and (item.module or "").startswith("ckpttools"):
                    found = import_module(item.module or "")
                    yield from ((alias.name, getattr(found, alias.name)) for alias in item.names)
                elif isinstance(item, ast.Import):
                    yield from (
                        (alias.asname or alias.name, import_module(alias.name)) for alias in item.names
                    )


def _attributes(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the fields that a docstring describes, with their texts."""
    for base in kind.__mro__[::-1]:
        _, found, text = cleandoc(base.__doc__ or "").partition("\nAttributes:\n")
        section = re.split(r"\n\n(?=\S)", text)[0] if found else ""
        for match in _ATTRIBUTE.finditer(cleandoc(section)):
            for name in match["names"].split(", "):
                yield name, re.sub(r"\bNone\b", "null", " ".join(match["text"].split()))


def schema_of(name: str) -> dict[str, Any]:
    """Return the complete schema of one kind of output."""
    definitions = _Definitions()
    body = _special(name, definitions) or _of_report(name, definitions)
    result = {"$schema": _VERSION, "$id": f"{name}.json", **body}
    return result | ({"$defs": dict(sorted(definitions.schemas.items()))} if definitions.schemas else {})


@cache
def _modules() -> dict[str, str]:
    """Return the module of each class of the package."""
    root = Path(__file__).parents[1]
    paths = sorted((root / "ckpttools").rglob("*.py"))
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in paths}
    return {
        kind: name
        for path, name in names.items()
        for kind in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    }


def _class(name: str) -> type:
    kind = REPORTS[name]
    found: type = getattr(import_module(_modules()[kind]), kind)
    return found


def _of_report(name: str, definitions: _Definitions) -> dict[str, Any]:
    body = definitions.body(_class(name))
    properties = body["properties"]
    if name == "tree":
        properties["subtrees"] = _list_of(definitions.of(_class("branch")))
        body["required"] = [*(item for item in body["required"] if item != "comparison"), "subtrees"]
    if name == "page":
        del properties["html"]
        body["required"].remove("html")
    if name == "diff":
        # Infinities are strings there.
        for schema in (body, *definitions.schemas.values()):
            for part in _parts(schema):
                if part.get("type") == ["number", "null"]:
                    part["type"] = ["number", "string", "null"]
        texts = {"type": "array", "items": {"type": "string"}}
        properties |= {"remarks": {**texts}, "uncompared": {**texts}}
    return _versioned(body)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for item in schema.values():
            yield from _parts(item)
    elif isinstance(schema, list):
        for item in schema:
            yield from _parts(item)


def _versioned(body: dict[str, Any]) -> dict[str, Any]:
    """Add the version of the output, and the name of the event with `--jsonl`."""
    own = {
        "event": {"description": "Kind of the line, with --jsonl.", "type": "string"},
        "schema": {"description": "Version of the output.", "const": 1},
    }
    return {**body, "properties": {**own, **body["properties"]}, "required": ["schema", *body["required"]]}


def _special(name: str, definitions: _Definitions) -> dict[str, Any] | None:
    """Return the schema of output that is not one report."""
    text, switch = {"type": "string"}, {"type": "boolean"}
    if name == "doctor-list":
        return _list_of(_object({"kind": text, "name": text, "summary": text}))
    if name == "formats":
        return _list_of(_object({"name": text, "written": switch}))
    if name == "families":
        return _list_of(definitions.of(_class("family-summary")))
    if name == "family":  # the rows of a family, as in its TOML file
        return _versioned({"type": "object", "properties": {}, "required": []})
    if name == "reports":
        reports = _list_of(_one_of(definitions, "receipt", "plan"))
        return _versioned(_object({"reports": reports, "skipped": _list_of(text)}))
    if name == "listings":
        return _versioned(_object({"listings": _list_of(_one_of(definitions, "run", "collection"))}))
    if name == "part-and-published":
        published = _one_of(definitions, "receipt", "resharded", "published-plan")
        published["anyOf"].append({"type": "null"})
        return _versioned(_object({"part": definitions.of(_class("part")), "published": published}))
    if name == "chunks-and-advice":
        report = definitions.body(_class("chunks"))
        advice = report["properties"].pop("advice")
        report["required"].remove("advice")
        return _versioned(_object({"report": report, "advice": advice}))
    return None


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _one_of(definitions: _Definitions, *names: str) -> dict[str, Any]:
    return {"anyOf": [definitions.of(_class(name)) for name in names]}


NAMES = sorted({"error", "progress"}.union(*COMMANDS.values()))
"""The schemas, by name."""


def schema_text(name: str) -> str:
    """Return the text of `docs/schemas/NAME.json`; `commands` lists the schemas of each command."""
    value = dict(sorted(COMMANDS.items())) if name == "commands" else schema_of(name)
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
