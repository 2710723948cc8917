"""A manifest: the digests of a checkpoint's arrays as a JSON file. See docs/internals.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, replace
from functools import cached_property
from math import prod
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import (
    CheckpointError,
    DestinationExistsError,
    FormatError,
    StorageError,
    UnknownNameError,
)
from ckpttools.core.message_terms import action, option
from ckpttools.digest.canonical import Selection, parameters_among
from ckpttools.digest.digest import BLOCK_BYTES, Digest, algorithm_named, block_count, tree_digest
from ckpttools.digest.leaves import LeafKinds
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

FORMAT = "ckpttools-manifest"
VERSION = 1


NAMES = ("stored", "maxtext")
"""The kinds of names in a manifest: stored names, or those that a conversion to MaxText gives."""


@dataclass(frozen=True)
class Manifest:
    """The digests of a checkpoint's arrays. Equal arrays have equal manifests in any layout.

    Attributes:
        algorithm: Algorithm of the digests.
        selection: Selected arrays.
        arrays: Digests by array name, in order.
        names: One of `NAMES`.
        texts: Texts by name; None in manifests of earlier releases, which do not record them.
        nodes: Empty nodes and kinds of arrays; None if they are not recorded: in manifests of earlier
            releases, of parameters only, or with MaxText's names.
    """

    algorithm: str
    selection: Selection
    arrays: Mapping[str, Digest]
    names: str = NAMES[0]
    texts: Mapping[str, str] | None = field(default_factory=dict)
    nodes: LeafKinds | None = field(default=None, compare=False)

    @cached_property
    def digest(self) -> str:
        """Digest of all arrays."""
        return self._digest(self.arrays)

    @cached_property
    def parameters(self) -> str:
        """Digest of the parameters only, without optimizer state, step and random states."""
        return self._digest(filter(parameters_among(self.arrays).__contains__, self.arrays))

    def of_parameters(self) -> Manifest:
        """Return the manifest of the parameters only."""
        names = parameters_among(self.arrays)
        arrays = {name: item for name, item in self.arrays.items() if name in names}
        selection = replace(self.selection, parameters=True)
        return replace(self, selection=selection, arrays=arrays, texts={}, nodes=None)

    def _digest(self, names: Iterable[str]) -> str:
        return tree_digest(self.algorithm, ((name, self.arrays[name].digest) for name in names))

    def write(self, where: LocationLike, *, overwrite: bool = False) -> None:
        """Write the file atomically. An existing file with the same content is left unchanged.

        Args:
            where: Location of the file.
            overwrite: Whether an existing manifest may be replaced.

        Raises:
            DestinationExistsError: The file exists and may not be replaced.
            StorageError, NoSpaceError: The file cannot be written.
        """
        path, content = parse(where), self._text().encode()
        if path.is_file() and path.read_bytes() == content:
            return
        # Check again, because hours may have passed since the first check.
        check_manifest_name(path, overwrite=overwrite)
        path.put(content)

    def _text(self) -> str:
        """Return JSON with one line per array."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "algorithm": self.algorithm,
            "block_bytes": BLOCK_BYTES,
            "per_layer": self.selection.layers,
            "pattern": self.selection.pattern,
            "only_parameters": self.selection.parameters,
            "names": self.names,
            "digest": self.digest,
            "parameters": self.parameters,
        }
        head |= {} if self.texts is None else {"texts": dict(self.texts)}
        head |= {} if self.nodes is None else {"nodes": asdict(self.nodes)}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
        arrays = [f"    {json.dumps(name)}: {json.dumps(asdict(item))}" for name, item in self.arrays.items()]
        arrays_text = "{\n" + ",\n".join(arrays) + "\n  }" if arrays else "{}"
        return "{\n" + "".join(lines) + f'  "arrays": {arrays_text}\n' + "}\n"


def check_manifest_name(path: Location, *, overwrite: bool = False) -> None:
    """Reject an invalid location for a manifest before the work is done.

    Args:
        path: Location of the manifest.
        overwrite: Whether an existing manifest may be replaced.

    Raises:
        DestinationExistsError: The file exists and may not be replaced.
        StorageError: The parent directory does not exist.
    """
    # A broken link counts as existing.
    if path.lexists() and overwrite and not _is_manifest(path):
        raise DestinationExistsError(
            f"{path} is not replaced: it is not a manifest",
            expected="a new name, or another manifest",
            hint="choose another name",
        )
    if path.lexists() and not overwrite:
        raise DestinationExistsError(
            f"{path} exists",
            expected="a new name for the manifest",
            hint="choose another, or check against this one with "
            f"{action('verify', 'PATH', manifest='FILE')}",
        )
    if not path.parent.is_dir():
        raise StorageError(f"cannot write {path}", got="no such directory", hint="make it first")


def _is_manifest(path: Location) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return not path.is_link()


