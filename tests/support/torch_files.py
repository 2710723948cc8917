"""Files as torch.save writes them, made without torch: the same archive and calls in its pickle."""

from __future__ import annotations

import io
import pickle
import sys
import types
import zipfile
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

STORAGES = {
    "float32": "FloatStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
}


@dataclass(frozen=True)
class View:
    """A view of a storage: elements of a numpy dtype, with an offset, a shape and strides in elements."""

    storage: np.ndarray
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def whole(array: np.ndarray) -> View:
    """A contiguous tensor of its own."""
    stride, step = [], 1
    for length in reversed(array.shape):
        stride.append(step)
        step *= max(1, length)
    return View(array.reshape(-1), 0, array.shape, tuple(reversed(stride)))


class _Call:
    """Pickled as a call of a function by its name, which need not exist."""

    def __init__(self, function: types.FunctionType, *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[object, ...]:
        return self.function, self.args


def _named(module: str, name: str) -> types.FunctionType:
    function = types.FunctionType((lambda: None).__code__, {}, name)
    function.__module__, function.__qualname__ = module, name
    return function


REBUILD = _named("torch._utils", "_rebuild_tensor_v2")


@contextmanager
def _importable(*functions: types.FunctionType):
    """While a pickle is written, pickle looks names up."""
    before = {function.__module__: sys.modules.get(function.__module__) for function in functions}
    for function in functions:
        module = sys.modules.setdefault(function.__module__, types.ModuleType(function.__module__))
        if not hasattr(module, function.__name__):
            setattr(module, function.__name__, function)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]


class _Pickler(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, protocol: int, storages: dict[int, tuple[str, np.ndarray]], device: str
    ) -> None:
        super().__init__(file, protocol)
        self._storages, self._device = storages, device
        self.types = {name: _named("torch", name) for name in STORAGES.values()}

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, np.ndarray):
            return None
        key, _ = self._storages.setdefault(id(value), (str(len(self._storages)), value))
        return ("storage", self.types[STORAGES[value.dtype.name]], key, self._device, value.size)

    def reducer_override(self, value: object) -> object:
        if isinstance(value, View):
            return REBUILD, (value.storage, value.offset, value.shape, value.stride, False, {})
        return NotImplemented


def pickled(value: object, protocol: int = 2, device: str = "cpu") -> tuple[bytes, dict[str, bytes]]:
    """The pickle of a value with `View`s in it, and its storages."""
    file, storages = io.BytesIO(), {}
    pickler = _Pickler(file, protocol, storages, device)
    with _importable(REBUILD, *pickler.types.values()):
        pickler.dump(value)
    return file.getvalue(), {key: array.tobytes() for key, array in storages.values()}


def archived(path: Path, data: bytes, storages: Mapping[str, bytes]) -> Path:
    """An archive as torch.save lays it out, around any pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        for key, content in storages.items():
            archive.writestr(f"archive/data/{key}", content)
        archive.writestr("archive/version", "3\n")
    return path


def save(path: Path, value: object, protocol: int = 2, device: str = "cpu") -> Path:
    """What torch.save writes of a value with `View`s in it."""
    return archived(path, *pickled(value, protocol, device))
