"""Checks of `ckpttools.load` on eight devices, for `tests/sharding/test_eight_devices.py`.

Each function of `CHECKS` is a test; all run in one process, since starting JAX takes seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
import warnings
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import ckpttools
import support.sharded_families  # noqa: F401  # its checks are among them
from ckpttools import (
    DTYPES,
    CheckpointError,
    CoverageError,
    LostValuesWarning,
    MappingError,
    MemoryBudgetError,
    PaddedVocabularyWarning,
    StorageError,
    ToMaxText,
    Tree,
    UncutArraysWarning,
    UsageError,
)
from ckpttools.array.nodes import Stored
from ckpttools.array.tree import keystr
from ckpttools.core.process_memory import current_bytes, peak_bytes
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.testing.strategies import stored
from support.eight_devices import CHECKS as CHECKS
from support.eight_devices import MESHES, bits, by_path, check, counted, fitting, mesh_of, nest, same
from support.locations import DOCS, GOLDEN, HF, ORBAX, TRAINED
from support.orbax_items import EXPECTED
from support.stored_trees import EVERYTHING, values

# Eight bytes each: JAX has them only where it is told to.
WIDE = {"int64", "uint64", "float64", "complex128"}


@check
def back_to_hugging_face() -> None:
    """A MaxText checkpoint into arrays with Hugging Face's names, cut by the rules of axes."""
    source = GOLDEN / "llama3.1" / "maxtext_scanned"
    rules = [("embed", "fsdp"), ("mlp", "tensor"), ("heads", "tensor")]
    loaded = ckpttools.load(source, to="hf", model=HF, rules=rules, mesh="fsdp=4,tensor=2")
    tree = ckpttools.open(HF)
    gate = loaded["model.layers.1.mlp.gate_proj.weight"]
    assert tuple(gate.sharding.spec) == ("tensor", "fsdp")
    for path, array in tree.arrays.items():
        if "q_proj" not in path[0]:
            assert bits(loaded[path[0]]) == bits(array.read()), path


@check
def rows_beyond_the_vocabulary_are_not_lost() -> None:
    state = to_maxtext(ckpttools.open(HF), ToMaxText(pad_vocab=320)).state
    loaded = ckpttools.load(state, to="hf", model=HF)
    assert loaded["model.embed_tokens.weight"].shape == (256, 64)
    embedding = ("params", "params", "token_embedder", "embedding")
    learned = Tree({**state.leaves, embedding: noise("bfloat16", 320, 64)}, state.metadata)
    assert "not zero" in refused(CheckpointError, learned, to="hf", model=HF)
    assert ckpttools.load.plan(learned, to="hf", model=HF, padding_rows="drop")


@check
def sources() -> None:
    """What Orbax and others wrote: each source, cut along another axis, with the bits of its own reader."""
    mesh = mesh_of("fsdp=2,tensor=4")
    names = (
        "standard",
        "multihost_plain/5/items",
        "llama3.1_scanned_zarr2_noocdbt/0/items",
        "v1_save_zarr2/state",
    )
    names = (
        *names,
        "pytree_ocdbt1_zarr31",
        "pytree_ocdbt0_zarr30",
        "llama3.1_scanned_1dev/0/items",
        "tree_zoo",
    )
    assert set(names) <= set(EXPECTED)
    for number, source in enumerate([*(ORBAX / name for name in names), HF / "model.safetensors", TRAINED]):
        tree = ckpttools.open(source)
        narrow = {path: leaf for path, leaf in tree.arrays.items() if leaf.dtype.name not in WIDE}
        narrow = {path: leaf for path, leaf in narrow.items() if path not in tree.metadata.scalars}
        expected = Tree(narrow, replace(tree.metadata, key_impls={}))
        shardings = nest({path: fitting(item.shape, mesh, number) for path, item in narrow.items()})
        like = as_structs(shardings, narrow)
        same(by_path(ckpttools.load(source, like=like)), expected)


def as_structs(shardings: Any, arrays: Any) -> Any:
    import jax

    flat = by_path(shardings)
    return nest(
        {
            path: jax.ShapeDtypeStruct(arrays[path].shape, arrays[path].dtype.numpy, sharding=item)
            for path, item in flat.items()
        }
    )