def read_manifest(where: LocationLike) -> Manifest:
    """Read a manifest from its file.

    Raises:
        StorageError: The file cannot be read.
        FormatError: The file is not a manifest, has another version, or was changed afterwards.
    """
    path = parse(where)
    hint = f"pass a file that {option('manifest')} or {action('hash')} wrote"
    try:
        document = json.loads(path.require_exists().read_bytes())
    except StorageError as error:
        raise error.at(hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise FormatError("the manifest is not JSON", location=path, got=error, hint=hint) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(
            "not a manifest",
            location=path,
            expected=f'a JSON object with "format": "{FORMAT}"',
            hint=f"{action('hash', 'PATH', manifest='FILE')} writes one",
        )
    _require(document, "version", VERSION, path)
    _require_algorithm(document, path)
    _require(document, "block_bytes", BLOCK_BYTES, path)
    return _parse_document(document, path)


def _require(document: Mapping[str, Any], key: str, expected: int, path: Location) -> None:
    if document.get(key) != expected:
        raise FormatError(
            f"a manifest of another {key}",
            location=path,
            got=document.get(key),
            expected=expected,
            hint="use the release of ckpttools that wrote it, or write it again",
        )


def _require_algorithm(document: Mapping[str, Any], path: Location) -> None:
    """Reject an unknown algorithm."""
    try:
        algorithm_named(str(document.get("algorithm")))
    except UnknownNameError as error:
        raise FormatError(
            error.raw.message, location=path, got=document.get("algorithm"), expected=error.raw.expected
        ) from error


def _parse_document(document: Mapping[str, Any], path: Location) -> Manifest:
    """Return the manifest in a document after checking that its digests agree."""
    try:
        entries = {
            name: _digest(name, item, document["algorithm"]) for name, item in document["arrays"].items()
        }
        selection = Selection(
            _require_type(document["pattern"], str),
            _require_type(document["per_layer"], bool),
            _require_type(document["only_parameters"], bool),
        )
        # Older manifests do not record the kind of names.
        names = _require_type(document.get("names", NAMES[0]), str)
        if names not in NAMES:
            raise ValueError(f"names are {names!r}, not {' or '.join(NAMES)}")
        texts = _texts(document.get("texts"))
        nodes = _nodes(document.get("nodes"))
        manifest = Manifest(
            _require_type(document["algorithm"], str), selection, entries, names, texts, nodes
        )
        extra = next(iter(entries.keys() - set(selection.names(entries))), None)
        if extra is not None:
            raise ValueError(f"{extra} is not in the declared selection")
        for key, result in (("digest", manifest.digest), ("parameters", manifest.parameters)):
            if document[key] != result:
                raise ValueError(f"{key} {document[key]}, but the digests of the arrays give {result}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else error
        raise FormatError(
            "the manifest is damaged", location=path, got=got, hint="fetch it again, or write it again"
        ) from error
    return manifest


def _texts(recorded: Any) -> Mapping[str, str] | None:
    if recorded is None:
        return None
    return {name: _require_type(text, str) for name, text in _require_type(recorded, dict).items()}


def _nodes(recorded: Any) -> LeafKinds | None:
    if recorded is None:
        return None
    layout = recorded["layout"]
    return LeafKinds(
        layout=None if layout is None else _require_type(layout, str),
        is_stacked=_require_type(recorded["is_stacked"], bool),
        has_state=_require_type(recorded["has_state"], bool),
        is_read=_require_type(recorded["is_read"], bool),
        kinds={
            name: _require_type(kind, str) for name, kind in _require_type(recorded["kinds"], dict).items()
        },
    )


def _digest(name: str, entry: Mapping[str, Any], algorithm: str) -> Digest:
    shape = tuple(_require_type(length, int) for length in entry["shape"])
    result = Digest.of(algorithm, _require_type(entry["dtype"], str), shape, bytes.fromhex(entry["blocks"]))
    if result.digest != entry["digest"]:
        raise ValueError(
            f"{name}: digest {entry['digest']}, but the digests of its blocks give {result.digest}"
        )
    if result.dtype in DTYPES:
        nbytes = prod(shape) * DTYPES[result.dtype].itemsize
        expected = block_count(nbytes) * 2 * len(algorithm_named(algorithm)(b""))
        if len(result.blocks) != expected:
            raise ValueError(
                f"{name}: {len(result.blocks)} digits of block digests where {nbytes} bytes take {expected}"
            )
    return result


def _require_type(value: Any, expected: type) -> Any:
    if type(value) is not expected:
        raise TypeError(f"{value!r} where {expected.__name__} was expected")
    return value


def first_bad_block(got: Digest, expected: Digest, algorithm: str) -> int:
    """Return the index of the first block in which two arrays of the same type differ."""
    size = 2 * len(algorithm_named(algorithm)(b""))
    pairs = zip(_split_text(got.blocks, size), _split_text(expected.blocks, size), strict=True)
    return next(number for number, (actual, recorded) in enumerate(pairs) if actual != recorded)


def _split_text(text: str, size: int) -> list[str]:
    return [text[k : k + size] for k in range(0, len(text), size)]
