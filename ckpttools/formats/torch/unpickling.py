"""Read a pickle without executing it: classes and calls become records, and nothing is imported.

A pickle is a program for a stack machine. This machine implements the instructions of protocols 2 to 5
and cannot access modules: a name stays a name (`Global`), and a call becomes a `Record`. Names must be in
a closed list; all other names are reported together.

A single byte of a pickle can create an empty set of 216 bytes, and keys with equal hashes make a
dictionary as slow as a list. The values that torch writes count as 20 to 40 times the pickle's length,
which is an upper bound of their memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import count
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.memory_limit import check_resident
from ckpttools.formats.torch.pickled import DamagedPickleError, Global, NamelessCallError, Persistent, Record

_STOP = 0x2E
# Instructions between two memory checks. This many instructions take about 50 MiB, and a check takes 40
# microseconds.
_CHECK_INTERVAL = 1 << 19


class OverLimitError(Exception):
    """The values exceed what a valid pickle of this length needs."""


_FAULTS = (
    *(DamagedPickleError, OverLimitError, struct.error),
    *(LookupError, TypeError, ValueError, OverflowError),
)


def unpickle(data: bytes, allowed: Callable[[Global], bool], location: str) -> Any:
    """Return the values in a pickle as dictionaries, lists, tuples, numbers, texts, and records for the rest.

    Nothing is imported, called or resolved, whatever the pickle contains. Time and memory are proportional to
    its length. Values may contain one another and themselves.

    Args:
        data: The pickle.
        allowed: Returns whether a class or function may occur in the pickle.
        location: The location for messages.

    Raises:
        FormatError: The pickle is damaged or has a name that is not allowed.
        MemoryBudgetError: The values exceed the memory budget.
    """
    machine = Machine(data)
    try:
        value = _run(machine, location)
    except _FAULTS as error:
        if isinstance(error, NamelessCallError):
            _refuse_unknown_calls(machine, allowed, location)
        raise FormatError(
            "the pickle is damaged, or not a pickle",
            location=location,
            got=f"{type(error).__name__} at byte {machine.at:,} of {len(data):,}: {error}",
            hint="fetch or save the file again",
        ) from error
    _refuse_unknown_calls(machine, allowed, location)
    return value


def _refuse_unknown_calls(machine: Machine, allowed: Callable[[Global], bool], location: str) -> None:
    unknown = sorted({str(item) for item in machine.globals.values() if not allowed(item)})
    if unknown:
        weights_hint = "only the weights from there: torch.save(model.state_dict(), FILE), or as safetensors"
        plain = "plain tensors from there, with tensor.dequantize() for quantized ones"
        raise FormatError(
            "the pickle has objects that weights do not contain:" + listing(unknown),
            location=location,
            expected="tensors, numbers, texts, lists and dictionaries",
            hint="nothing in it was executed; if you trust its author, save "
            + (plain if any(item.endswith("Tensor") for item in unknown) else weights_hint),
        )


def _run(machine: Machine, location: str) -> Any:
    for number in count():
        if number:
            check_resident(location)
        if _ran(machine):
            break
    if len(machine.stack) != 1 or machine.marks:
        raise DamagedPickleError("it ends with values left over")
    return machine.stack[0]


def _ran(machine: Machine) -> bool:
    """Execute the next instructions; return whether the program has ended."""
    data, instructions, take = machine.data, INSTRUCTIONS, machine.limits.take
    for _ in range(_CHECK_INTERVAL):
        code = data[machine.at]
        machine.at += 1
        take(COSTS[code])
        if code == _STOP:
            return True
        known = instructions.get(code)
        if known is None:
            raise DamagedPickleError(f"instruction {code:#04x} does not occur in protocols 2 to 5")
        known(machine)
    return False


_FREE, _PER_BYTE = 64 << 20, 64
_MAX_NAMES, _MAX_TUPLES = 10_000, 10_000
# Python's hash of an integer is its remainder modulo this number, so larger integers can be chosen to
# collide.
_HASH_MODULUS = (1 << 61) - 1
# Bytes of memory per instruction (CPython 3.11): the object and its reference on the stack or in the memo.
# Sets take 216 bytes; they are rare and counted higher because nothing else takes as much per byte.
_COSTS = {
    **dict.fromkeys(b"(", 44),
    **dict.fromkeys(b"JMG\x8a\x8b", 56),
    **dict.fromkeys(b"XTUBC\x8c\x8d\x8e\x96", 72),
    **dict.fromkeys(b"})]ltd\x85\x86\x87", 88),
    **dict.fromkeys(b"\x8f\x91", 1000),
    **dict.fromkeys(b"qr\x94", 110),
    **dict.fromkeys(b"R\x81\x92", 300),
    **dict.fromkeys(b"Q", 80),
    **dict.fromkeys(b"s", 110),
    **dict.fromkeys(b"c", 64),
}
COSTS = tuple(_COSTS.get(code, 16) for code in range(256))
PER_ITEM = 60


@dataclass(slots=True)
class Limits:
    """The remaining memory budget of a pickle."""

    memory: int
    copies: int
    tuples: int = _MAX_TUPLES

    @classmethod
    def of(cls, nbytes: int) -> Limits:
        return cls(_FREE + _PER_BYTE * nbytes, nbytes)

    def take(self, nbytes: int) -> None:
        self.memory -= nbytes
        if self.memory < 0:
            raise OverLimitError("its values take far more memory than its length allows")

    def copy(self, count: int) -> None:
        """Account for copied items, because a small pickle may request the same copies again and again."""
        self.copies -= count
        if self.copies < 0:
            raise OverLimitError("more copies than its length allows")

    def check_names(self, count: int) -> None:
        if count > _MAX_NAMES:
            raise OverLimitError(f"more than {_MAX_NAMES:,} classes and functions")

    def check_key(self, key: Any) -> None:
        """Limit the number and size of keys whose hashes can be chosen to collide."""
        members = key if isinstance(key, tuple) else (key,)
        if any(isinstance(member, int) and abs(member) >= _HASH_MODULUS for member in members):
            raise OverLimitError("an integer of more than 60 bits used as a key")
        self.tuples -= isinstance(key, tuple)
        if self.tuples < 0:
            raise OverLimitError(f"more than {_MAX_TUPLES:,} tuples used as keys")


_KEYS = (str, int, float, bytes, Record, Global, Persistent)


class Machine:
    """The state of the machine; the functions below implements the instructions."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.limits = Limits.of(len(data))

    def take(self, length: int) -> bytes:
        """Consume and return the next bytes of the program."""
        start, stop = self.at, self.at + length
        if stop > len(self.data):
            raise DamagedPickleError("it is truncated")
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
        """Pop the top of the stack, above the last mark."""
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise DamagedPickleError("the stack is empty above the mark")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        result = self.stack[start:]
        del self.stack[start:]
        return result

    def top(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise DamagedPickleError("the stack is empty above the mark")
        return self.stack[-1]

    def named(self, module: object, name: object) -> Global:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise DamagedPickleError("a name that is not a string")
        self.limits.check_names(len(self.globals))
        return self.globals.setdefault((module, name), Global(module, name))

    def key(self, value: Any) -> Any:
        """Check that a mapping key or set member has a type that compares in constant time, and return it."""
        members = value if isinstance(value, tuple) else (value,)
        if not all(member is None or isinstance(member, _KEYS) for member in members):
            raise DamagedPickleError(f"a {type(value).__name__} used as a key")
        if type(value) is not str:
            self.limits.check_key(value)
        return value


# Names of instructions as in `pickletools`. Current programs do not write protocols 0 and 1 or EXT.
_PROTO, _FRAME, _MARK = 0x80, 0x95, 0x28
_MAX_PROTOCOL = 5
# States of random number generators have 128 bits.
_LONGEST_INTEGER = 64


def _call_result(machine: Machine, function: object, args: object) -> Any:
    """Return the result of a call: the content of standard mappings, or a record for everything else."""
    if isinstance(function, Record):
        raise NamelessCallError("a call of the result of a call")
    if not isinstance(function, Global) or not isinstance(args, tuple):
        raise DamagedPickleError("a call of something without a name")
    if (function.module, function.name) in _MAPPINGS:
        items = args[-1] if args and isinstance(args[-1], list | dict) else ()
        machine.limits.copy(len(items))
        pairs = items.items() if isinstance(items, dict) else items
        return {machine.key(key): value for key, value in pairs}
    return Record(function, args)


_MAPPINGS = frozenset((("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "dict")))


def _reduce(machine: Machine) -> None:
    args, callee = machine.pop(), machine.pop()
    machine.stack.append(_call_result(machine, callee, args))


def _new_with_names(machine: Machine) -> None:
    names, args, callee = machine.pop(), machine.pop(), machine.pop()
    result = _call_result(machine, callee, args)
    if names and isinstance(result, Record):
        result.state = names
    machine.stack.append(result)


def _build(machine: Machine) -> None:
    """Set state; a dictionary's attributes (torch's `_metadata`) are ignored."""
    state, instance = machine.pop(), machine.top()
    if isinstance(instance, Record):
        instance.state = state
    elif not isinstance(instance, dict):
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
    def result(machine: Machine) -> None:
        values = [machine.pop() for _ in range(length)]
        machine.stack.append(tuple(reversed(values)))

    return result


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
    if number > _MAX_PROTOCOL:
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
