"""Terms of messages on the command line: options as flags, calls as commands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Any, NamedTuple

# Switches whose negative form has its own name, and values that have another flag.
_FLAGS: Mapping[tuple[str, object], str] = {
    ("zarr3", False): "--zarr2",
    ("reference", False): "--copy",
    ("per_layer", False): "--whole",
    ("names", "text"): "--names text",
    ("names", "hub"): "--names hub",
}
# Arguments whose flags have names that are reserved words in Python.
_FLAG_NAMES = {"names": "as", "everything": "all", "format": "to", "steps": "step"}
_LOCATIONS = {"source": "SRC", "destination": "DST", "checkpoint": "DST", "against": "SRC"} | {
    "base": "BASE",
    "adapter": "ADAPTER",
}
_VARIABLES = {"CKPTTOOLS_ALLOW_UNPROTECTED": "--allow-unprotected"}
# Placeholders for values, which need no shell quotes.
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*…?|…")


class ShellCommand(NamedTuple):
    """The command of a public function.

    Attributes:
        words: Name of the command.
        operands: Arguments without a flag, in the order of the command.
        positional: The first arguments of the function.
        more: Flags that follow the operands.
        flags: Arguments whose flags differ from those of other commands.
    """

    words: str
    operands: Sequence[str] = ("source", "destination")
    positional: Sequence[str] = ("source", "destination")
    more: str = ""
    flags: Mapping[str, str] = {}


_PLAN = ("plan",), ("plan",)
_RUN = ("run",), ("run",)
# Functions whose commands have other names or operands. All other commands have the name of their function.
COMMANDS: Mapping[str, ShellCommand] = {
    "adapter_to_maxtext": ShellCommand("adapter to-maxtext"),
    "adapter_to_peft": ShellCommand("adapter to-peft"),
    "assemble": ShellCommand("assemble", ("hosts", "destination"), ("hosts", "destination")),
    "average": ShellCommand("average", ("source", "others", "destination")),
    "check_family": ShellCommand("families check", ("family",), ("family",)),
    "chunks": ShellCommand("inspect chunks"),
    "convert.maxtext": ShellCommand("convert"),
    "diff": ShellCommand("diff", ("a", "b"), ("a", "b")),
    "doctor.checks": ShellCommand("doctor", more="--list"),
    "extract_adapter": ShellCommand("adapter extract", ("base", "source", "destination")),
    "families.formats": ShellCommand("formats"),
    "families.rows": ShellCommand("families show", ("family",), ("family",)),
    "families.toml": ShellCommand("families show", ("family",), ("family",), "--toml"),
    "hash": ShellCommand("hash", flags={"names": "--as"}),
    "hf_to_maxtext": ShellCommand("convert hf-to-maxtext"),
    "inspect": ShellCommand("inspect tree"),
    "inspect.names": ShellCommand("inspect tree", more="--flat"),
    "list_saves": ShellCommand("assemble", ("hosts",), ("hosts",), "--list"),
    "ls": ShellCommand("ls", *_RUN),
    "maxtext_to_hf": ShellCommand("convert maxtext-to-hf"),
    "merge_adapter": ShellCommand("adapter merge", ("source", "adapter", "destination")),
    "plan_status": ShellCommand("run", *_PLAN, "--status"),
    "prune": ShellCommand("prune", *_RUN),
    "prune.run": ShellCommand("prune", *_RUN, "--yes"),
    "publish_plan": ShellCommand("run", *_PLAN, "--publish"),
    "report": ShellCommand("inspect report"),
    "run_part": ShellCommand("run", ("plan",), ("plan", "part")),
    "stats": ShellCommand("inspect stats"),
    "summary": ShellCommand("", ("path",), ("path",)),
    "verify": ShellCommand("verify", ("checkpoint",), ("checkpoint", "against")),
    "verify_files": ShellCommand("verify", ("checkpoint",), ("checkpoint",)),
    "write_plan": ShellCommand("plan"),
}


class FlagTerms:
    """Terms as flags and commands."""

    def option(self, name: str, value: Any) -> str:
        """Format an option; a list repeats it."""
        if isinstance(value, list):
            return " ".join(self.quoted_option(name, item) for item in value)
        if isinstance(value, dict):
            return " ".join(flag(name, quote(f"{key}={item}")) for key, item in value.items())
        return flag(name, value)

    def quoted_option(self, name: str, value: str) -> str:
        """Format an option whose value a shell may expand: --keep '*.bias'."""
        # Like `shlex.quote`, but quotes always, because names of tensors may contain any character.
        return flag(name, "'" + value.replace("'", "'\"'\"'") + "'")

    def location(self, name: str) -> str:
        """Format the name of a location, such as DST."""
        return _LOCATIONS[name]

    def variable(self, name: str) -> str:
        """Format the flag that stands for an environment variable."""
        return _VARIABLES[name]

    def call(self, function: str, args: Sequence[Any], options: Mapping[str, Any]) -> str:
        """Format the command of a function: ckpt run PLAN --status."""
        command = COMMANDS.get(function) or ShellCommand(function.replace("_", "-"))
        declared = dict(zip(command.positional, args, strict=False)) | dict(options)
        words = ["ckpt", *command.words.split()]
        if function in ("convert", "convert.maxtext"):
            words.append(f"to-{declared.pop('format')}" if "format" in declared else "")
        words += [
            word for name in command.operands if name in declared for word in _operand(declared.pop(name))
        ]
        if declared or args or command.more:
            words.append(command.more)
        words += [word for name, value in declared.items() for word in _flag_words(command, name, value)]
        return " ".join(filter(None, words))

    def retry(self) -> str:
        """Format the advice to run the command again."""
        return "run the same command again"

    def traceback(self) -> str:
        """Format the flag that shows tracebacks."""
        return "`ckpt --traceback …`"


def flag(name: str, value: object = None) -> str:
    """Format an option as a command-line flag: --no-scan, --scan-axis 0."""
    plain = f"--{_FLAG_NAMES.get(name, name).replace('_', '-')}"
    if (name, value) in _FLAGS:
        return _FLAGS[name, value]
    if isinstance(value, bool):
        return plain if value else f"--no-{plain[2:]}"
    return plain if value is None else f"{plain} {value}"


def _operand(value: Any) -> list[str]:
    return [_quoted(item) for item in (value if isinstance(value, list) else [value])]


def _flag_words(command: ShellCommand, name: str, value: Any) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        word = item if isinstance(item, bool) else _quoted(item)
        own = {"names": "--names", **command.flags}.get(name)
        yield f"{own} {word}" if own else flag(name, word)


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLACEHOLDER.fullmatch(text) else quote(f"./{text}" if text.startswith("-") else text)