@check
def every_dtype_and_every_bit() -> None:
    """NaN payloads, -0.0, float8, integers of few bits, nothing at all, scalars."""
    arrays: dict[Any, Any] = {}
    for name, dtype in DTYPES.items():
        if name in WIDE or name.startswith("float6"):
            continue
        arrays["noise", name] = stored(values((16, 24), dtype, 3), dtype, name)
        arrays["scalar", name] = stored(values((), dtype, 4), dtype, name)
        arrays["empty", name] = stored(values((8, 0, 2), dtype, 5), dtype, name)
    nans = np.array([0x7FC1, 0xFFFF, 0x8000, 0x7F81, 0x0001, 0x8001, 0xFF81, 0x7F80], np.uint16)
    arrays["nans", "bfloat16"] = stored(np.tile(nans, 8), DTYPES["bfloat16"], "nans")
    payloads = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800001] * 2, np.uint32)
    arrays["nans", "float32"] = stored(payloads, DTYPES["float32"], "payloads")
    tree = Tree(arrays)
    for text in MESHES:
        mesh = mesh_of(text)
        shardings = nest({path: fitting(item.shape, mesh, 0) for path, item in tree.arrays.items()})
        loaded = by_path(ckpttools.load(tree, shardings=shardings))
        for path, array in tree.arrays.items():
            if path[1].startswith(("int2", "int4", "float4")):
                kind = np.float32 if array.dtype.is_float else np.int32
                assert np.array_equal(np.asarray(loaded[path]).astype(kind), array.read().astype(kind)), path
            else:
                same({path: loaded[path]}, Tree({path: array}))


@check
def leaves_of_all_kinds() -> None:
    """PRNG keys are keys again, numbers numbers, and what holds no data is there."""
    import jax

    kept = {p: leaf for p, leaf in EVERYTHING.items() if p[0] not in ("dtypes", "ranks", "sharded")}
    tree = Tree(kept, EVERYTHING.metadata)
    loaded = ckpttools.load(tree)
    assert jax.numpy.issubdtype(loaded["rng"]["keys"].dtype, jax.dtypes.prng_key)
    assert loaded["rng"]["keys"].shape == (3,)
    data = jax.random.key_data(loaded["rng"]["keys"])
    assert bits(data) == bits(tree.arrays["rng", "keys"].read())
    assert loaded["number"] == 1.5 and loaded["yes"] is True
    assert loaded["empty"] == {"none": None, "dict": {}, "list": []}
    keys = jax.random.split(jax.random.key(1, impl="threefry2x32"), 3)
    again = ckpttools.load(tree, like={"rng": {"keys": keys}, "number": 0.0})
    assert bits(jax.random.key_data(again["rng"]["keys"])) == bits(data)
    assert again["rng"]["keys"].dtype == keys.dtype and again["number"] == 1.5
    shape = jax.ShapeDtypeStruct((), np.float32)
    texts = ckpttools.load(tree, like={"list": [{}, {"text": "before"}], "yes": False})
    assert texts == {"list": [{}, {"text": tree["list", 1, "text"].value}], "yes": True}
    error = refused(CoverageError, tree, like={"list": [{}, {"text": shape, "txt": ""}], "number": ""})
    for part in (
        "list/1/text: is a string, expected an array",
        "list/1/txt: does not exist",
        "number: is float64",
    ):
        assert part in error, error
    raw = ckpttools.load(tree, like={"rng": {"keys": jax.ShapeDtypeStruct((3, 2), np.uint32)}})
    assert bits(raw["rng"]["keys"]) == bits(data)
    as_floats = {"rng": {"keys": jax.ShapeDtypeStruct((3, 2), np.float32)}}
    assert "dtype=" not in refused(CoverageError, tree, like=as_floats)  # no cast makes keys of it


