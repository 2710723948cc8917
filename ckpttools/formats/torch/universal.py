"""DeepSpeed universal checkpoints: a directory per parameter, with its float32 weights and moments."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stored
from ckpttools.array.tree import Leaf, Metadata, Tree
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.notes import Notes
from ckpttools.core.region import Shape
from ckpttools.formats.base import NOT_A_DIRECTORY, ReadOptions
from ckpttools.formats.pieced import reshape_pieces
from ckpttools.formats.read_only import ReadOnlyFormat
from ckpttools.formats.sidecar_files import sidecar_config
from ckpttools.formats.torch.archive import SavedFile, checksums_in, open_saved_file
from ckpttools.formats.torch.latest import UNIVERSAL, missing_step, step_named
from ckpttools.formats.torch.pickled import Record
from ckpttools.formats.torch.tensors import NotReadableError, is_tensor
from ckpttools.formats.torch.zero import LEFT_OUT, STATE
from ckpttools.formats.torch.zero_model import ModelStates, as_step, step_array
from ckpttools.stores.checksums import ChecksummedRange
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

_FOLDER, _WEIGHTS, _STEP, _SUFFIX = "zero", "fp32.pt", "step.pt", ".pt"
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt", re.DOTALL)
# Keys next to a parameter in current and earlier releases (`deepspeed.checkpoint.constants`).
_VOCABULARY_KEYS = frozenset(("vocab_tensor", "vocab_divisibility_padding_tensor"))
_HINT = "convert it again: python -m deepspeed.checkpoint.ds_to_universal"


@dataclass(frozen=True)
class UniversalFormat(ReadOnlyFormat):
    """The `deepspeed-universal` format; implements `ckpttools.formats.base.Format`."""

    name: str = "deepspeed-universal"
    fault_summary: str = "DeepSpeed universal checkpoints that are incomplete or inconsistent"

    def mismatch_reason(self, path: Location) -> str | None:
        if not path.is_dir():
            return NOT_A_DIRECTORY
        if _is_step(step_named(path, UNIVERSAL)) or missing_step(path, UNIVERSAL, _is_step):
            return None
        return f"no {_FOLDER} with parameters in it"

    def open(self, path: Location, options: ReadOptions) -> Tree:
        if error := missing_step(path, UNIVERSAL, _is_step):
            raise error
        try:
            return _open(path, step_named(path, UNIVERSAL), options)
        except (ValueError, NotReadableError) as error:
            message = "the files of the parameters are inconsistent"
            raise FormatError(message, location=path, got=str(error), hint=_HINT) from error

    def checksums(self, path: Location, options: ReadOptions) -> Iterable[ChecksummedRange]:
        """See `ckpttools.formats.base.SupportsChecksums.checksums`."""
        step = step_named(path, UNIVERSAL)
        folders = [step, *(step / _FOLDER).directories()]
        files = (file for folder in folders for file in folder.glob(f"*{_SUFFIX}"))
        return checksums_in(files, options.max_header_bytes)

    def checkpoint_location(self, path: Location) -> Location:
        """See `ckpttools.formats.base.SupportsLocation.checkpoint_location`."""
        return path if missing_step(path, UNIVERSAL, _is_step) else step_named(path, UNIVERSAL)


FORMAT = UniversalFormat()


def _is_step(path: Location) -> bool:
    folder = path / _FOLDER
    first = next((item for item in folder.iterdir() if item.is_dir()), None) if folder.is_dir() else None
    return first is not None and any(first.glob(f"*{_SUFFIX}"))


@dataclass(frozen=True)
class _Parameter:
    """The files of one parameter, by file name."""

    name: str
    files: Mapping[str, SavedFile]

    def array(self, file: str, shape: Shape | None) -> LazyArray:
        """Return the tensor in a file. Tensors of stage 3 are flat; their shape is in the model file."""
        saved = self.files[file]
        value = saved.value.get("param") if isinstance(saved.value, dict) else saved.value
        if not isinstance(value, Record) or not is_tensor(value):
            raise ValueError(f"{self.name}/{file}: not a tensor")
        array = saved.tensor(value)
        if isinstance(saved.value, dict) or array.shape == shape:
            return array
        if shape is None or not isinstance(array, Stored) or array.size != prod(shape):
            raise ValueError(f"{self.name}/{file} has {array.size:,} elements, but its shape is {shape}")
        return reshape_pieces([array], shape)

    @property
    def moments(self) -> set[str]:
        """Names of the parameter's optimizer moments."""
        return self.files.keys() - {_WEIGHTS, _STEP}

    @property
    def is_of_vocabulary(self) -> bool:
        """Whether padding rows of a vocabulary have been removed."""
        value = self.files[_WEIGHTS].value
        return isinstance(value, dict) and not _VOCABULARY_KEYS.isdisjoint(value)

    def step(self) -> int | None:
        saved = self.files[_STEP]
        return as_step(saved.value, saved)


