"""The commands that write, each on a tiny checkpoint, and their destination."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from support import hf_models
from support.locations import TRAINED

from crash.effort import ALL
from crash.runner import Ended, Runner

SOURCES, LOCATION = "src", "place"
_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 48,
}
_RULES = """
[[rules]]
from = "model.norm.weight"
to = "renamed.weight"
"""
# The model that is converted, another one, and that of which DST holds a conversion already.
MODEL, OTHER, OLD = "a", "b", "c"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command that writes.

    Attributes:
        name: Name of the test case.
        command: Arguments before SRC; {root} is the root of the runner.
        source: Source: "hf", "maxtext", "unscanned", "train", "adapter" or "lora".
        options: Arguments after DST.
        beside: Arguments between SRC and DST.
        destination: Name of DST.
        replaces: Whether DST exists and is overwritten.
        exchange: Whether the system supports exchanging two names.
    """

    name: str
    command: str
    source: str
    options: str = ""
    destination: str = "out"
    replaces: bool = False
    exchange: bool = True
    beside: str = ""

    def args(self, root: Path, model: str) -> tuple[str, ...]:
        """Return the command line with one of the models as SRC."""
        source, destination = root / SOURCES / f"{self.source}-{model}", root / LOCATION / self.destination
        beside, options = (
            words.format(root=root, location=root / LOCATION).split() for words in (self.beside, self.options)
        )
        overwrite = ("--overwrite",) if self.replaces else ()
        quiet = ("--no-progress", "--jobs", "1")
        return (
            *self.command.format(root=root).split(),
            str(source),
            *beside,
            str(destination),
            *options,
            *overwrite,
            *quiet,
        )

    def run(self, runner: Runner, model: str = MODEL, **more: object) -> Ended:
        return runner.run(*self.args(runner.root, model), exchange=self.exchange, **more)  # type: ignore[arg-type]


_TO_MAXTEXT, _TO_HF, _TO_SAFETENSORS = (
    f"convert {name}" for name in ("hf-to-maxtext", "maxtext-to-hf", "to-safetensors")
)
# Its factors are made when it is planned; what the others write is read as all else is.
_EXTRACT = Scenario("adapter-extract", "adapter extract", "hf", "--rank 2", beside="{root}/src/hf-c")
_ADAPTERS = (
    Scenario("adapter-merge", "adapter merge", "hf", beside="{root}/src/adapter-a"),
    Scenario("adapter-to-maxtext", "adapter to-maxtext", "adapter", "--base {root}/src/hf-a"),
    Scenario("adapter-to-peft", "adapter to-peft", "lora", "--base {root}/src/hf-a"),
)
SCENARIOS = (
    Scenario("hf-to-maxtext", _TO_MAXTEXT, "hf"),
    Scenario("hf-to-maxtext-zstd", _TO_MAXTEXT, "hf", "--compression zstd"),
    Scenario("hf-to-maxtext-no-ocdbt", _TO_MAXTEXT, "hf", "--no-ocdbt"),
    Scenario("hf-to-maxtext-manifest", _TO_MAXTEXT, "hf", "--manifest {location}/digests.json"),
    Scenario("hf-to-maxtext-overwrite", _TO_MAXTEXT, "hf", replaces=True),
    Scenario("hf-to-maxtext-overwrite-no-exchange", _TO_MAXTEXT, "hf", replaces=True, exchange=False),
    Scenario("maxtext-to-hf", _TO_HF, "maxtext", "--max-shard-size 6kB"),
    Scenario("maxtext-to-hf-overwrite", _TO_HF, "maxtext", replaces=True),
    Scenario("to-safetensors-no-exchange", _TO_SAFETENSORS, "maxtext", replaces=True, exchange=False),
    Scenario("to-orbax-step", "convert to-orbax", "hf", destination="run/5"),
    Scenario("to-orbax-reference", "convert to-orbax", "maxtext", "--reference"),
    Scenario("to-zarr3", "convert to-zarr3", "maxtext"),
    Scenario("strip-optimizer-step", "strip-optimizer", "train", destination="run/5"),
    Scenario("strip-optimizer-overwrite", "strip-optimizer", "train", "--copy", replaces=True),
    Scenario("unstack-zstd-overwrite", "unstack", "maxtext", "--compression zstd", replaces=True),
    Scenario("remap", "remap", "hf", "--map {root}/src/rules.toml"),
    Scenario("cast-overwrite", "cast", "maxtext", "--dtype float32 --no-ocdbt", replaces=True),
    Scenario("average", "average {root}/src/maxtext-b", "maxtext"),
    Scenario("shrink", "shrink", "unscanned", "--layers 1 --vocab 20 --copy"),
    Scenario("select-manifest", "select", "hf", "--drop lm_head.weight --manifest {location}/digests.json"),
    _EXTRACT,
    *(_ADAPTERS if ALL else ()),
)


def make_sources(runner: Runner) -> None:
    """Write the sources of the scenarios for three models."""
    sources = runner.root / SOURCES
    sources.mkdir(parents=True)
    (sources / "rules.toml").write_text(_RULES)
    for seed, model in enumerate((MODEL, OTHER, OLD)):
        hf_models.write_llama(sources / f"hf-{model}", seed=seed, **_SIZES)
        hf = str(sources / f"hf-{model}")
        _done(runner.run(*_TO_MAXTEXT.split(), hf, str(sources / f"maxtext-{model}")))
        _done(runner.run(*_TO_MAXTEXT.split(), hf, str(sources / f"unscanned-{model}"), "--no-scan"))
    runner.practise(*_TO_MAXTEXT.split(), str(sources / "hf-a"), str(runner.root / "practice"))
    runner.practise(*_TO_HF.split(), str(runner.root / "practice"), str(runner.root / "hf"))
    for model, dtype in ((MODEL, "float32"), (OTHER, "bfloat16"), (OLD, "float16")):
        target = str(sources / f"train-{model}")
        _done(runner.run("cast", str(TRAINED), target, "--dtype", dtype, "--copy"))
    for model, tuned in ((MODEL, OTHER), (OTHER, OLD), (OLD, MODEL)):
        base, adapter = str(sources / f"hf-{model}"), str(sources / f"adapter-{model}")
        _done(runner.run("adapter", "extract", str(sources / f"hf-{tuned}"), base, adapter, "--rank", "2"))
        _done(runner.run("adapter", "to-maxtext", adapter, str(sources / f"lora-{model}"), "--base", base))


def _done(ended: Ended) -> None:
    assert ended.code == 0, str(ended)


def empty_location(root: Path, scenario: Scenario) -> Path:
    """Create the destination's directory with unrelated neighbors of DST, and return DST."""
    location = root / LOCATION
    shutil.rmtree(location, ignore_errors=True)
    destination = location / scenario.destination
    destination.parent.mkdir(parents=True)
    (destination.parent / "notes.txt").write_text("of the user\n")
    backup = destination.with_name(f"{destination.name}.replaced")
    backup.mkdir()
    (backup / "weights").write_text("of the user\n")
    return destination