@check
def nnx_modules_are_filled_in_location() -> None:
    import jax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(16, 32, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(32, 8, rngs=rngs) for _ in range(2)])

    arrays = {
        ("model", "up", "kernel", "value"): noise("float32", 16, 32),
        ("model", "up", "bias", "value"): noise("float32", 32),
        **{("model", "layers", n, "kernel", "value"): noise("float32", 32, 8) for n in range(2)},
        **{("model", "layers", n, "bias", "value"): noise("float32", 8) for n in range(2)},
        ("opt_state", "mu", "up", "kernel"): noise("float32", 16, 32),
    }
    tree = Tree(arrays)
    concrete = Model(nnx.Rngs(0))
    before = jax.random.key_data(concrete.drop.rngs.key[...])
    assert ckpttools.load(tree, like=concrete) is concrete
    assert bits(concrete.layers[1].kernel[...]) == bits(
        arrays["model", "layers", 1, "kernel", "value"].read()
    )
    assert bits(jax.random.key_data(concrete.drop.rngs.key[...])) == bits(before)
    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    rules = {"*kernel": jax.sharding.PartitionSpec("fsdp", "tensor"), "*bias": jax.sharding.PartitionSpec()}
    state = nnx.state(abstract, nnx.Param)
    loaded = ckpttools.load(tree, like=state, rules=rules, mesh="fsdp=4,tensor=2")
    assert isinstance(loaded, nnx.State)
    assert tuple(loaded["up"]["kernel"][...].sharding.spec) == ("fsdp", "tensor")
    assert bits(loaded["up"]["kernel"][...]) == bits(arrays["model", "up", "kernel", "value"].read())
    plan = ckpttools.load.plan(tree, like=state).plan
    assert plan.notes.remarks == ()


def noise(name: str, *shape: int) -> Stored:
    return stored(values(shape, DTYPES[name], prod(shape) + 1), DTYPES[name], f"{name}{shape}")


@check
def variables_say_what_their_axes_are_called() -> None:
    from flax import linen as nn
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            init = nnx.with_partitioning(nnx.initializers.ones, ("tensor", "fsdp"))
            self.up = nnx.Linear(16, 32, kernel_init=init, use_bias=False, rngs=rngs)

    import jax

    mesh, kernel = mesh_of("fsdp=4,tensor=2"), noise("float32", 16, 32)
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    tree = Tree({("up", "kernel"): kernel})
    assert "without devices" in refused(UsageError, tree, like=nnx.state(model))
    for within, devices in ((jax.set_mesh(mesh), None), (contextlib.nullcontext(), mesh)):
        with within:
            loaded = ckpttools.load(tree, like=nnx.state(model), mesh=devices)
        assert tuple(loaded["up"]["kernel"][...].sharding.spec) == ("tensor", "fsdp")
    ckpttools.load(tree, like=model, mesh=mesh)
    assert model.up.kernel[...].sharding.mesh == mesh
    assert bits(model.up.kernel[...]) == bits(kernel.read())
    box = nn.Partitioned(jax.ShapeDtypeStruct((16, 32), np.float32), names=("fsdp", None))
    loaded = ckpttools.load(tree, like={"up": {"kernel": box}}, mesh=mesh)
    assert tuple(loaded["up"]["kernel"].value.sharding.spec) == ("fsdp", None)


@check
def stores_and_encoded_chunks() -> None:
    """From memory, and of chunks that are compressed, which are fetched once."""
    tree = Tree({("a",): noise("float32", 512, 256), ("b",): noise("bfloat16", 64, 128)})
    rules = {"*": "P('fsdp', 'tensor')"}
    with tempfile.TemporaryDirectory() as directory:
        for location in ("memory://load/checks", str(Path(directory) / "z")):
            ckpttools.save(tree, location, "orbax", compression="zstd")
            prepared = ckpttools.load.plan(location, rules=rules, mesh="fsdp=4,tensor=2")
            with counted() as count:
                same(by_path(prepared.run()), tree)
        assert 0 < count[0] <= prepared.plan.bytes_read, (count, prepared.plan)