def _open(path: Location, step: Location, options: ReadOptions) -> Tree:
    result = _parameters(step / _FOLDER, options)
    model, is_whole = _model(step, options)
    shapes = {name: shape for group in model.shapes for name, shape in group.items()}
    saved = {name: item.array(_WEIGHTS, shapes.get(name)) for name, item in result.items()}
    if is_whole:
        cut = {name for name, item in result.items() if item.is_of_vocabulary}
        exact = {name: shape for name, shape in shapes.items() if name not in cut}
        _refuse_others(saved, exact, model.names)
    weights = {name: array for name, array in saved.items() if name in shapes} | model.buffers_and_frozen()
    weights |= model.shared(weights)
    # Untrained weights are also stored in float32, regardless of their own dtype.
    others = {} if model.is_cut else model.others(weights)
    weights = {**saved, **weights, **others} if is_whole else {**saved, **weights}
    missing = sorted({*shapes} - {*saved} | {*others} - {*weights})
    if missing:
        raise FormatError(f"parameters are missing:{listing(missing)}", location=step / _FOLDER, hint=_HINT)
    arrays: dict[TreePath, Leaf] = {(name,): array for name, array in weights.items()}
    if options.with_optimizer:
        _refuse_lacking(step / _FOLDER, [item for name, item in result.items() if name in shapes])
        arrays |= _moments(result, shapes, saved)
    config = sidecar_config(step) or sidecar_config(path)
    notes = Notes() if options.with_optimizer else LEFT_OUT
    return Tree(arrays, Metadata(FORMAT.name, config=config, location=str(path), notes=notes))


def _refuse_others(
    saved: Mapping[str, LazyArray], shapes: Mapping[str, Shape], names: Collection[str]
) -> None:
    """Raise ValueError if weights do not match the model.

    Args:
        saved: The saved weights, by name.
        shapes: Shapes of the complete weights.
        names: All names of the model.
    """
    for name, array in saved.items():
        if name not in names:
            raise ValueError(f"{name} is not a parameter of the model")
        if not array.dtype.is_float:
            raise ValueError(f"{name}/{_WEIGHTS} has {array.dtype}, which is not a dtype of weights")
        if array.shape != shapes.get(name, array.shape):
            got, expected = list(array.shape), list(shapes[name])
            raise ValueError(f"{name}/{_WEIGHTS} has shape {got}, in the model {expected}")


def _refuse_lacking(folder: Location, trained: Sequence[_Parameter]) -> None:
    """Raise an error if a parameter lacks moments that others have; which moments exist varies."""
    kinds = {frozenset(item.moments) for item in trained}
    missing = [
        f"{item.name}/{file}"
        for item in trained
        for file in sorted({file for kind in kinds if item.moments < kind for file in kind - item.moments})
    ]
    if missing:
        raise FormatError(f"moments are missing:{listing(missing)}", location=folder, hint=_HINT)


def _moments(
    result: Mapping[str, _Parameter], shapes: Mapping[str, Shape], saved: Mapping[str, LazyArray]
) -> dict[TreePath, Leaf]:
    arrays: dict[TreePath, Leaf] = {}
    for name, item in result.items():
        for file in sorted(item.moments):
            array = item.array(file, shapes.get(name))
            if array.shape != saved[name].shape:
                got, expected = list(array.shape), list(saved[name].shape)
                raise ValueError(f"{name}/{file} has shape {got}, but its weights have {expected}")
            arrays[STATE, name, file.removesuffix(_SUFFIX)] = array
    steps = {name: item.step() for name, item in result.items() if _STEP in item.files}
    done = step_array(steps) if steps else None
    return arrays if done is None else {**arrays, (STATE, "step"): done}


def _parameters(folder: Location, options: ReadOptions) -> dict[str, _Parameter]:
    """Return the files of each parameter; by default only its weights."""
    names = sorted(entry.name for entry in folder.entries() if entry.is_dir)

    def files(name: str) -> list[str]:
        existing_files = (entry for entry in (folder / name).entries() if not entry.is_dir)
        return sorted(item.name for item in existing_files if item.name.endswith(_SUFFIX))

    existing_files_by_name = dict(zip(names, map_concurrently(folder.store, files, names), strict=True))
    without = [f"{name}/{_WEIGHTS}" for name, item in existing_files_by_name.items() if _WEIGHTS not in item]
    if without:
        raise FormatError(f"weights are missing:{listing(without)}", location=folder, hint=_HINT)
    all_files = [(name, file) for name, item in existing_files_by_name.items() for file in item]
    expected = [item for item in all_files if options.with_optimizer or item[1] == _WEIGHTS]
    saved = map_concurrently(
        folder.store, lambda at: open_saved_file(folder / at[0] / at[1], options), expected
    )
    result: dict[str, dict[str, SavedFile]] = defaultdict(dict)
    for (name, file), item in zip(expected, saved, strict=True):
        result[name][file] = item
    return {name: _Parameter(name, item) for name, item in result.items()}


def _model(step: Location, options: ReadOptions) -> tuple[ModelStates, bool]:
    """Read the model's files; also return whether the first of them has the complete model."""
    matches = [
        match for entry in step.entries() if not entry.is_dir and (match := _MODEL.fullmatch(entry.name))
    ]
    is_cut = any(match["rank"] is not None for match in matches)
    first = [item for item in matches if int(item["model"]) == 0 and (item["rank"] is not None) == is_cut]
    names = [match[0] for match in sorted(first, key=lambda match: int(match["rank"] or 0))]
    if not names:
        raise FormatError(
            "no file describes the model", location=step, expected="*model_states.pt", hint=_HINT
        )
    files = map_concurrently(step.store, lambda name: open_saved_file(step / name, options), names)
    return ModelStates(files, is_cut), all(int(match["model"]) == 0 for match in matches)
