"""The model directory that checks examine, and the findings that they yield."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from typing import Any, Literal

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.formats.adapters import has_adapter
from ckpttools.formats.json_file import json_object
from ckpttools.formats.safetensors.format import NAMES
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.view import view_of
from ckpttools.quantized.view import QuantizedView, quantized_view
from ckpttools.stores.base import File
from ckpttools.stores.location import Location

Level = Literal["error", "warning", "info"]
LEVELS: tuple[Level, ...] = ("error", "warning", "info")
Content = File | bytes | Location
# Configuration parts that contain the text model's configuration, outermost first.
_TEXT_PARTS = ("thinker_config", "text_config")
# Published tokenizer files have up to 33 MB.
_MAX_JSON_BYTES = 64 << 20
# Prefixes of a decoder's array names, up to its layers or its embedding.
DECODERS = ("model.language_model.", "language_model.model.", "thinker.model.", "model.", "")
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFinding:
    """A defect of a model directory, or a fact worth knowing.

    Attributes:
        level: "error": a consumer cannot load the model, or loads wrong values; "warning": a tool does not
            find or accept the model, or it wastes space; "info": worth knowing.
        check: Name of the check.
        location: The file or directory.
        what: Description of the defect, with names and counts.
        why: Consequence of the defect.
        hint: Next step, with the exact command if there is one.
        command: The command of the hint, quoted for a shell, or None.
        expected, got: The differing values, if the defect is a difference of two values.
        blocks_writing: Whether commands refuse to write a directory with this defect.
    """

    level: Level
    check: str
    location: str
    what: str
    why: str
    hint: str
    command: str | None = None
    expected: str | None = None
    got: str | None = None
    blocks_writing: bool = False


@dataclass(frozen=True)
class ModelDirectory:
    """A model directory: one that exists, or one that a command is about to write.

    Attributes:
        location: The directory, for messages.
        files: Content of each file in the directory, by name. For an output, only files next to the weights.
        tree: The arrays as the format opened them; None if they cannot be opened or do not have the model's
            names, as in a MaxText checkpoint that carries a configuration and a tokenizer.
        is_output: Whether a command is about to write the directory.
        is_examined: Whether checks may read values and parse large tokenizers. Only doctor allows this.
    """

    location: str
    files: Mapping[str, Content] = field(default_factory=dict)
    tree: Tree | None = None
    is_output: bool = False
    is_examined: bool = False

    @cached_property
    def arrays(self) -> Mapping[str, LazyArray]:
        """The arrays by dotted name; empty if there is no tree."""
        return {} if self.tree is None else by_name(self.tree.arrays)

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The parsed `config.json`; None if it does not exist or cannot be read."""
        return self.json(CONFIG)

    @cached_property
    def quantized(self) -> QuantizedView:
        """The quantized weights of the tree, as the configuration of the directory describes them."""
        tree = Tree({}) if self.tree is None else self.tree
        is_same = tree.metadata.config == self.config
        return quantized_view(tree if is_same else tree.with_metadata(config=self.config))

    @cached_property
    def is_complete_model(self) -> bool:
        """Whether the arrays are those of a complete Hugging Face model, and not of an adapter.

        Other checks report missing shards.
        """
        tree = self.tree
        if tree is None or has_adapter(tree) or NAMES.missing(self.files):
            return False
        if self.is_output:
            return True
        if view_of(tree).is_maxtext:
            return False
        weight_map = (self.json(INDEX_NAME) or {}).get("weight_map")
        if not isinstance(weight_map, Mapping):
            return True
        shards = {name for name in self.files if NAMES.numbered.fullmatch(name)}
        return shards <= {*weight_map.values()} and weight_map.keys() <= self.arrays.keys()

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the text model."""
        config = self.config or {}
        for name in _TEXT_PARTS:
            part = config.get(name)
            config = part if isinstance(part, Mapping) else config
        return config

    def path(self, name: str) -> str:
        """Return a file's location for messages. A file that a command copies is located in the source."""
        content = self.files.get(name)
        if isinstance(content, File):
            return content.path
        return f"{self.location}/{name}" if content is None or isinstance(content, bytes) else str(content)

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        content = self.files[name]
        if isinstance(content, bytes):
            return len(content)
        return content.size if isinstance(content, File) else content.stat().size

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Read the first `max_bytes` of a file, or all of it.

        Raises:
            CheckpointError: The file cannot be read.
        """
        content = self.files[name]
        if isinstance(content, bytes):
            return content[:max_bytes]
        if isinstance(content, File):
            return content.read(0, content.size if max_bytes is None else min(max_bytes, content.size))
        if max_bytes is None:
            return content.read_bytes()
        file = content.open()
        try:
            return file.read(0, min(max_bytes, file.size))
        finally:
            file.close()

    def json(self, name: str) -> Mapping[str, Any] | None:
        """Read the JSON object in a file. Returns None if the file does not exist or cannot be parsed."""
        if name not in self.files or self.size(name) > _MAX_JSON_BYTES:
            return None
        try:
            return json_object(self.read(name), self.path(name), CheckpointError, "", make=None)
        except CheckpointError:
            return None


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """A check of one property of a model directory.

    Attributes:
        name: Name that users see.
        summary: One-line description of the reported defect.
        run: Yields the findings. It reads headers and small files. Only a check that conversions do not run
            may read arrays, piece by piece.
        consumer: Software that rejects or misreads a model with the defect, for docs/tested-guarantees.md.
    """

    name: str
    summary: str
    run: Callable[[ModelDirectory], Iterator[ModelFinding]]
    consumer: str = "transformers"
