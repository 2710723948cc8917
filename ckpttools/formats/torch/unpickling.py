"""Reading a pickle without doing what it says: classes and calls become records, nothing is imported.

A pickle is a program for a machine with a stack. This one knows the instructions that protocols 2 to 5 write
and has no way to reach a module: what a name stands for stays a name (`Global`), and a call of it a
`Record`. Which names may occur is a closed list; others are refused, all of them at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import count
from typing import Any

from ckpttools.core.budget import check_resident
from ckpttools.core.errors import FormatError, listing
from ckpttools.formats.torch.pickle_instructions import INSTRUCTIONS
from ckpttools.formats.torch.pickle_limits import COSTS, TooMuchError
from ckpttools.formats.torch.pickle_stack import Machine
from ckpttools.formats.torch.pickled import DamagedPickleError, Global, NamelessCallError

_STOP = 0x2E
# Instructions between two looks at the memory: they take some 50 MiB, and a look 40 microseconds.
_AT_ONCE = 1 << 19
_FAULTS = (
    *(DamagedPickleError, TooMuchError, struct.error),
    *(LookupError, TypeError, ValueError, OverflowError),
)


def unpickled(data: bytes, allowed: Callable[[Global], bool], location: str) -> Any:
    """Return the values in a pickle: dictionaries, lists, tuples, numbers, texts, and records for all others.

    Nothing is imported, called or looked up, whatever the pickle says. Time and memory are in proportion to
    its length. Values may hold one another, and themselves.

    Args:
        data: the pickle.
        allowed: whether a class or function may occur in it.
        location: for messages.

    Raises:
        FormatError: it is damaged, or names something that is not allowed; says what.
        MemoryBudgetError: its values take more than the command may.
    """
    machine = Machine(data)
    try:
        value = _run(machine, location)
    except _FAULTS as error:
        if isinstance(error, NamelessCallError):
            _refuse_strange(machine, allowed, location)
        raise FormatError(
            "the pickle is damaged, or is none",
            location=location,
            got=f"{type(error).__name__} at byte {machine.at:,} of {len(data):,}: {error}",
            hint="fetch or write the file again",
        ) from error
    _refuse_strange(machine, allowed, location)
    return value


def _refuse_strange(machine: Machine, allowed: Callable[[Global], bool], location: str) -> None:
    strange = sorted({str(item) for item in machine.globals.values() if not allowed(item)})
    if strange:
        alone = "the weights alone from there: torch.save(model.state_dict(), FILE), or as safetensors"
        plain = "plain tensors from there, of such as are quantized tensor.dequantize()"
        raise FormatError(
            "the pickle has objects that no weights are made of:" + listing(strange),
            location=location,
            expected="tensors, numbers, texts, lists and dictionaries",
            hint="nothing of it was executed; where you trust who wrote it, save "
            + (plain if any(item.endswith("Tensor") for item in strange) else alone),
        )


def _run(machine: Machine, location: str) -> Any:
    for number in count():
        if number:
            check_resident(location)
        if _ran(machine):
            break
    if len(machine.stack) != 1 or machine.marks:
        raise DamagedPickleError("it ends with something left over")
    return machine.stack[0]


def _ran(machine: Machine) -> bool:
    """Carries out the next instructions; returns whether they were the last."""
    data, instructions, take = machine.data, INSTRUCTIONS, machine.limits.take
    for _ in range(_AT_ONCE):
        code = data[machine.at]
        machine.at += 1
        take(COSTS[code])
        if code == _STOP:
            return True
        known = instructions.get(code)
        if known is None:
            raise DamagedPickleError(f"instruction {code:#04x} is in no pickle of protocols 2 to 5")
        known(machine)
    return False
