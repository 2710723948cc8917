"""Reading a pickle without doing what it says: classes and calls become records, nothing is imported.

A pickle is a program for a machine with a stack. This one knows the instructions that protocols 2 to 5 write
and has no way to reach a module: what a name stands for stays a name (`Global`), and a call of it a
`Record`. Which names may occur is a closed list; others are refused, all of them at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ckpttools.core.errors import FormatError, listing
from ckpttools.formats.torch.pickle_limits import COSTS, PER_ITEM, Limits, TooMuchError

# What `pickletools` calls these instructions; those of protocols 0 and 1, and EXT, nobody writes any more.
_PROTO, _FRAME, _STOP, _MARK = 0x80, 0x95, 0x2E, 0x28
_MOST_PROTOCOL = 5
# States of random-number generators have 128 bits.
_LONGEST_INTEGER = 64


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function: `torch.FloatStorage`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Record:
    """What a class or function would have made, had it been called.

    Attributes:
        made_by: the class or function.
        args: what it would have been given.
        state: what the object would then have been told it is, or None.
        items: what would have been put into it.
    """

    made_by: Global
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The last word of what makes it: classes move from module to module between releases."""
        return self.made_by.name

    def attribute(self, name: str) -> Any:
        """What its state says under a name; None where that is not there."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        found = (each[name] for each in states if isinstance(each, dict) and name in each)
        return next(found, None)


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """Something outside of the pickle, by what the pickle calls it."""

    key: Any


class DamagedPickleError(Exception):
    """The bytes are no pickle, are cut, or do what no pickle of data does."""


def described(value: Any) -> str:
    """What a value is, in a few words: what it holds may be endless."""
    if isinstance(value, Record):
        return str(value.made_by)
    if isinstance(value, Persistent):
        return "a storage without a tensor"
    return str(value) if isinstance(value, Global) else type(value).__name__


_FAULTS = (
    *(DamagedPickleError, TooMuchError, struct.error),
    *(LookupError, TypeError, ValueError, OverflowError),
)


def unpickled(data: bytes, allowed: Callable[[Global], bool], place: str) -> Any:
    """The values in a pickle: dictionaries, lists, tuples, numbers, texts, and records for all others.

    Nothing is imported, called or looked up, whatever the pickle says. Time and memory are in proportion to
    its length. Values may hold one another, and themselves.

    Args:
        data: the pickle.
        allowed: whether a class or function may occur in it.
        place: for messages.

    Raises:
        FormatError: it is damaged, or names something that is not allowed; says what.
    """
    machine = _Machine(data)
    try:
        value = machine.run()
    except _FAULTS as error:
        raise FormatError(
            "the pickle is damaged, or is none",
            place=place,
            got=f"{type(error).__name__} at byte {machine.at:,} of {len(data):,}: {error}",
            hint="fetch or write the file again",
        ) from error
    strange = sorted({str(each) for each in machine.globals.values() if not allowed(each)})
    if strange:
        _refuse(strange, place)
    return value


def _refuse(strange: Sequence[str], place: str) -> NoReturn:
    raise FormatError(
        "the pickle has objects that no weights are made of:" + listing(strange),
        place=place,
        wanted="tensors, numbers, texts, lists and dictionaries",
        hint="nothing of it was executed; where you trust who wrote it, save the weights alone from there: "
        "torch.save(model.state_dict(), FILE), or as safetensors",
    )


class _Machine:
    """The stack, the memo and where the next instruction is."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.limits = Limits.of(len(data))

    def run(self) -> Any:
        data, instructions, take = self.data, _INSTRUCTIONS, self.limits.take
        while True:
            code = data[self.at]
            self.at += 1
            take(COSTS[code])
            if code == _STOP:
                break
            known = instructions.get(code)
            if known is None:
                raise DamagedPickleError(f"instruction {code:#04x} is in no pickle of protocols 2 to 5")
            known(self)
        if len(self.stack) != 1 or self.marks:
            raise DamagedPickleError("it ends with something left over")
        return self.stack[0]

    def take(self, length: int) -> bytes:
        """The next bytes of the program."""
        start, stop = self.at, self.at + length
        if stop > len(self.data):
            raise DamagedPickleError("it is cut")
        self.at = stop
        return self.data[start:stop]

    def number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.take(layout.size))[0]

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def pop(self) -> Any:
        """The top of the stack above the last mark."""
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise DamagedPickleError("nothing between here and the mark")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def top(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise DamagedPickleError("nothing between here and the mark")
        return self.stack[-1]

    def named(self, module: object, name: object) -> Global:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise DamagedPickleError("a name that is no text")
        self.limits.check_names(len(self.globals))
        return self.globals.setdefault((module, name), Global(module, name))

    def key(self, value: Any) -> Any:
        """A key of a mapping or member of a set: what compares at once, whatever a hostile pickle nests."""
        members = value if isinstance(value, tuple) else (value,)
        if not all(each is None or isinstance(each, _KEYS) for each in members):
            raise DamagedPickleError(f"a {type(value).__name__} as a key")
        if type(value) is not str:
            self.limits.check_key(value)
        return value


def _made(machine: _Machine, what: object, args: object) -> Any:
    """What a call would give: mappings of the standard library are what they hold, the rest are records."""
    if not isinstance(what, Global) or not isinstance(args, tuple):
        raise DamagedPickleError("a call of what is no name")
    if (what.module, what.name) in _MAPPINGS:
        items = args[-1] if args and isinstance(args[-1], list | dict) else ()
        machine.limits.copy(len(items))
        pairs = items.items() if isinstance(items, dict) else items
        return {machine.key(key): value for key, value in pairs}
    return Record(what, args)


_KEYS = (str, int, float, bytes, Record, Global, Persistent)
_MAPPINGS = frozenset((("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "dict")))


def _reduce(machine: _Machine) -> None:
    args, what = machine.pop(), machine.pop()
    machine.stack.append(_made(machine, what, args))


def _new_with_names(machine: _Machine) -> None:
    names, args, what = machine.pop(), machine.pop(), machine.pop()
    made = _made(machine, what, args)
    if names and isinstance(made, Record):
        made.state = names
    machine.stack.append(made)


def _build(machine: _Machine) -> None:
    """What a dictionary is told beside its items (torch's `_metadata`) is left out."""
    state, what = machine.pop(), machine.top()
    if isinstance(what, Record):
        what.state = state
    elif not isinstance(what, dict):
        raise DamagedPickleError("a state for what can have none")


def _put_items(machine: _Machine, pairs: list[Any]) -> None:
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
        raise DamagedPickleError("items for what can have none")


def _append(machine: _Machine, values: list[Any]) -> None:
    target = machine.top()
    if isinstance(target, Record):
        target.items += values
    elif isinstance(target, list):
        target += values
    else:
        raise DamagedPickleError("values for what is no list")


def _add(machine: _Machine) -> None:
    values, target = machine.pop_to_mark(), machine.top()
    if not isinstance(target, set):
        raise DamagedPickleError("members for what is no set")
    machine.limits.take(PER_ITEM * len(values))
    target.update(map(machine.key, values))


def _set_item(machine: _Machine) -> None:
    value, key = machine.pop(), machine.pop()
    _put_items(machine, [key, value])


def _append_one(machine: _Machine) -> None:
    value = machine.pop()
    _append(machine, [value])


def _dict_to_mark(machine: _Machine) -> None:
    pairs = machine.pop_to_mark()
    machine.stack.append({})
    _put_items(machine, pairs)


def _tuple_of(length: int) -> Callable[[_Machine], None]:
    def made(machine: _Machine) -> None:
        values = [machine.pop() for _ in range(length)]
        machine.stack.append(tuple(reversed(values)))

    return made


def _constant(value: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value())


def _scalar(layout: str) -> Callable[[_Machine], None]:
    packed = struct.Struct(layout)
    return lambda machine: machine.stack.append(machine.number(packed))


def _counted(layout: str, value: Callable[[bytes], Any]) -> Callable[[_Machine], None]:
    """What follows its own length."""
    packed = struct.Struct(layout)

    def made(machine: _Machine) -> None:
        machine.stack.append(value(machine.take(machine.number(packed))))

    return made


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _integer(raw: bytes) -> int:
    if len(raw) > _LONGEST_INTEGER:
        raise DamagedPickleError(f"a whole number of {len(raw):,} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _put(layout: str) -> Callable[[_Machine], None]:
    packed = struct.Struct(layout)

    def made(machine: _Machine) -> None:
        machine.memo[machine.number(packed)] = machine.top()

    return made


def _get(layout: str) -> Callable[[_Machine], None]:
    packed = struct.Struct(layout)
    return lambda machine: machine.stack.append(machine.memo[machine.number(packed)])


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.top()


def _global(machine: _Machine) -> None:
    module, name = machine.line(), machine.line()
    machine.stack.append(machine.named(module, name))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.stack.append(machine.named(module, name))


def _drop(machine: _Machine) -> None:
    machine.pop()


def _drop_to_mark(machine: _Machine) -> None:
    machine.pop_to_mark()


def _frame(machine: _Machine) -> None:
    machine.take(8)


def _protocol(machine: _Machine) -> None:
    (number,) = machine.take(1)
    if number > _MOST_PROTOCOL:
        raise DamagedPickleError(f"protocol {number}")


_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
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
