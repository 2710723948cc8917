"""Names of options in messages: keyword arguments in Python, flags on the command line.

    hint=f"allow its replacement with {option('overwrite', True)}"      overwrite=True      --overwrite
    hint=f"{step('ckpttools.plan_status(plan)', 'ckpt run PLAN --status')} tells of it"

A message is worded when it is made, as a translation would be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from shlex import quote

# Switches whose negative form has its own name, and values that are flags of another command.
_FLAGS: Mapping[tuple[str, object], str] = {
    ("zarr3", False): "--zarr2",
    ("reference", False): "--copy",
    ("per_layer", False): "--whole",
    ("names", "text"): "--names text",
    ("names", "hub"): "--names hub",
}
# Arguments whose flags have names that are reserved in Python.
_FLAG_NAMES = {"names": "as", "everything": "all", "format": "to", "steps": "step"}
_LOCATIONS = {"source": "SRC", "destination": "DST", "checkpoint": "DST", "against": "SRC"} | {
    "base": "BASE",
    "adapter": "ADAPTER",
}
# Placeholders for numbers.
_NUMBER_PLACEHOLDERS = ("N", "X")
_PLACEHOLDER = re.compile(r"\{([a-z][a-z_]*)\}")
_as_flags = False
# Options that only the command that makes a plan accepts, and whether a plan is being run.
_PLAN_ONLY_OPTIONS = ("overwrite",)
_is_plan_running: ContextVar[bool] = ContextVar("is_plan_running", default=False)
_plan_path: ContextVar[str] = ContextVar("plan_path", default="PLAN")


@contextmanager
def as_flags() -> Iterator[None]:
    """Format options as command-line flags inside the `with`, in all threads."""
    global _as_flags
    before, _as_flags = _as_flags, True
    try:
        yield
    finally:
        _as_flags = before


@contextmanager
def as_planned(plan: object = None) -> Iterator[None]:
    """Suggest a new plan in messages about options that a plan has fixed, inside the `with`.

    Args:
        plan: path of the plan, which `plan_step` inserts; None if it is not in a file.
    """
    token = _is_plan_running.set(True)
    path = _plan_path.set(_plan_path.get() if plan is None else quote(str(plan)))
    try:
        yield
    finally:
        _plan_path.reset(path)
        _is_plan_running.reset(token)


def plan_step(call: str, options: str, plan: str = "") -> str:
    """Return the call, or the `ckpt run` command with the path of the plan.

    Args:
        call: for Python.
        options: of the command.
        plan: the path, quoted; "" for that of `as_planned`.
    """
    return step(call, f"ckpt run {plan or _plan_path.get()} {options}")


def option(name: str, value: object = None) -> str:
    """Format an option as the user writes it.

    Args:
        name: of the argument, such as "scan_axis".
        value: value of the option; None for the option itself.

    Returns:
        `scan_axis`, scan=False, scan_axis=0, tied="drop"; as flags --scan-axis, --no-scan, --scan-axis 0,
        --tied drop.
    """
    declared = flag(name, value) if _as_flags else _keyword(name, value)
    return (
        f"a plan made with {declared}" if name in _PLAN_ONLY_OPTIONS and _is_plan_running.get() else declared
    )


def location(name: str) -> str:
    """Format the name of a location argument: `destination`, or DST."""
    return _LOCATIONS[name] if _as_flags else f"`{name}`"


def quoted_option(name: str, value: str) -> str:
    """Format an option whose value a shell would expand: keep="*.bias", or --keep '*.bias'."""
    # Like `shlex.quote`, but always quoted: names of tensors may contain anything.
    return option(name, "'" + value.replace("'", "'\"'\"'") + "'" if _as_flags else value)


def repeated_option(name: str, values: Sequence[str]) -> str:
    """Format an option with several values: drop=["a", "b"], or --drop 'a' --drop 'b'."""
    if _as_flags or len(values) == 1:
        return " ".join(quoted_option(name, item) for item in values)
    listed = ", ".join(f'"{item}"' for item in values)
    return f"{name}=[{listed}]"


def step(call: str, command: str) -> str:
    """Format the next step: a Python call, or a shell command."""
    return f"`{command}`" if _as_flags else f"`{call}`"


def retry_term() -> str:
    """Format the advice to retry: run the same command, or make the same call."""
    return "run the same command again" if _as_flags else "make the same call again"


def with_options(text: str) -> str:
    """Replace each `{name}` in a text by the option `name`."""
    return _PLACEHOLDER.sub(lambda result: option(result[1]), text)


def _keyword(name: str, value: object) -> str:
    if value is None:
        return f"`{name}`"
    return (
        f'{name}="{value}"'
        if isinstance(value, str) and value not in _NUMBER_PLACEHOLDERS
        else f"{name}={value}"
    )


def flag(name: str, value: object = None) -> str:
    """Format an option as a command-line flag."""
    plain = f"--{_FLAG_NAMES.get(name, name).replace('_', '-')}"
    if (name, value) in _FLAGS:
        return _FLAGS[name, value]
    if isinstance(value, bool):
        return plain if value else f"--no-{plain[2:]}"
    return plain if value is None else f"{plain} {value}"
