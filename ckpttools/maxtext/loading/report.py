"""The prediction of which checkpoint a MaxText run loads, as frozen dataclasses."""

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
    """A MaxText setting as it applies to a run.

    Attributes:
        name: The name, such as "run_name" or, in a group, "lora.lora_restore_path".
        value: The value as in YAML.
        source: The source of the value: a file, "command line", "environment", "model", or "default".
    """

    name: str
    value: object
    source: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why MaxText would fail or load something else.

    Attributes:
        what: The reason, in a sentence.
        hint: The hint; None if it depends on the intended checkpoint.
    """

    what: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """One of the rules that MaxText tried, in order of precedence.

    Attributes:
        rule: The name of the rule.
        path: The path that the rule checks; None if it does not check one.
        result: The result of the check, or the reason why it is skipped.
    """

    rule: Rule
    path: str | None
    result: str


@dataclass(frozen=True, slots=True, repr=False)
class Resolution:
    """The prediction of which checkpoint a run would load.

    Attributes:
        maxtext: The version whose rules apply.
        outcome: "loads" if the named checkpoint is loaded; "fails" for a failure or another checkpoint, as
            explained by `problems`; "scratch" if no checkpoint is named or found, so that training starts
            with random parameters; "unknown" if the outcome depends on disks that cannot be accessed from
            here.
        verdict: The outcome in one sentence.
        rule: The rule that decides.
        path: The directory whose arrays are read; None if there is none.
        step: The step of the checkpoint, if its directory shows it.
        expected: The part of the checkpoint that is read.
        rules: All rules in MaxText's order.
        problems: The reasons for a failure; empty if the outcome is "loads".
        notes: Other notes for the user.
        settings: The relevant settings that are not at their defaults.
        adapter: The prediction for LoRA adapters; None without `lora.lora_restore_path`.
    """

    maxtext: str
    outcome: Outcome
    verdict: str
    rule: Rule
    path: str | None
    step: int | None
    expected: Expected
    rules: tuple[RuleCheck, ...]
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
