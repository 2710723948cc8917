"""Implementation of each pickle instruction; instructions that would call something create a record."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ckpttools.formats.torch.pickle_limits import PER_ITEM
from ckpttools.formats.torch.pickle_stack import Machine
from ckpttools.formats.torch.pickled import DamagedPickleError, Global, NamelessCallError, Persistent, Record

# Names of instructions as in `pickletools`. Current programs do not write protocols 0 and 1 or EXT.
_PROTO, _FRAME, _MARK = 0x80, 0x95, 0x28
_MOST_PROTOCOL = 5
# States of random number generators have 128 bits.
_LONGEST_INTEGER = 64


def _made(machine: Machine, what: object, args: object) -> Any:
    """Return the result of a call: the content of standard mappings, or a record for everything else."""
    if isinstance(what, Record):
        raise NamelessCallError("a call of the result of a call")
    if not isinstance(what, Global) or not isinstance(args, tuple):
        raise DamagedPickleError("a call of something without a name")
    if (what.module, what.name) in _MAPPINGS:
        items = args[-1] if args and isinstance(args[-1], list | dict) else ()
        machine.limits.copy(len(items))
        pairs = items.items() if isinstance(items, dict) else items
        return {machine.key(key): value for key, value in pairs}
    return Record(what, args)


_MAPPINGS = frozenset((("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "dict")))


def _reduce(machine: Machine) -> None:
    args, what = machine.pop(), machine.pop()
    machine.stack.append(_made(machine, what, args))


def _new_with_names(machine: Machine) -> None:
    names, args, what = machine.pop(), machine.pop(), machine.pop()
    built = _made(machine, what, args)
    if names and isinstance(built, Record):
        built.state = names
    machine.stack.append(built)


def _build(machine: Machine) -> None:
    """Set state; a dictionary's attributes (torch's `_metadata`) are ignored."""
    state, what = machine.pop(), machine.top()
    if isinstance(what, Record):
        what.state = state
    elif not isinstance(what, dict):
        raise DamagedPickleError("a state for an object without state")


def _put_items(machine: Machine, pairs: list[Any]) -> None:
    target = machine.top()
    if len(pairs) % 2:
        raise DamagedPickleError("a key without a value")
    machine.limits.take(PER_ITEM * len(pairs))
    items = zip(pairs[::2], pairs[1::2], strict=True)
    if isinstance(target, dict):
        target.update((machine.key(key), value) for key, value in items)
    elif isinstance(target, Record):
        target.items += items
    else:
        raise DamagedPickleError("items for an object without items")


def _append(machine: Machine, values: list[Any]) -> None:
    target = machine.top()
    if isinstance(target, Record):
        target.items += values
    elif isinstance(target, list):
        target += values
    else:
        raise DamagedPickleError("values for an object that is not a list")


def _add(machine: Machine) -> None:
    values, target = machine.pop_to_mark(), machine.top()
    if not isinstance(target, set):
        raise DamagedPickleError("members for an object that is not a set")
    machine.limits.take(PER_ITEM * len(values))
    target.update(map(machine.key, values))


def _set_item(machine: Machine) -> None:
    value, key = machine.pop(), machine.pop()
    _put_items(machine, [key, value])


def _append_one(machine: Machine) -> None:
    value = machine.pop()
    _append(machine, [value])


def _dict_to_mark(machine: Machine) -> None:
    pairs = machine.pop_to_mark()
    machine.stack.append({})
    _put_items(machine, pairs)


def _tuple_of(length: int) -> Callable[[Machine], None]:
    def built(machine: Machine) -> None:
        values = [machine.pop() for _ in range(length)]
        machine.stack.append(tuple(reversed(values)))

    return built


def _constant(value: Callable[[], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(value())


def _scalar(layout: str) -> Callable[[Machine], None]:
    packed = struct.Struct(layout)
    return lambda machine: machine.stack.append(machine.number(packed))


def _counted(layout: str, value: Callable[[bytes], Any]) -> Callable[[Machine], None]:
    """Read a length-prefixed value."""
    packed = struct.Struct(layout)

    def built(machine: Machine) -> None:
        machine.stack.append(value(machine.take(machine.number(packed))))

    return built


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _integer(raw: bytes) -> int:
    if len(raw) > _LONGEST_INTEGER:
        raise DamagedPickleError(f"an integer of {len(raw):,} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _put(layout: str) -> Callable[[Machine], None]:
    packed = struct.Struct(layout)

    def built(machine: Machine) -> None:
        machine.memo[machine.number(packed)] = machine.top()

    return built


def _get(layout: str) -> Callable[[Machine], None]:
    packed = struct.Struct(layout)
    return lambda machine: machine.stack.append(machine.memo[machine.number(packed)])


def _memoize(machine: Machine) -> None:
    machine.memo[len(machine.memo)] = machine.top()


def _global(machine: Machine) -> None:
    module, name = machine.line(), machine.line()
    machine.stack.append(machine.named(module, name))


def _stack_global(machine: Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.stack.append(machine.named(module, name))


def _drop(machine: Machine) -> None:
    machine.pop()


def _drop_to_mark(machine: Machine) -> None:
    machine.pop_to_mark()


def _frame(machine: Machine) -> None:
    machine.take(8)


def _protocol(machine: Machine) -> None:
    (number,) = machine.take(1)
    if number > _MOST_PROTOCOL:
        raise DamagedPickleError(f"protocol {number}")


INSTRUCTIONS: dict[int, Callable[[Machine], None]] = {
    _PROTO: _protocol,
    _FRAME: _frame,
    _MARK: lambda machine: machine.marks.append(len(machine.stack)),
    ord("0"): _drop,
    ord("1"): _drop_to_mark,
    ord("2"): lambda machine: machine.stack.append(machine.top()),
    ord("N"): _constant(lambda: None),
    0x88: _constant(lambda: True),
    0x89: _constant(lambda: False),
    ord("J"): _scalar("<i"),
    ord("K"): _scalar("<B"),
    ord("M"): _scalar("<H"),
    ord("G"): _scalar(">d"),
    0x8A: _counted("<B", _integer),
    0x8B: _counted("<I", _integer),
    ord("X"): _counted("<I", _text),
    0x8C: _counted("<B", _text),
    0x8D: _counted("<Q", _text),
    ord("T"): _counted("<I", lambda raw: raw.decode("latin-1")),
    ord("U"): _counted("<B", lambda raw: raw.decode("latin-1")),
    ord("B"): _counted("<I", bytes),
    ord("C"): _counted("<B", bytes),
    0x8E: _counted("<Q", bytes),
    0x96: _counted("<Q", bytearray),
    ord(")"): _constant(tuple),
    ord("t"): lambda machine: machine.stack.append(tuple(machine.pop_to_mark())),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("]"): _constant(list),
    ord("l"): lambda machine: machine.stack.append(machine.pop_to_mark()),
    ord("a"): _append_one,
    ord("e"): lambda machine: _append(machine, machine.pop_to_mark()),
    ord("}"): _constant(dict),
    ord("d"): _dict_to_mark,
    ord("s"): _set_item,
    ord("u"): lambda machine: _put_items(machine, machine.pop_to_mark()),
    0x8F: _constant(set),
    0x90: _add,
    0x91: lambda machine: machine.stack.append(frozenset(map(machine.key, machine.pop_to_mark()))),
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    0x81: _reduce,
    0x92: _new_with_names,
    ord("b"): _build,
    ord("Q"): lambda machine: machine.stack.append(Persistent(machine.pop())),
    ord("q"): _put("<B"),
    ord("r"): _put("<I"),
    0x94: _memoize,
    ord("h"): _get("<B"),
    ord("j"): _get("<I"),
}
