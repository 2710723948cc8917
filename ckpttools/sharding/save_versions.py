"""What tells arrays in memory apart, so that a save that failed goes on with the same arrays and no others.

Arrays of JAX never change: an object is the same elements as long as it lives. Those of numpy do, so their
elements are looked at where they are few, and else taken for others each time.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_MOST_HASHED = 1 << 20
_lock = threading.Lock()
_known: dict[int, tuple[weakref.ref[Any], str]] = {}


def version_of(array: Any) -> str:
    """The same text for the same object, as long as it lives; another one for any other."""
    with _lock:
        result = _known.get(id(array))
        if result is not None and result[0]() is array:
            return result[1]
        built = secrets.token_hex(16)
        with suppress(TypeError):
            _known[id(array)] = weakref.ref(array, _forgetting(id(array), built)), built
        return built


def _forgetting(key: int, built: str) -> Any:
    def forget(gone: object) -> None:
        # Without the lock, which this thread may have: another array may have the number already.
        result = _known.get(key)
        if result is not None and result[1] == built:
            _known.pop(key, None)

    return forget


def version_of_elements(array: np.ndarray) -> str:
    """The same text for few elements that are the same; another one at each call for many."""
    if array.nbytes > _MOST_HASHED:
        return secrets.token_hex(16)
    return hashlib.sha256(array.tobytes()).hexdigest()
