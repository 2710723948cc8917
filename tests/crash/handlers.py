"""What is done with the calls that `taps` sees: note them, let one fail, wait for one's turn."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

from crash.taps import Call

READS = frozenset(("read", "pread", "preadv"))
SYNCS = frozenset(("fsync", "fdatasync"))


class Recorder:
    """Notes what changes the file system or makes it durable, and what failed to."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def before(self, call: Call) -> None:
        pass

    def stopped(self, call: Call) -> None:
        if call.name in SYNCS:
            self.calls.append(replace(call, name="failed_sync"))

    def after(self, call: Call) -> None:
        if call.name not in READS:
            self.calls.append(call)


class Counter:
    """Counts calls by name, the ones that fail as well."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def before(self, call: Call) -> None:
        self.counts[call.name] = self.counts.get(call.name, 0) + 1

    def stopped(self, call: Call) -> None:
        pass

    def after(self, call: Call) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Fault:
    """A call that fails.

    Attributes:
        name: of the function.
        number: which call of that name, from 1 on.
        code: the error, an `errno`.
        lasting: whether all later calls of that name fail as well.
    """

    name: str
    number: int
    code: int
    lasting: bool = False


class Failing:
    """Lets one call fail, or all from that one on."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._seen = 0

    def before(self, call: Call) -> None:
        fault = self._fault
        if call.name != fault.name:
            return
        self._seen += 1
        if self._seen == fault.number or (fault.lasting and self._seen > fault.number):
            raise OSError(fault.code, os.strerror(fault.code), call.path or None)

    def stopped(self, call: Call) -> None:
        pass

    def after(self, call: Call) -> None:
        pass


class Turns:
    """Asks at a socket before each call that changes something, and waits for the answer."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)

    def before(self, call: Call) -> None:
        if call.name not in READS:
            self._socket.sendall(b"?")
            self._socket.recv(1)

    def stopped(self, call: Call) -> None:
        pass

    def after(self, call: Call) -> None:
        pass
