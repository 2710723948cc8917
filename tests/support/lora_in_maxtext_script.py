"""What MaxText computes with a checkpoint and adapters: run by its own Python.

    python lora_in_maxtext_script.py RESTORE RUN LOGITS.npy SETTING...

Adapters are restored from RESTORE, or are noise that is saved in RUN, "" for none; the logits are of the
tokens 0 to 7.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

with contextlib.redirect_stdout(sys.stderr):
    import maxtext
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train  # noqa: F401  (other orders of imports end in a cycle)
    from maxtext.utils import lora_utils, maxtext_utils, model_creation_utils

BASE = str(Path(maxtext.__file__).parent / "configs" / "base.yml")
jax.config.update("jax_default_prng_impl", "unsafe_rbg")


def logits(restore: str, run: str, settings: list[str]) -> np.ndarray:
    config = pyconfig.initialize(["adapters", BASE, *settings])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    with mesh:
        model = model_creation_utils.from_pretrained(config, mesh=mesh, model_mode="train")
        if restore:
            # In the order of MaxText's train_sft.py, which reads the metadata only when it restores.
            model = lora_utils.apply_lora_to_model(model, mesh, config)
            before = factors(model)
            model = lora_utils.restore_lora_from_path(model, config)
            same = [path for path, values in factors(model).items() if np.array_equal(values, before[path])]
            assert not same, f"not restored: {same}"
        if run:
            model = with_noise(lora_utils.apply_lora_to_model(model, mesh, config))
            save(model, run)
        tokens = jnp.arange(8, dtype=jnp.int32)[None]
        ones = jnp.ones(tokens.shape, jnp.int32)
        built = model(
            decoder_input_tokens=tokens,
            decoder_positions=tokens,
            decoder_segment_ids=ones,
            enable_dropout=False,
        )
    return np.asarray(built, np.float32)


def with_noise(model: nnx.Module) -> nnx.Module:
    """With numbers for the factors that qwix made, of which all of B are zeros."""
    state = nnx.state(model, nnx.LoRAParam)
    for number, (_, item) in enumerate(nnx.to_flat_state(state)):
        item.set_value(jax.random.normal(jax.random.key(number), item.get_value().shape) / 4)
    nnx.update(model, state)
    return model


def save(model: nnx.Module, run: str) -> None:
    """Saves a step of the run as Tunix's trainer does (Tunix 0.1.7, sft/checkpoint_manager.py)."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    kinds = {"model_params": (model, nnx.LoRAParam), "optimizer_state": (optimizer, nnx.optimizer.OptState)}
    handlers = {name: ocp.PyTreeCheckpointHandler() for name in kinds}
    with ocp.CheckpointManager(run, item_handlers=handlers) as manager:
        states = {name: nnx.state(*item) for name, item in kinds.items()}
        manager.save(
            3, args=ocp.args.Composite(**{name: ocp.args.PyTreeSave(item) for name, item in states.items()})
        )


def factors(model: nnx.Module) -> dict[tuple[object, ...], np.ndarray]:
    result = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    return {path: np.asarray(item.get_value()) for path, item in result}


if __name__ == "__main__":
    adapters, run, out, *words = sys.argv[1:]
    np.save(out, logits(adapters, run, words))
