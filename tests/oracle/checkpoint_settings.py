"""Which settings about checkpoints MaxText itself takes, in its own environment: 200 chosen at random.

    python tests/oracle/checkpoint_settings.py FILE

Writes a list of settings, each with whether MaxText accepts them: the fixture that the planner's
rules are tested against.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

COUNT = 200
CHOICES: dict[str, list[Any]] = {
    "enable_checkpointing": [True, False],
    "enable_multi_tier_checkpointing": [True, False],
    "enable_emergency_checkpoint": [True, False],
    "local_checkpoint_directory": ["", "/local"],
    "local_checkpoint_period": [0, 1, 20, 100],
    "multi_tier_checkpointing_backup_interval_minutes": [None, 5],
    "multi_tier_checkpointing_backup_interval_steps": [None, 10, 100, 1000],
    "load_parameters_path": ["", "gs://bucket/0/items"],
    "load_full_state_path": ["", "gs://bucket/5/items"],
    "checkpoint_period": [1, 500],
    "max_num_checkpoints_to_keep": [None, 3],
}


def chosen(drawn: random.Random) -> dict[str, Any]:
    """Some settings; most leave most alone, as otherwise hardly any would be accepted."""
    names = drawn.sample(sorted(CHOICES), drawn.randint(1, len(CHOICES)))
    return {name: drawn.choice(CHOICES[name]) for name in names}


def is_accepted(settings: dict[str, Any]) -> bool:
    from maxtext.configs import pyconfig

    base = Path(pyconfig.__file__).parent / "base.yml"
    own = {
        "skip_jax_distributed_system": True,
        "hardware": "cpu",
        "run_name": "x",
        "enable_tensorboard": False,
    }
    try:
        pyconfig.initialize_pydantic(["", str(base)], **own, **settings)
    except ValueError:
        return False
    return True


def main() -> None:
    drawn = random.Random(0)
    found = [chosen(drawn) for _ in range(COUNT)]
    listed = [{"settings": each, "accepted": is_accepted(each)} for each in found]
    lines = ",\n".join(json.dumps(each) for each in listed)
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
