"""What MaxText does, in its own environment: loads checkpoints by all of its ways, logits, training."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mended
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from serving import serve, words

with contextlib.redirect_stdout(sys.stderr):
    import maxtext
    from maxtext.common import checkpointing
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train
    from maxtext.utils import maxtext_utils, model_creation_utils

BASE = str(Path(maxtext.__file__).parent / "configs" / "base.yml")
# A state can be resumed only with the generator that train.py chooses.
jax.config.update("jax_default_prng_impl", "unsafe_rbg")
mended.tied_embeddings()


def versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("maxtext", "jax", "flax", "orbax-checkpoint")}
    return {**packages, "python": sys.version.split()[0]}


@contextlib.contextmanager
def meshed(settings: list[str]) -> Iterator[tuple[Any, Any]]:
    """The configuration and its mesh, which is in force."""
    config = pyconfig.initialize(["oracle", BASE, *settings])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    try:
        with mesh:
            yield config, mesh
    finally:
        jax.clear_caches()
        gc.collect()


def load_as_training(config: Any, mesh: Any) -> Any:
    """`load_parameters_path`, as train.py takes it."""
    create, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh)
    state = checkpointing.load_state_if_possible(
        None,
        None,
        config.load_parameters_path,
        "",
        config.checkpoint_storage_concurrent_gb,
        nnx.state(abstract),
        dataset_type="synthetic",
        maxtext_config=config,
    )[1]
    model = create()
    nnx.update(model, state)
    return model


def load_as_post_training(config: Any, mesh: Any) -> Any:
    """`from_pretrained`, as post-training and decoding take it."""
    return model_creation_utils.from_pretrained(config, mesh=mesh, model_mode="train")


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "training": load_as_training,
    "post-training": load_as_post_training,
}


def loads(settings: list[str]) -> dict[str, dict[str, str]]:
    """Way -> the digest of the weights that it gives, or in which words it refuses."""
    found = {}
    with meshed(settings) as (config, mesh):
        for name, load in WAYS.items():
            try:
                found[name] = {"digest": digest(weights(load(config, mesh)))}
            except BaseException as error:  # SystemExit among them
                found[name] = {"refused": words(error)}
    return found


def logits(
    settings: list[str],
    tokens: list[int],
    target: str,
    way: str = "training",
    shown: dict[str, Any] | None = None,
    mends: dict[str, Any] | None = None,
) -> str:
    """Writes (tokens, vocabulary) of float32; returns the digest of the weights.

    Args:
        settings: of the model.
        tokens: of one text.
        target: the file that is written.
        way: how weights are loaded.
        shown: an image: files of its pixels and of the positions of all tokens, and the token that stands for
            a part of it; of a sound the file and the token, too.
        mends: what is computed otherwise than MaxText does, each with its numbers.
    """
    shown = shown or {}
    with (
        meshed(settings) as (config, mesh),
        mended.placeholders(shown.get("placeholder"), shown.get("heard")),
        mended.all_of(mends or {}),
    ):
        model = WAYS[way](config, mesh)

        @nnx.jit
        def forward(model: Any, tokens: Any, positions: Any, inputs: dict[str, Any]) -> Any:
            return model(
                decoder_input_tokens=tokens,
                decoder_positions=positions,
                decoder_segment_ids=jnp.ones_like(tokens),
                enable_dropout=False,
                **inputs,
            )

        ids = jnp.asarray([tokens], jnp.int32)
        positions = np.load(shown["positions"]) if shown else jnp.arange(len(tokens))[None]
        towers = {"encoder_images": "pixels", "encoder_audios": "sound"}
        inputs = {name: jnp.asarray(np.load(shown[file])) for name, file in towers.items() if file in shown}
        computed = forward(model, ids, jnp.asarray(positions, jnp.int32), inputs)
        computed = computed[0] if isinstance(computed, tuple) else computed
        np.save(target, np.asarray(computed[0], np.float32))
        return digest(weights(model))


def weights(model: Any) -> dict[str, np.ndarray]:
    """What is learned, by path: without states of random numbers, caches and the like."""
    others = (nnx.RngState, nnx.Cache, nnx.Intermediate, nnx.BatchStat)
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if not isinstance(variable, others):
            found["/".join(map(str, path))] = np.asarray(variable.get_value())
    return found


def digest(arrays: dict[str, np.ndarray]) -> str:
    """sha256 over sorted paths, with shape, dtype and bytes of each."""
    whole = hashlib.sha256()
    for path in sorted(arrays):
        array = np.ascontiguousarray(arrays[path])
        whole.update(f"{path} {list(array.shape)} {array.dtype}\n".encode())
        whole.update(array.tobytes())
    return whole.hexdigest()


def training(settings: list[str]) -> None:
    """MaxText's own train.py; goes on with what is in the run's directory."""
    try:
        train.main(["train", BASE, *settings])
    finally:
        jax.clear_caches()
        gc.collect()


def stored(item: str) -> str:
    """The digest of all that a checkpoint holds, as Orbax reads it: weights, moments, counters."""
    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(item).item_metadata.tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    found = jax.tree_util.tree_flatten_with_path(checkpointer.restore(item, restore_args=args))[0]
    return digest({jax.tree_util.keystr(path): np.asarray(array) for path, array in found})


if __name__ == "__main__":
    serve({"versions": versions, "loads": loads, "logits": logits, "training": training, "stored": stored})
