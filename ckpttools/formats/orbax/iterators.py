"""States of data iterators that hosts store with a save, for grain and MaxText.

Peer-to-peer checkpoints store the states of all processes in one file, `data_iter/pygrain_states.json`. Other
checkpoints store one file per process, such as `process_3-of-8.json`. Emergency and multi-tier managers store
none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ckpttools.core.errors import FormatError
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax.saves import Save
from ckpttools.formats.orbax.write import OtherItem
from ckpttools.stores.location import Location

ITEM = "iter"
"""MaxText's name for the item of iterator states."""
_HANDLER = "grain._src.python.checkpoint.handler.CheckpointHandler"
_KEPT_AS = ("data_iter", "iter")
_ALL = "pygrain_states.json"


def iterators_of(save: Save) -> OtherItem | None:
    """Return the iterator states that the hosts of a save stored, or None.

    Raises:
        FormatError: Two files differ, or one is damaged.
        StorageError: A file cannot be read.
    """
    result: dict[str, bytes] = {}
    for share in save.shares:
        for name in _KEPT_AS:
            for file, content in _states(share.step.path / name):
                if result.setdefault(file, content) != content:
                    raise FormatError(
                        "hosts are at different positions in the data",
                        location=share.step.path / name,
                        got=f"{file} differs from that of {save.shares[0].host} or a later host",
                        hint="leave out the directory of one of them",
                    )
    return OtherItem(_HANDLER, dict(sorted(result.items()))) if result else None


def _states(directory: Location) -> Iterator[tuple[str, bytes]]:
    """Yield the file name and the state of each process."""
    together = directory / _ALL
    if together.is_file():
        states = read_json(together)
        odd = [process for process in states if not (process.isascii() and process.isdigit())]
        if odd:
            what, expected = "states of data iterators are numbered by process", "0, 1, and so on"
            raise FormatError(what, location=together, got=repr(odd[0]), expected=expected)
        for process, state in states.items():
            text = state if isinstance(state, str) else json.dumps(state, indent=4)
            yield f"process_{process}-of-{len(states)}.json", text.encode()
    for location in directory.glob("process_*.json"):
        yield location.name, location.read_bytes()
