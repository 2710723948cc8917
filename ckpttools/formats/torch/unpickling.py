"""Reading a pickle without doing what it says: classes and calls become records, nothing is imported.

A pickle is a program for a machine with a stack. This one knows the instructions that protocols 2 to 5 write
and has no way to reach a module: what a name stands for stays a name (`Global`), and a call of it a
`Record`. Which names may occur is a closed list; others are refused, all of them at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ckpttools.core.errors import FormatError, listing
from ckpttools.formats.torch.pickle_instructions import INSTRUCTIONS
from ckpttools.formats.torch.pickle_limits import COSTS, TooMuchError
from ckpttools.formats.torch.pickle_stack import Machine
from ckpttools.formats.torch.pickled import DamagedPickleError, Global

_STOP = 0x2E
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
    machine = Machine(data)
    try:
        value = _run(machine)
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


def _run(machine: Machine) -> Any:
    data, instructions, take = machine.data, INSTRUCTIONS, machine.limits.take
    while True:
        code = data[machine.at]
        machine.at += 1
        take(COSTS[code])
        if code == _STOP:
            break
        known = instructions.get(code)
        if known is None:
            raise DamagedPickleError(f"instruction {code:#04x} is in no pickle of protocols 2 to 5")
        known(machine)
    if len(machine.stack) != 1 or machine.marks:
        raise DamagedPickleError("it ends with something left over")
    return machine.stack[0]
