"""Every golden model onto several meshes, straight from Hugging Face's files into MaxText's layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path as Directory
from typing import Any

import ckpttools
from ckpttools import CoverageError, LazyArray, ToMaxText, Tree
from ckpttools.array.nodes import Stored
from ckpttools.array.tree import Path, keystr
from ckpttools.maxtext.axis_names import axis_names
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.testing.strategies import stored
from support.eight_devices import MESHES, by_path, check, counted, fitting, mesh_of, nest, same
from support.golden_data import FAMILIES, SCAN_NAMES
from support.locations import GOLDEN, GOLDEN_0_2_5

Model = tuple[Directory, bool]
EXPERTS = "fsdp=2,expert=4"
# All of them on all meshes take 25 CPU seconds more.
ALL = os.environ.get("CKPTTOOLS_MESHES") == "all"
# Between them these have every kind of expression that arrays of unstacked models are: 38 of 38.
UNSTACKED = (
    "deepseek4",
    "gemma3",
    "gemma4-vision",
    "gpt-oss",
    "llama3.2-tied",
    "mistral-7b",
    "qwen3-vl-moe",
    "qwen3.5",
    "qwen3.5-fp8",
)
# Its value heads take turns, 512 bytes each: a read is longer than what lies between two that are expected.
SHORT_RUNS = ("qwen3.5", "qwen3.5-fp8")


def golden_models() -> Iterator[Model]:
    """What both versions of MaxText converted: directories, and whether layers are stacked."""
    later = sorted(item.name for item in GOLDEN_0_2_5.iterdir() if item.is_dir())
    for directory in (*(GOLDEN / name for name in FAMILIES), *(GOLDEN_0_2_5 / name for name in later)):
        for scan, name in SCAN_NAMES.items():
            if (directory / f"leaves_{name}.json").exists():
                yield directory, scan


def one_of_each() -> Iterator[Model]:
    """Each model of each version once, with its layers stacked if it can be had so."""
    return iter({directory: (directory, scan) for directory, scan in reversed([*golden_models()])}.values())


def is_text_only(model: Model) -> bool:
    """Whether MaxText stacks layers only where the model has no tower."""
    directory, scan = model
    return scan and directory.name in ("qwen3-vl", "qwen3-vl-moe", "qwen3-omni")


@cache
def parameters(model: Model) -> Tree:
    """What a model becomes, for one device, in memory; other tests compare it with what MaxText wrote."""
    directory, scan = model
    options = ToMaxText(scan=scan, text_only=is_text_only(model), leaves_out=True)
    state = to_maxtext(ckpttools.open(directory / "hf"), options).state
    read = {path: in_memory(leaf) for path, leaf in state.arrays.items() if path[0] == "params"}
    return Tree(read, state.metadata)


def in_memory(array: LazyArray) -> Stored:
    """It is compared more than once."""
    return stored(array.read().view(array.dtype.carrier), array.dtype)


def plan(model: Model, **where: Any) -> Any:
    directory, scan = model
    text_only = is_text_only(model)
    return ckpttools.load.plan(directory / "hf", to="maxtext", scan=scan, text_only=text_only, **where)


def loaded(model: Model, prepared: Any) -> dict[Path, Any]:
    """What comes of it, when bits and the bytes that were read are as they must be."""
    with counted() as read:
        result = by_path(prepared.run())
    same(result, parameters(model))
    limit = prepared.plan.bytes_needed * (1.3 if model[0].name in SHORT_RUNS else 1)
    assert read[0] == prepared.plan.bytes_read <= limit, (model, prepared.plan)
    return result


@check
def every_family_onto_meshes() -> None:
    """Meshes and specs differ from model to model, and between layers that are stacked and that are not."""
    numbers = count()
    models = {*one_of_each(), *(item for item in golden_models() if ALL or item[0].name in UNSTACKED)}
    for number, model in enumerate(sorted(models)):
        for text in MESHES if ALL else [MESHES[number % len(MESHES)]]:
            mesh, first = mesh_of(text), next(numbers)
            asked = {path: fitting(a.shape, mesh, first) for path, a in parameters(model).arrays.items()}
            result = loaded(model, plan(model, shardings=nest(asked)))
            assert {path: item.sharding for path, item in result.items()} == asked


@check
def experts_are_cut_by_the_name_of_their_axis() -> None:
    """Those that cannot be dealt out evenly are refused."""
    rules = [("exp", "expert"), ("embed", "fsdp")]
    kinds = set()
    for model in one_of_each():
        arrays = parameters(model).arrays
        cut = {
            path: axes.index(("exp", "expert"))
            for path, axes in axis_names(parameters(model)).items()
            if ("exp", "expert") in axes
        }
        if not cut:
            continue
        uneven = any(arrays[path].shape[axis] % 4 for path, axis in cut.items())
        kinds.add(uneven)
        if uneven:
            assert "divided evenly" in refused(model, rules=rules, mesh=EXPERTS)
            continue
        result = loaded(model, plan(model, rules=rules, mesh=EXPERTS))
        assert all(result[path].sharding.spec[axis] == "expert" for path, axis in cut.items()), model
    assert kinds == {False, True}


@check
def what_jax_cannot_cut_evenly_is_refused_and_nothing_else() -> None:
    """An axis of each array is cut, whatever its length is."""
    from jax.sharding import NamedSharding, PartitionSpec

    mesh, seen = mesh_of("fsdp=8"), 0
    for number, model in enumerate(one_of_each()):
        arrays = {path: array for path, array in parameters(model).arrays.items() if array.shape}
        asked = {
            path: NamedSharding(mesh, PartitionSpec(*[None] * (number % len(array.shape)), "fsdp"))
            for path, array in arrays.items()
        }
        uneven = [path for path in asked if not divided_by_jax(asked[path], arrays[path].shape)]
        even = {path: item for path, item in asked.items() if path not in uneven}
        if even:
            plan(model, shardings=nest(even))
        for path in uneven[: 1 + number % 2]:
            error = refused(model, shardings=nest({**even, path: asked[path]}))
            assert f"{keystr(path)}: an axis cannot be divided evenly" in error, error
            assert error.count("divided evenly") == 1, error
            seen += 1
    assert seen > 20


def divided_by_jax(sharding: Any, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def refused(model: Model, **where: Any) -> str:
    try:
        plan(model, **where)
    except CoverageError as error:
        return str(error)
    raise AssertionError(f"{model} is not refused")
