"""The prediction of what a MaxText run loads, as frozen dataclasses."""

from __future__ import annotations

from typing import Literal

from ckpttools.core.dataclass import dataclass

Outcome = Literal["loads", "fails", "scratch", "unknown"]
Rule = Literal[
    "resume",
    "load_parameters_path",
    "load_full_state_path",
    "safetensors",
    "safetensors_dynamic",
    "lora_restore_path",
    "none",
]
Expected = Literal["full state", "parameters", "adapter", "nothing"]


@dataclass(frozen=True, slots=True)
class RunSetting:
    """A MaxText setting as a run would have it.

    Attributes:
        name: "run_name"; of a group, "lora.lora_restore_path".
        value: as it is written in YAML.
        source: where it is said: a file, "command line", "environment", "model"; "default" where nowhere.
    """

    name: str
    value: object
    source: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why MaxText would fail or load something else.

    Attributes:
        what: a sentence.
        do: the next step; None where that depends on what is expected.
    """

    what: str
    do: str | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """A rule that MaxText applies, in its order.

    Attributes:
        rule: its name.
        path: where it looks; None where it looks nowhere.
        result: what is there, or why it is not looked at.
    """

    rule: Rule
    path: str | None
    result: str


@dataclass(frozen=True, slots=True, repr=False)
class Resolution:
    """The prediction of what a run would load.

    Attributes:
        maxtext: version whose rules these are.
        outcome: "loads" what is named; "fails", or loads something else, as `problems` say; "scratch":
            nothing is named or found, so training starts with random parameters; "unknown": it depends on
            disks that cannot be looked at from here.
        verdict: the same in one sentence.
        rule: the one that decides.
        path: the directory whose arrays are read; None where there is none.
        step: of the checkpoint, where its directory says it.
        expected: what of it is read.
        tried: all rules in MaxText's order.
        problems: why it would fail; empty if the outcome is "loads".
        notes: what is worth knowing beside that.
        settings: those that matter here and are not at their defaults.
        adapter: what becomes of LoRA's adapters; None without `lora.lora_restore_path`.
    """

    maxtext: str
    outcome: Outcome
    verdict: str
    rule: Rule
    path: str | None
    step: int | None
    expected: Expected
    tried: tuple[Tried, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    settings: tuple[RunSetting, ...]
    adapter: Resolution | None = None

    @property
    def loads(self) -> bool:
        """Return whether the named checkpoint will be loaded, including adapters."""
        return self.outcome == "loads" and (self.adapter is None or self.adapter.loads)

    def __repr__(self) -> str:
        problems = "".join(f"\n  {problem.what}" for problem in self.problems)
        return f"<Resolution by MaxText {self.maxtext}: {self.verdict}{problems}>"
