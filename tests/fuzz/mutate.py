"""Mutations that know JSON: most damaged bytes only make text that is no JSON, which every parser refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from archive import packed, unpacked

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "/",
    "..",
    "\0",
    "\ud800",
    "\x1b[2J",
    "0",
    "-1",
    "c",
    "NaN",
    "0x",
    [],
    {},
    [[]],
    [0],
    [2, 3],
    {"": ""},
    {"name": "x"},
    {"configuration": None},
)
Mutator = Callable[[bytes, int], bytes]


def mutated(data: bytes, limit: int, seed: int, plainly: Mutator) -> bytes:
    """Another input like this one.

    Args:
        data: an input.
        limit: longest result.
        seed: of what is random.
        plainly: changes bytes, whatever they mean.
    """
    random_ = random.Random(seed)
    files = list(unpacked(data))
    if not files:
        return _content(data, limit, random_, plainly)[:limit]
    chosen = random_.randrange(len(files))
    name, content = files[chosen]
    match random_.randrange(12):
        case 0:
            del files[chosen]
        case 1:
            files.append((f"{name}{random_.choice(('', '0', '/x', '.orbax-checkpoint-tmp'))}", content))
        case 2:
            other, _ = random_.choice(files)
            files[chosen] = (other.rpartition("/")[0] + "/" + name.rpartition("/")[2], content)
        case 3:
            return plainly(data, limit)
        case _:
            files[chosen] = (name, _content(content, limit, random_, plainly))
    return packed(dict(files))[:limit]


def _content(data: bytes, limit: int, random_: random.Random, plainly: Mutator) -> bytes:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return plainly(data, limit)
    if random_.random() < 0.1:
        return plainly(data, limit)
    try:
        for _ in range(random_.choice((1, 1, 1, 2, 4))):
            document = _changed(document, random_)
        return json.dumps(document).encode()
    except RecursionError:
        # A document may be nested a little less deeply than can be read, and more than can be written.
        return plainly(data, limit)


def _changed(document: Any, random_: random.Random) -> Any:
    locations = list(_locations(document))
    if not locations:
        return random_.choice(ODD)
    holder, key = random_.choice(locations)
    match random_.randrange(6):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(random_.choice(ODD[12:24]))] = holder[key]
        case 2:
            other, where = random_.choice(locations)
            holder[key] = json.loads(json.dumps(other[where]))
        case 3 if isinstance(holder[key], int | float | str):
            holder[key] = _near(holder[key], random_)
        case _:
            # A copy: what is odd must not be changed by the next mutation.
            holder[key] = json.loads(json.dumps(random_.choice(ODD)))
    return document


def _near(value: Any, random_: random.Random) -> Any:
    if isinstance(value, str):
        return value[: random_.randrange(len(value) + 1)] + random_.choice(("", value, "é", "-", "\n", "0"))
    return (
        value + random_.choice((-1, 1, 0.5))
        if random_.random() < 0.5
        else value * random_.choice((-1, 2, 1000))
    )


def _locations(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container with each of its keys."""
    todo = [value]
    while todo:
        holder = todo.pop()
        keys = holder if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in list(keys):
            yield holder, key
            todo.append(holder[key])
