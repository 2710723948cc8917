"""DeepSpeed's model state files: ordered shapes, buffers, frozen weights and shared weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stored
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape
from ckpttools.formats.pieced import in_shape
from ckpttools.formats.torch.pickled import Record
from ckpttools.formats.torch.saved import SavedFile
from ckpttools.formats.torch.tensors import is_tensor, torch_lengths
from ckpttools.formats.torch.zero_shards import Shapes, Vector


@dataclass(frozen=True)
class ModelStates:
    """The model states that are stored next to the optimizer's vectors.

    Attributes:
        files: The files of all processes if frozen weights are split, otherwise only of the first process.
        is_cut: Whether frozen weights are split across the processes (stage 3).
    """

    files: Sequence[SavedFile]
    is_cut: bool

    @property
    def _said(self) -> dict[Any, Any]:
        return dictionary(self.files[0])

    @property
    def shapes(self) -> list[Shapes]:
        """Shapes of the parameters of each group, in the order of the group's vector."""
        return [_shapes(group) for group in filled_list(self._said.get("param_shapes"), "param_shapes")]

    def buffers_and_frozen(self) -> dict[str, LazyArray]:
        """Return buffers and untrained weights in their own dtypes."""
        self._refuse_experts()
        return {**self._buffers(), **self._frozen()}

    @property
    def names(self) -> set[Any]:
        """Names of all weights of the model."""
        kept = (self._said.get(item) for item in ("module", "frozen_param_shapes", "shared_params"))
        named = (*self.shapes, *(item for item in kept if isinstance(item, dict)))
        return {name for item in named for name in item}

    def frozen_parts(self) -> dict[str, list[Stored]]:
        """Return each file's parts of frozen weights by file name, if frozen weights are split."""
        return {
            file.location.name: [
                flat_vector(item, file) for item in held.values() if isinstance(item, Record)
            ]
            for file in (self.files if self.is_cut else ())
            if isinstance(held := dictionary(file).get("frozen_param_fragments"), dict)
        }

    def shared(self, result: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """Return parameters that share the values of others, under their own names."""
        declared = self._said.get("shared_params")
        aliases = declared.items() if isinstance(declared, dict) else ()
        return {
            alias: result[name]
            for alias, name in aliases
            if type(alias) is str and type(name) is str and name in result
        }

    def others(self, result: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """Return the model's untrained tensors that older releases do not list."""
        module = self._said.get("module")
        kept = module.items() if isinstance(module, dict) else ()
        return {
            name: self.files[0].tensor(value)
            for name, value in kept
            if type(name) is str and name not in result and is_tensor(value)
        }

    def check_step(self) -> None:
        """Raise ValueError if the processes saved after different step counts."""
        steps = {file.location.name: dictionary(file).get("global_steps") for file in self.files}
        check_one_step({name: step if type(step) is int else None for name, step in steps.items()})

    def _buffers(self) -> dict[str, LazyArray]:
        """Return the model's buffers, unchanged."""
        module, names = self._said.get("module"), self._said.get("buffer_names")
        file = self.files[0]
        if not isinstance(names, list | tuple | set):
            raise ValueError(f"{file.location.name} lists no buffers: it is not a model state file")
        kept = module if isinstance(module, dict) else {}
        return {
            name: file.tensor(kept[name]) for name in names if type(name) is str and is_tensor(kept.get(name))
        }

    def _frozen(self) -> dict[str, LazyArray]:
        """Return untrained weights in their own dtypes: complete or, in stage 3, split into equal parts."""
        result: dict[str, LazyArray] = {}
        for name, shape in _shapes(self._said.get("frozen_param_shapes") or {}).items():
            fragments = [dictionary(file, "frozen_param_fragments").get(name) for file in self.files]
            records = [fragment for fragment in fragments if isinstance(fragment, Record)]
            if len(records) < len(self.files):
                raise ValueError(f"{name} is frozen, but some of its parts are missing")
            if not self.is_cut:
                result[name] = self.files[0].tensor(records[0])
                continue
            vector = Vector(
                tuple(flat_vector(item, file) for item, file in zip(records, self.files, strict=True))
            )
            result[name] = in_shape([*vector.stretch(0, _count(shape, vector, name))], shape)
        return result

    def _refuse_experts(self) -> None:
        layers = self._said.get("ds_autoep_layers") or self._said.get("autoep_layers") or ()
        entries = layers if isinstance(layers, list) else ()
        forms = [entry.get("checkpoint_format") for entry in entries if isinstance(entry, dict)]
        if "zero3_partitioned" in forms:
            raise FormatError(
                "experts are split over separate process groups (AutoEP), which no file records",
                location=self.files[0].location,
                hint="convert it to a universal checkpoint: python -m deepspeed.checkpoint.ds_to_universal",
            )


def check_one_step(steps: Mapping[str, int | None]) -> None:
    """Raise ValueError if files have different step counts, given by file name."""
    (first, expected), *_ = steps.items()
    other = next((name for name, step in steps.items() if step != expected), None)
    if other is not None:
        raise ValueError(f"{first} is from step {expected}, but {other} from step {steps[other]}")


def dictionary(file: SavedFile, key: str | None = None) -> dict[Any, Any]:
    """Return a dictionary in a file: the full content, or the value of a key.

    Raises:
        FormatError: The value is not a dictionary.
    """
    value = file.value.get(key) if key is not None and isinstance(file.value, dict) else file.value
    if not isinstance(value, dict):
        raise FormatError(
            f"the file has no {key or 'dictionary'}",
            location=file.location,
            hint="the file is not from DeepSpeed",
        )
    return value


def filled_list(value: Any, name: str) -> Sequence[Any]:
    """Check that a value is a non-empty list and return it; raise ValueError otherwise."""
    if isinstance(value, list | tuple) and value:
        return value
    raise ValueError(f"there is no {name}")


def flat_vector(value: Any, file: SavedFile) -> Stored:
    """Return the vector that a record in a file describes; raise ValueError if it is not a vector."""
    array = file.tensor(value) if isinstance(value, Record) and is_tensor(value) else None
    if isinstance(array, Stored) and array.ndim == 1:
        return array
    if array is not None and not array.size:
        return Stored((0,), array.dtype, next(iter(file.storages.values())).file, 0)
    raise ValueError(f"{file.location.name}: not a flat vector")


def _shapes(group: Any) -> Shapes:
    named = group.items() if isinstance(group, dict) else ()
    shapes = {name: torch_lengths(size) for name, size in named if type(name) is str}
    sound: dict[str, Shape] = {name: size for name, size in shapes.items() if size is not None}
    if not isinstance(group, dict) or len(sound) < len(group):
        raise ValueError("the shapes of parameters are damaged")
    return sound


def _count(shape: Shape, vector: Vector, name: str) -> int:
    count = prod(shape)
    if not 0 < count <= vector.size:
        raise ValueError(f"{name} has {count:,} elements, but its parts {vector.size:,}")
    return count
