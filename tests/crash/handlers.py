"""Handlers of intercepted calls: recording, failing and taking turns."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

from crash.taps import Call

READS = frozenset(("read", "pread", "preadv"))
SYNCS = frozenset(("fsync", "fdatasync"))


class Recorder:
    """Records calls that change the file system or make it durable, and failed syncs."""

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
    """Counts calls by name, including failing ones."""

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
    """A failing call.

    Attributes:
        name: Name of the function.
        number: Index of the call among those of this name, starting at 1.
        code: Error number, an `errno`.
        lasting: Whether all later calls of this name fail, too.
    """

    name: str
    number: int
    code: int
    lasting: bool = False


class Failing:
    """Makes one call fail, or that call and all later ones."""

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
    """Waits for permission from a socket before each call that changes something."""

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
