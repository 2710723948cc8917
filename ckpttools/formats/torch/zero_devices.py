"""Detect DeepSpeed files whose names were swapped, by the device of each process.

In stage 3, nothing in a file identifies its process, and all vectors have the same length. But torch records
the device of a storage, such as `cuda:3`, unless the optimizer was offloaded to the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckpttools.formats.torch.pickled import Persistent, Record
from ckpttools.formats.torch.saved import SavedFile

_ACCELERATOR = re.compile(r"(?!cpu)[a-z]+:(?P<index>\d{1,4})")


def device_of(file: SavedFile) -> str | None:
    """Return the only accelerator device of the tensors in a file; None if there are none or several."""
    result = {match[0] for location in _locations(file.value) if (match := _ACCELERATOR.fullmatch(location))}
    return result.pop() if len(result) == 1 else None


def _locations(value: Any) -> Iterator[str]:
    """Yield the devices of all tensors in a value."""
    rest, seen = [value], set[int]()
    while rest:
        each = rest.pop()
        if isinstance(each, Persistent):
            location = each.key[3] if isinstance(each.key, tuple) and len(each.key) > 3 else None
            yield from [location] if isinstance(location, str) else []
        elif isinstance(each, dict | list | tuple | Record) and id(each) not in seen:
            seen.add(id(each))
            inner = each.args if isinstance(each, Record) else each
            rest.extend(inner.values() if isinstance(inner, dict) else inner)


def refuse_other_devices(pairs: Iterable[tuple[SavedFile, SavedFile]]) -> None:
    """Raise ValueError if two files of one process were saved on different devices."""
    for pair in pairs:
        (one, first), (other, second) = ((file.location.name, device_of(file)) for file in pair)
        if first and second and first != second:
            raise ValueError(
                f"{one} was saved on {first} and {other} on {second}: one is the file of another process"
            )


def disorder(files: Sequence[SavedFile]) -> str | None:
    """Describe how devices differ from the order of the processes; None if they match or are unknown.

    Launchers number processes machine by machine or round-robin across machines.
    """
    devices = [device_of(file) for file in files]
    matches = [_ACCELERATOR.fullmatch(device) for device in devices if device]
    order = [int(match["index"]) for match in matches if match]
    machine = 1 + max(order, default=0)
    by_machine = [rank % machine for rank in range(len(files))]
    if len(order) < len(files) or sorted(order) != sorted(by_machine) or order in (by_machine, sorted(order)):
        return None
    first = next(rank for rank, index in enumerate(order) if index != by_machine[rank])
    return (
        f"{files[first].location.name} was saved on {devices[first]}, but processes usually have the order "
        "of their "
        "devices: if files were renamed or exchanged, the weights are mixed up"
    )
