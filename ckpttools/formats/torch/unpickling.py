"""Read a pickle without executing it: classes and calls become records, and nothing is imported.

A pickle is a program for a stack machine. This machine implements the instructions of protocols 2 to 5 and
cannot access modules: a name stays a name (`Global`), and a call becomes a `Record`. Names must be in a
closed list; all other names are reported together.
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
# Instructions between two memory checks. This many instructions take about 50 MiB, and a check takes 40
# microseconds.
_AT_ONCE = 1 << 19
_FAULTS = (
    *(DamagedPickleError, TooMuchError, struct.error),
    *(LookupError, TypeError, ValueError, OverflowError),
)


def unpickled(data: bytes, allowed: Callable[[Global], bool], location: str) -> Any:
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
            _refuse_strange(machine, allowed, location)
        raise FormatError(
            "the pickle is damaged, or not a pickle",
            location=location,
            got=f"{type(error).__name__} at byte {machine.at:,} of {len(data):,}: {error}",
            hint="fetch or save the file again",
        ) from error
    _refuse_strange(machine, allowed, location)
    return value


def _refuse_strange(machine: Machine, allowed: Callable[[Global], bool], location: str) -> None:
    strange = sorted({str(item) for item in machine.globals.values() if not allowed(item)})
    if strange:
        alone = "only the weights from there: torch.save(model.state_dict(), FILE), or as safetensors"
        plain = "plain tensors from there, with tensor.dequantize() for quantized ones"
        raise FormatError(
            "the pickle has objects that weights do not contain:" + listing(strange),
            location=location,
            expected="tensors, numbers, texts, lists and dictionaries",
            hint="nothing in it was executed; if you trust its author, save "
            + (plain if any(item.endswith("Tensor") for item in strange) else alone),
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
    for _ in range(_AT_ONCE):
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
