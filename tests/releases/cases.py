"""The commands that are compared: each that both trees have, on each checkpoint that is found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# What marks a directory as one that users give to `ckpt`.
_MARKS = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "_CHECKPOINT", "zarr.json", ".zarray")
OUT = "OUT"
"""What stands in the words of a case for its destination."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: the command, as the report has it.
        words: of the command line.
        since: more words for trees that know versions of MaxText, to do what earlier ones do by default.
        source: what it is about.
    """

    name: str
    words: Sequence[str]
    since: Sequence[str] = field(default=())
    source: str = ""


# What reads; `X` is the checkpoint.
_READ: Mapping[str, str] = {
    "inspect tree": "inspect tree X --json",
    "inspect tree --flat": "inspect tree X --flat --filter *kernel* --json",
    "inspect tree --sharding": "inspect tree X --sharding --json",
    "inspect chunks": "inspect chunks X --json",
    "inspect chunks --mesh": "inspect chunks X --mesh fsdp=4 --spec axis0 --json",
    "inspect stats": "inspect stats X --json --no-progress --jobs 1",
    "inspect stats --per-layer": "inspect stats X --per-layer --histogram --json --no-progress --jobs 1",
    "inspect report": "inspect report X -o OUT --json --no-progress --no-stats",
    "doctor": "doctor X --json",
    "hash": "hash X --json --no-progress",
    "hash --whole": "hash X --whole --algorithm sha256 --json --no-progress",
    "hash --as maxtext": "hash X --as maxtext --json --no-progress",
    "diff": "diff X X --json --no-progress",
    "verify": "verify X --against X --json --no-progress",
}
# What writes.
_WRITE: Mapping[str, str] = {
    "cast": "cast X OUT --dtype bfloat16",
    "cast --to": "cast X OUT --dtype float32 --to zarr3",
    "convert to-orbax": "convert to-orbax X OUT",
    "convert to-orbax --zarr2": "convert to-orbax X OUT --zarr2 --no-ocdbt --compression zstd:1",
    "convert to-zarr3": "convert to-zarr3 X OUT",
    "convert to-safetensors": "convert to-safetensors X OUT",
    "convert hf-to-maxtext": "convert hf-to-maxtext X OUT",
    "convert hf-to-maxtext --no-scan": "convert hf-to-maxtext X OUT --no-scan --dtype float32",
    "convert maxtext-to-hf": "convert maxtext-to-hf X OUT",
    "remap": "remap X OUT --map RULES",
    "select": "select X OUT --drop *norm*",
    "select --reference": "select X OUT --keep *kernel* --reference",
    "stack": "stack X OUT",
    "unstack": "unstack X OUT",
    "unstack --force-unroll": "unstack X OUT --force-unroll",
    "strip-optimizer": "strip-optimizer X OUT",
}
_LISTS = ("families --json", "formats --json", "families show llama", "families check llama --json")
_SINCE: Mapping[str, Sequence[str]] = {
    "convert hf-to-maxtext": ("--maxtext", "e591f30"),
    "convert hf-to-maxtext --no-scan": ("--maxtext", "e591f30"),
}


def cases(locations: Sequence[Path], rules: Path) -> Iterator[Case]:
    """All calls.

    Args:
        locations: directories below which checkpoints are looked for.
        rules: a file for `ckpt remap --map`.
    """
    for words in _LISTS:
        yield Case(words.replace(" --json", ""), words.split())
    for source in checkpoints(locations):
        for name, words in {
            **_READ,
            **{name: f"{words} --json --no-progress" for name, words in _WRITE.items()},
        }.items():
            known = {"X": str(source), "RULES": str(rules)}
            yield Case(
                name, [known.get(word, word) for word in words.split()], _SINCE.get(name, ()), str(source)
            )
        yield from _pairs(source)


def _pairs(source: Path) -> Iterator[Case]:
    """A model of Hugging Face with what MaxText made of it, and the way back."""
    for built in sorted(source.parent.glob("maxtext_*")) if source.name == "hf" else ():
        told = ["--json", "--no-progress"]
        yield Case("diff MAXTEXT HF", ["diff", str(built), str(source), *told], (), str(built))
        yield Case(
            "verify --against HF", ["verify", str(built), "--against", str(source), *told], (), str(built)
        )
        back = ["convert", "maxtext-to-hf", str(built), OUT, "--like", str(source), *told]
        yield Case("maxtext-to-hf --like", back, (), str(built))
        against = ["inspect", "tree", str(built), "--against", str(source), "--json"]
        yield Case("inspect tree --against", against, (), str(built))


def checkpoints(locations: Sequence[Path]) -> list[Path]:
    """Each directory below these that is a checkpoint, a step or a run, but not what is in one."""
    result: list[Path] = []
    for location in locations:
        for path in sorted([location, *location.rglob("*")]):
            is_seen = path == location or not path.is_dir() or any(above in path.parents for above in result)
            if not is_seen and _is_one(path):
                result.append(path)
    return result


def _is_one(path: Path) -> bool:
    children = list(path.iterdir())
    names = {child.name for child in children}
    steps = [
        child
        for child in children
        if child.is_dir() and (child.name.isdigit() or child.name == "checkpoints")
    ]
    return (
        bool(steps)
        or not names.isdisjoint(_MARKS)
        or any(name.endswith(".safetensors") for name in names)
        or any(child.is_dir() and (child / mark).exists() for child in children for mark in _MARKS)
    )
