"""Where the repository keeps what tests read."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
FIXTURES = ROOT / "fixtures"
# Models by family, as published and as MaxText made them.
GOLDEN = FIXTURES / "golden"
# The same by a later version of MaxText.
GOLDEN_0_2_5 = FIXTURES / "golden-0.2.5"
# Checkpoints as Orbax writes them, whole and damaged.
ORBAX = FIXTURES / "orbax"
# Training states.
TRAIN = FIXTURES / "train"

# The model that most tests take.
HF = GOLDEN / "llama3.1" / "hf"
# MaxText's own training run, step 1, with moments cast to bfloat16.
TRAINED = TRAIN / "llama_scanned"