@check
def what_is_damaged_meanwhile_is_an_error() -> None:
    tree = Tree({(str(n),): noise("float32", 256, 256 + n) for n in range(4)})
    with tempfile.TemporaryDirectory() as directory:
        location = Path(directory) / "t"
        ckpttools.save(tree, location, "safetensors")
        prepared = ckpttools.load.plan(location, rules={"*": "P('fsdp')"}, mesh="fsdp=8")
        file = next(location.glob("*.safetensors"))
        os.truncate(file, file.stat().st_size // 2)
        try:
            prepared.run()
        except CheckpointError as error:
            assert "ends too early" in str(error) or "changed" in str(error), error
        else:
            raise AssertionError("what was cut short was loaded")


@check
def linen_trees() -> None:
    import jax
    from flax import linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
            return nn.Dense(8, kernel_init=init, use_bias=False)(x)

    like = jax.eval_shape(Model().init, jax.random.key(0), np.ones((1, 16), np.float32))
    kernel = noise("float32", 16, 8)
    for path in (
        ("params", "Dense_0", "kernel"),
        ("Dense_0", "kernel"),
        ("a", "b", "params", "Dense_0", "kernel"),
    ):
        rules = [("embed", "fsdp"), ("mlp", "tensor")]
        loaded = ckpttools.load(Tree({path: kernel}), like=like, rules=rules, mesh="fsdp=4,tensor=2")
        spec = loaded["params"]["Dense_0"]["kernel"].value.sharding.spec
        assert tuple(spec) == ("fsdp", "tensor"), spec
        assert bits(loaded["params"]["Dense_0"]["kernel"].value) == bits(kernel.read()), path


@check
def what_does_not_fit_is_refused_and_all_of_it_listed() -> None:
    import jax

    tree = Tree(
        {
            ("a", "kernel"): noise("float32", 8, 8),
            ("a", "bias"): noise("bfloat16", 7),
            ("b",): noise("int64", 3),
        }
    )
    struct = jax.ShapeDtypeStruct
    like = {
        "a": {
            "kernl": struct((8, 8), np.float32),
            "bias": struct((7,), np.float32),
            "kernel": struct((8, 9), np.float32),
        }
    }
    error = refused(CoverageError, tree, like=like)
    for part in ("a/kernl: does not exist; did you mean a/kernel?", "a/bias: is bfloat16, expected float32"):
        assert part in error, error
    assert "a/kernel: has the shape [8, 8], expected [8, 9]" in error, error
    assert 'dtype="like"' in refused(CoverageError, tree, like={"a": {"bias": struct((7,), np.float32)}})
    scales = {"a": {"bias": struct((7,), DTYPES["float8_e8m0fnu"].numpy)}}
    assert "signs and zeros" in refused(MappingError, tree, like=scales, dtype="like")
    truth = Tree({("is",): noise("bool", 4), ("n",): noise("int8", 4)})
    for name, expected, casts in (("is", "float32", True), ("n", "bool", False), ("n", "int32", True)):
        error = refused(CoverageError, truth, like={name: struct((4,), expected)})
        assert ('dtype="like"' in error) is casts, error
        if casts:
            ckpttools.load.plan(truth, like={name: struct((4,), expected)}, dtype="like")
    assert "b: int64 needs jax_enable_x64" in refused(CoverageError, tree)
    rules = [("*bias", "P('fsdp')"), ("*kernel", "P('fsdp', 'tensor', None)")]
    error = refused(CoverageError, tree, rules=rules, mesh="fsdp=4,tensor=2", drop="b")
    assert "a multiple of 4" in error or "divided evenly" in error, error
    assert "more entries" in error, error
    assert "also give" in refused(UsageError, tree, rules=rules)
    assert "did you mean fsdp" in refused(UsageError, tree, rules=[("embed", "fsp")], mesh="fsdp=8")
    assert "expected 8" in refused(UsageError, tree, rules=rules, mesh="fsdp=4").replace(
        "  expected ", "expected"
    )
    assert "needs `like`" in refused(UsageError, tree, dtype="like")
    assert "no devices" in refused(UsageError, tree, rules=rules, mesh=jax.sharding.Mesh([], ("x",)))
    assert "no leaves" in refused(UsageError, tree, like={})
    assert "also give" in refused(UsageError, tree, mesh="fsdp=8")
    refused(UsageError, tree, to="torch")
    assert "leave out to=" in refused(CheckpointError, HF, to="hf")
    assert "leave out to=" in refused(CheckpointError, GOLDEN / "llama3.1" / "maxtext_scanned", to="maxtext")
    assert "model=" in refused(CheckpointError, GOLDEN / "llama3.1" / "maxtext_scanned", to="hf")
    assert "pinned_host" in refused(UsageError, HF, memory_kind="pined_host")
    assert 'leave it out, or pass to="maxtext"' in refused(UsageError, HF, scan=False)
    assert "applies only to conversions with" in refused(UsageError, HF, model=HF)
    assert "applies only to conversions with" in refused(UsageError, HF, to="maxtext", padding_rows="drop")
    assert "at least" in refused(MemoryBudgetError, HF, memory="10MiB")


@check
def another_model_than_was_asked_for_is_said_to_be_one() -> None:
    maxtext, other = GOLDEN / "llama3.1" / "maxtext_scanned", GOLDEN / "qwen3" / "hf"
    of_maxtext, of_hf, of_other = (shapes_of(item) for item in (maxtext, HF, other))
    assert 'into which to="maxtext" converts' in refused(CoverageError, HF, like=of_maxtext["params"])
    assert 'into which to="hf" and model="HF_DIR"' in refused(CoverageError, maxtext, like=of_hf)
    error = refused(CoverageError, HF, like=of_other)
    assert "it is a model of type llama: `ckpttools.inspect" in error and "q_norm" in error, error
    error = refused(CoverageError, maxtext, to="hf", model=other)
    assert "is of model_type 'qwen3', the arrays have the names of llama and mistral" in error, error
    assert 'leave out family="qwen3"' in refused(CoverageError, maxtext, to="hf", model=HF, family="qwen3")
    error = refused(StorageError, maxtext, to="hf", model="/no/such")
    assert "`model` names a model's directory, or its config.json" in error, error


def shapes_of(source: Path) -> Any:
    """What `like` is of all arrays of a checkpoint."""
    import jax

    arrays = ckpttools.open(source).arrays
    return nest({path: jax.ShapeDtypeStruct(a.shape, a.dtype.numpy) for path, a in arrays.items()})


@check
def more_rows_of_the_vocabulary_are_zeros_and_told() -> None:
    import jax

    shapes = shapes_of(GOLDEN / "llama3.1" / "maxtext_scanned")
    weights = shapes["params"]["params"]

    def with_rows(rows: int) -> None:
        for keys, axis in ((("token_embedder", "embedding"), 0), (("decoder", "logits_dense", "kernel"), 1)):
            *above, last = keys
            node = weights
            for key in above:
                node = node[key]
            shape = list(node[last].shape)
            shape[axis] = rows
            node[last] = jax.ShapeDtypeStruct(shape, node[last].dtype)

    like = {"params": shapes["params"]}
    with_rows(320)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        prepared = ckpttools.load.plan(HF, like=like, to="maxtext", dtype="like")
    assert [item.category for item in told] == [PaddedVocabularyWarning]
    assert "320 rows of token embeddings, the model 256: the other 64 are zeros" in str(told[0].message)
    assert any("padded with zeros" in item.text for item in prepared.plan.notes.values), prepared.plan.notes
    rows = np.asarray(prepared.run()["params"]["params"]["token_embedder"]["embedding"])
    assert not rows[256:].any() and rows[:256].any(axis=1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpttools.load.plan(HF, like=like, to="maxtext", dtype="like", pad_vocab=320)
    with_rows(200)
    assert "expected [200, 64]" in refused(CoverageError, HF, like=like, to="maxtext", dtype="like")


def refused(kind: type[Exception], source: Any, **how: Any) -> str:
    try:
        ckpttools.load.plan(source, **how)
    except kind as error:
        return " ".join(str(error).split())
    raise AssertionError(f"not refused: {how}")


@check
def dtypes() -> None:
    import jax

    tree = Tree({("a",): noise("bfloat16", 8, 8), ("n",): noise("int32", 4)})
    loaded = ckpttools.load(tree, dtype="float32", mesh="fsdp=8", rules={"*": "P('fsdp')"}, keep="a")
    assert loaded["a"].dtype == np.float32
    assert bits(loaded["a"]) == bits(tree.arrays["a",].read().astype(np.float32))
    struct = jax.ShapeDtypeStruct
    like = {"a": struct((8, 8), np.float32), "n": struct((4,), np.int32)}
    loaded = ckpttools.load(tree, like=like, dtype="like")
    assert loaded["a"].dtype == np.float32 and loaded["n"].dtype == np.int32


@check
def values_that_a_dtype_cannot_hold_are_told() -> None:
    values = np.array([1e30, 1.0, -1e30, 0.0], np.float32).view(np.uint32)
    tree = Tree({("a",): stored(values, DTYPES["float32"], "large")})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = ckpttools.load(tree, dtype="float16")
    assert np.isinf(np.asarray(loaded["a"])).sum() == 2
    assert [item.category for item in told] == [LostValuesWarning]
    assert "a: 2 overflowed" in str(told[0].message), told[0].message


@check
def the_page_says_how_and_its_examples_work() -> None:
    """Those of docs/sharding.md, one after the other."""
    names: dict[str, Any] = {"__name__": "page"}
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        (Path(directory) / "hf").mkdir()
        shutil.copytree(HF, Path(directory) / "hf" / "llama")
        declared = io.StringIO()
        with contextlib.redirect_stdout(declared):
            for block in code_blocks(DOCS / "sharding.md", "python"):
                exec(block, names)
        (Path(directory) / "rules.toml").write_text(code_blocks(DOCS / "sharding.md", "toml")[0])
        again = ckpttools.load("hf/llama", rules="rules.toml", mesh="fsdp=4,tensor=2")
    lines = declared.getvalue()
    for expected in ("P('fsdp', None, 'tensor')", "P('tensor', 'fsdp')", "did you mean model.norm.weight?"):
        assert expected in lines, lines
    assert {name: item.sharding for name, item in again.items()} == {
        name: item.sharding
        for name, item in ckpttools.load(HF, rules=names["rules"], mesh="fsdp=4,tensor=2").items()
    }
    up = ckpttools.open(HF).arrays["model.layers.0.mlp.up_proj.weight",].read().astype(np.float32)
    assert bits(names["model"].up.kernel[...]) == bits(np.ascontiguousarray(up.T))


@check
def the_peak_is_the_result_and_the_budget() -> None:
    """A matrix of which columns are cut: no more than the parts and some buffers."""
    tree = Tree({("model.a.weight",): stored(np.zeros((4096, 6144), np.uint32), DTYPES["float32"], "wide")})
    with tempfile.TemporaryDirectory() as directory:
        ckpttools.save(tree, Path(directory) / "a", "safetensors")
        prepared = ckpttools.load.plan(Path(directory) / "a", rules={"*": "P(None, 'fsdp')"}, mesh="fsdp=8")
        told: list[tuple[int, int]] = []
        prepared = replace(prepared, observe=lambda done, total: told.append((done, total)))
        Path("/proc/self/clear_refs").write_text("5")
        before = current_bytes() or 0
        loaded = prepared.run()
        above = (peak_bytes() or 0) - before - tree.nbytes
    assert above < 64 << 20, above
    assert told[0] == (0, tree.nbytes) and told[-1] == (tree.nbytes, tree.nbytes)
    del loaded


@check
def memory_kinds_and_staging() -> None:
    """What does not stay where it was read goes by groups through memory that is bounded."""
    tree = Tree({(str(n),): noise("float32", 64, 1024 + n) for n in range(8)})
    prepared = ckpttools.load.plan(
        tree, memory_kind="pinned_host", mesh="fsdp=8", rules={"*": "P('fsdp')"}, memory="129MiB"
    )
    assert 0 < prepared.plan.staging < tree.nbytes, prepared.plan
    loaded = by_path(prepared.run())
    assert {item.sharding.memory_kind for item in loaded.values()} == {"pinned_host"}
    same(loaded, tree)
    assert "at least" in refused(
        MemoryBudgetError,
        tree,
        memory_kind="pinned_host",
        mesh="fsdp=8",
        rules={"*": "P('fsdp')"},
        memory="100MiB",
    )


@check
def replicas_share_what_was_read_and_donating_one_keeps_the_others() -> None:
    import jax

    tree = Tree({("a",): noise("float32", 64, 64)})
    with tempfile.TemporaryDirectory() as directory:
        ckpttools.save(tree, Path(directory) / "a", "safetensors")
        prepared = ckpttools.load.plan(Path(directory) / "a", mesh="data=8", rules={"*": "P()"})
        with counted() as count:
            loaded = prepared.run()["a"]
        assert count[0] == tree.nbytes == prepared.plan.bytes_read, count
    pointers = {shard.data.unsafe_buffer_pointer() for shard in loaded.addressable_shards}
    assert len(pointers) == 1
    first, *others = [shard.data for shard in loaded.addressable_shards]
    assert np.asarray(jax.jit(jax.numpy.ones_like, donate_argnums=0)(first)).all()
    for other in others:
        assert bits(other) == bits(tree.arrays["a",].read())


@check
def parts_of_trees_and_remarks() -> None:
    loaded = ckpttools.load(HF, keep="*mlp*", drop="*layers.0*")
    assert loaded and all("mlp" in name and "layers.0." not in name for name in loaded)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = ckpttools.load.plan(HF, mesh="fsdp=8", rules={"*embed*": "P('fsdp')"}).plan
        ckpttools.load.plan(HF, mesh="fsdp=8", rules={"*norm*": "P()", "*": "P('fsdp')"})
    assert any("match no sharding rule" in remark for remark in plan.notes.remarks), plan.notes
    assert [item.category for item in told] == [UncutArraysWarning]
    name = "model.norm.weight"
    import jax

    shape = ckpttools.open(HF).arrays[name,].shape
    like = {name: jax.ShapeDtypeStruct(shape, "bfloat16")}
    plan = ckpttools.load.plan(HF, like=like).plan
    assert any("not requested" in remark for remark in plan.notes.remarks), plan.notes
    assert plan.bytes_read == prod(shape) * 2


@check
def a_template_says_whether_layers_are_stacked() -> None:
    import jax

    tree = ckpttools.open(HF)
    for scan in (True, False):
        state = to_maxtext(tree, ToMaxText(scan=scan)).state
        arrays = {path[2:]: array for path, array in state.arrays.items() if path[0] == "params"}
        like = nest({path: jax.ShapeDtypeStruct(a.shape, np.float32) for path, a in arrays.items()})
        loaded = by_path(ckpttools.load(HF, like=like, to="maxtext", dtype="like"))
        for path, array in arrays.items():
            assert bits(loaded[path]) == bits(array.read().astype(np.float32)), path


@check
def the_rules_of_maxtext_are_resolved_as_flax_does() -> None:
    from flax import linen as nn

    from ckpttools.maxtext.axis_names import LOGICAL_AXIS_RULES, MESH_AXES, axis_names
    from ckpttools.sharding.mesh import MeshShape
    from ckpttools.sharding.rules import MAXTEXT

    mesh = MeshShape(dict.fromkeys(MESH_AXES, 2))
    for family in ("llama3.1", "deepseek3", "qwen3-moe"):
        tree = to_maxtext(ckpttools.open(GOLDEN / family / "hf"), ToMaxText()).state
        for path, names in axis_names(tree).items():
            logical = tuple(name[0] if name else None for name in names)
            flax = nn.logical_to_mesh_axes(logical, LOGICAL_AXIS_RULES)
            ours = MAXTEXT.spec(path, names, mesh)
            assert tuple(map(entry, flax)) == ours, (keystr(path), flax, ours)


@check
def arrays_of_one_kind_are_exchanged_by_one_program() -> None:
    from jax.monitoring import register_event_duration_secs_listener
    from jax.sharding import NamedSharding, PartitionSpec

    from ckpttools.sharding.assignments import ArrayTarget
    from ckpttools.sharding.exchange import broadcast_parts, exchange_parts, first_replicas

    compiled: list[str] = []
    register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    mesh = mesh_of("data=2,fsdp=4")
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("fsdp", None), (None, "fsdp")))
    value = values((16, 8), DTYPES["bfloat16"], 3)
    read, target = (ArrayTarget(value.shape, DTYPES["bfloat16"], item) for item in (rows, columns))
    carriers = value.view(np.uint16)
    read_parts = {cell: carriers[4 * cell[0] : 4 * cell[0] + 4] for cell in read.shards.local}
    own_parts = {cell: carriers[:, 2 * cell[1] : 2 * cell[1] + 2] for cell in first_replicas(target).local}
    counts = []
    for _ in range(3):
        built = (exchange_parts(read_parts, read, target), broadcast_parts(own_parts, target))
        counts.append(len(compiled))
        assert all(np.array_equal(np.asarray(item).view(np.uint16), carriers) for item in built)
    assert 0 < counts[0] == counts[1] == counts[2], counts


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def entry(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
