"""Runs commands on a system that lacks everything that only Linux has, as macOS does.

With "kernel", system calls fail that other systems do not have. With "system", the C library and Python lack
their functions, and /proc is hidden, so this needs a mount namespace of its own. Reads from stdin, as JSON, a
list of arguments of ckpt, and writes exit code and output of each.
"""

import ctypes
import errno
import fcntl
import json
import os
import struct
import subprocess
import sys

import click.testing
import numpy
import rich.progress
import tensorstore

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN, _ERROR, _ALLOW = 0x20, 0x15, 0x06, 0x00050000, 0x7FFF0000
# Numbers of renameat2, fallocate, sync_file_range and copy_file_range on each architecture.
_CALLS = {"x86_64": (316, 285, 277, 326), "aarch64": (276, 47, 84, 285)}
_NAMES = (
    *(
        "O_DIRECT",
        "copy_file_range",
        "eventfd",
        "fdatasync",
        "getxattr",
        "listxattr",
        "memfd_create",
        "pipe2",
    ),
    *("posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_setaffinity", "setxattr", "splice"),
)
_FUNCTIONS = frozenset(("mallopt", "prctl", "renameat2", "sync_file_range"))


def _refuse_system_calls() -> None:
    """Let system calls fail with ENOSYS (seccomp(2)), as with an older kernel."""
    steps = [(_LOAD, 0, 0, 0)]
    for number in _CALLS[os.uname().machine]:
        steps += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("H6xQ", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert prctl(_PR_SET_SECCOMP, _FILTER, program) == 0, os.strerror(ctypes.get_errno())


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str):
        if name in _FUNCTIONS:
            raise AttributeError(name)
        return super().__getattr__(name)


def _remove_functions() -> None:
    for name in _NAMES:
        if hasattr(os, name):
            delattr(os, name)
    ctypes.CDLL = _Library
    # The number on macOS. Linux refuses it with EINVAL, as file systems do that cannot flush a disk's cache.
    fcntl.F_FULLFSYNC = 51
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/proc"], check=True)
    sys.platform = "darwin"


if __name__ == "__main__":
    # Packages with their own rules for each platform.
    assert all((click.testing, numpy, rich.progress, tensorstore))
    {"kernel": _refuse_system_calls, "system": _remove_functions}[sys.argv[1]]()
    from support.command_line import ckpt

    results = [ckpt(*arguments) for arguments in json.load(sys.stdin)]
    sys.stdout.write(json.dumps([(result.exit_code, result.output) for result in results]))
