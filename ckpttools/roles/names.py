"""Names that frameworks use in training states, and functions that strip wrappers from paths."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

from ckpttools.array.tree import Path

# Keys that have an optimizer's state below them, also with a trailing number as in Pax's opt_states_0.
_CONTAINERS = frozenset(
    ("opt_state", "opt_states", "optimizer", "optimizers", "optimizer_state", "optimizer_states")
) | {"param_states", "optimizer_variables"}
# Keras' state tree: the variables of all optimizers, and their step counts, which older versions call
# iterations.
KERAS = "optimizer_variables"
KERAS_RATE = "learning_rate"
KERAS_STEPS = frozenset(("iteration", "iterations"))
# Suffixes that Keras' optimizers append to the joined path of a parameter, as in dense_kernel_momentum. An
# average is learned, so it is not included.
_KERAS_MOMENTS = (
    *("momentum", "velocity", "velocity_hat", "norm", "accumulator", "linear", "average_gradient"),
    *("accumulated_grad", "accumulated_delta_var", "gradient_accumulator"),
)
# Keras' schedule-free optimizers store the iterate as momentum. Weights for inference are computed from it.
_KERAS_ITERATE, _KERAS_SCHEDULE_FREE = "_momentum", "schedule_free"
# State of another optimizer next to the state of the surrounding one, as optax nests them.
ENCLOSED = frozenset(("base_optimizer_state", "inner_opt_state"))
PER_PARAMETER = "param_states"
# Names that a model's modules may also use.
_WEAK_CONTAINERS = frozenset(("opt", "optim"))
_STRONG_CONTAINERS = _CONTAINERS - {"optimizer", "optimizers"}
# Keys of per-parameter optimizer state.
MOMENTS = frozenset(
    (
        *("mu", "nu", "m", "v", "trace", "momentum", "v_row", "v_col", "acc_grads", "nu_max", "exp_avg"),
        *("exp_avg_sq", "grad_ema", "sum_of_squares", "accumulator", "hessian", "e_g", "e_x", "grad_sum"),
        *("grad_sum_sq", "cumulative_gradients", "previous_gradient", "prev_updates", "step_sizes"),
        *("init_params", "params0", "x0", "m1", "m2", "grad_acc", "init_particles", "subgradients"),
        *("diff_params_memory", "diff_updates_memory", "momentum_buffer", "square_avg", "max_exp_avg_sq"),
        *("exp_inf", "acc_delta", "grad_sq_ema"),
    )
)
# L-BFGS state: as many copies of a parameter as it remembers.
REMEMBERED = frozenset(("diff_params_memory", "diff_updates_memory"))
# Names of moments that a model's modules may also use.
SHARED = frozenset(("mu", "nu", "m", "v"))
# Other optimizer state with names that modules never have.
_STATE_KEYS = REMEMBERED | frozenset(
    (
        *("v_row", "v_col", "exp_avg", "exp_avg_sq", "weights_memory", "ns_coeffs", "hyperparams"),
        *("hyperparams_states", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_diff", "statistics"),
        *("diagonal_statistics", "preconditioner", "preconditioners", "diagonal_momentum"),
        *("Qs_preconditioners", "Ls_lipschitz"),
    )
)
# Names that identify state only if all keys above are wrappers of states, or if a parameter's path is below:
# averages, sums and starting points, preconditioners and their roots, and 8-bit moments.
_PARTS = frozenset(("g", "n", "r", "s", "t", "L", "R", "Q", "GG", "QL", "QR", "Qs", "projector")) | {
    *("grad", "grads", "gradients", "updates", "stats", "grad_avg", "grad_sum_of_squares", "sum", "ax"),
    *("max_dist", "prev_grad", "prev", "step_size", "m_scale", "vr", "vc", "acc"),
    *("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"),
}
_ALL_PARTS = MOMENTS | _STATE_KEYS | _PARTS
# Names that identify state only next to a certain sibling.
_IDENTIFYING_SIBLINGS: dict[str | int, str] = {
    "scale": "subgradients",
    "reward": "subgradients",
    "params": "diff_params_memory",
}
IDENTIFYING_SIBLINGS = frozenset(_IDENTIFYING_SIBLINGS.values())
# Keys around the states inside an optimizer's state.
_INNER_STATE_KEYS = frozenset(
    ("state", "inner_state", "inner_opt_state", "base_optimizer_state", "fast_state")
) | {
    "no_prefix",
}
_LABELED = "inner_states"
# Adafactor's factored moments, in which one axis is summed up.
SUMMED = frozenset(("v_row", "v_col"))
# Adafactor's moments that have the shape (1,) for parameters that do not need them.
FACTORED = SUMMED | {"v", "m"}
# Keys that have weights below them, even inside an optimizer, as in T5X's optimizer/target.
WEIGHTS = frozenset(("params", "model", "target", "mdl_vars", "model_params", "base", "weights")) | {
    "master_params",
    "master_weights",
    "trainable_variables",
    "non_trainable_variables",
}
# Keys around a complete state. Tuple indices also wrap states.
_WRAPPERS = (WEIGHTS - {"params"}) | {"state", "train_state", "nnx_aux"}
_AVERAGES = frozenset(("ema", "average", "averages", "averaged", "polyak", "swa", "shadow"))
# Key in the paths of random states.
RANDOM = "rngs"
# Keys of a state that is not part of the model, so nothing learned is below them.
_STATES = frozenset(("state", "train_state"))
_COUNTERS = frozenset(("step", "global_step", "epoch", "last_epoch", "ntokens_seen", "version"))
# Keys of learning-rate schedules, which have only numbers.
_SCHEDULES = frozenset(("lr_scheduler", "lr_schedulers"))
_GENERATORS = frozenset(("rng", "prng", "dropout_rng", "training_key"))
_LOSS_SCALES = frozenset(("loss_scale", "dynamic_scale"))
_BOOKKEEPING = _COUNTERS | _SCHEDULES | _GENERATORS | _LOSS_SCALES | {RANDOM}
# Keys of scalars (of any dtype) that optax stores next to moments, above the scalars or as their own names.
_HYPERPARAMETERS = frozenset(("hyperparams", "hyperparams_states"))
# Keys of random states without a counter next to them, and with one.
LONE_KEY = "rng_key"
KEYS = frozenset(("key", LONE_KEY))
# Keys of the iterate of schedule-free optimizers, from which the weights for inference are computed.
_ITERATE, _BESIDE_ITERATE = "z", ("weight_sum", "max_lr")
# Other keys that occur only in optimizer state.
_SIGNS = ENCLOSED | {*_BESIDE_ITERATE} | KERAS_STEPS
# Keys of an optimizer's step count. Models also have counters, but call them cache_index or
# num_batches_tracked.
STEPS = frozenset(("step", "count"))
_VALUE = "value"


def keys_of(path: Path) -> Path:
    """Return a path's keys, splitting joined names into their keys.

    This also applies below a key, because torchtitan's optimizer is a flat dictionary:
    optimizer/state.norm.exp_avg.
    """
    # This runs several times for each of 100,000 paths, so all keys are checked at once.
    try:
        are_joined = _is_joined("".join(path))  # type: ignore[arg-type]
    except TypeError:
        are_joined = any(map(_is_joined, path))
    if not are_joined:
        return path
    if len(path) == 1:
        return tuple(_split_key(path[0]))
    return tuple(part for key in path for part in _split_key(key))


def first_keys(path: Path, count: int) -> Path:
    """Return the first `count` keys of `keys_of(path)`."""
    if len(path) == 1 and isinstance(path[0], str):
        return tuple(path[0].split("/" if "/" in path[0] else ".", count)[:count])
    return keys_of(path[:count])[:count]


def _is_joined(key: str | int) -> bool:
    return isinstance(key, str) and ("." in key or "/" in key)


def _split_key(key: str | int) -> Sequence[str | int]:
    return key.split("/" if "/" in key else ".") if isinstance(key, str) else (key,)


def core_of(path: Path) -> Path:
    """Return a path's keys without NNX's trailing `value`."""
    keys = keys_of(path)
    return keys[:-1] if len(keys) > 1 and keys[-1] == _VALUE else keys


def wraps(key: str | int) -> bool:
    """Return whether a key may wrap a complete model or state: a tuple index, or a name such as `target`."""
    return key in _WRAPPERS or str(key).isdecimal()


def is_wrapper(key: str | int) -> bool:
    """Return whether a key may wrap parameters."""
    return key == "params" or wraps(key)


def unwrapped(path: Path, start: int = 0) -> Iterator[Path]:
    """Yield the path from `start` on, then the path without each of its leading wrappers."""
    yield path[start:]
    while start < len(path) and is_wrapper(path[start]):
        start += 1
        yield path[start:]


@lru_cache(maxsize=4096)
def container(key: str | int) -> str | None:
    """Return the name, without a number, of a key that holds an optimizer's state; None for other keys."""
    name, _, number = str(key).rpartition("_")
    name = name if number.isdecimal() and name else str(key)
    return name if name in _CONTAINERS | _WEAK_CONTAINERS else None


@lru_cache(maxsize=4096)
def keras_parameter(key: str | int) -> str | None:
    """Return the joined parameter path in the name of a Keras moment; None if the name is not a moment's."""
    if not isinstance(key, str):
        return None
    ends = (key.removesuffix(f"_{moment}") for moment in _KERAS_MOMENTS if key.endswith(f"_{moment}"))
    return min(ends, key=len, default=None)


def is_keras_iterate(path: Path) -> bool:
    """Return whether names identify the iterate of a schedule-free Keras optimizer."""
    return str(path[-1]).endswith(_KERAS_ITERATE) and any(
        str(key).startswith(_KERAS_SCHEDULE_FREE) for key in path[:-1]
    )


def may_identify_state(key: str | int) -> bool:
    """Return whether a key occurs in states; keys of random states are in `KEYS`."""
    return key in MOMENTS or key in _SIGNS or container(key) is not None


@lru_cache(maxsize=4096)
def _is_within(key: str | int) -> bool:
    return key in _INNER_STATE_KEYS or key == _LABELED or str(key).isdecimal() or container(key) is not None


def wraps_states(path: Path, k: int) -> bool:
    """Return whether the key at `k` wraps states inside an optimizer's state, or labels one."""
    return _is_within(path[k]) or (k > 0 and path[k - 1] == _LABELED)


def identifies_state(key: str | int) -> bool:
    """Return whether a key identifies everything with or below its name as optimizer state."""
    return key in _STATE_KEYS


def is_part(key: str | int) -> bool:
    """Return whether a key names optimizer state, per parameter or shared; modules may have such names."""
    return key in _ALL_PARTS


def identifying_sibling(key: str | int) -> str | None:
    """Return the name of the sibling that identifies a key as optimizer state, if any."""
    return _IDENTIFYING_SIBLINGS.get(key)


def is_strong(key: str | int) -> bool:
    """Return whether a module cannot have the name of a container."""
    return container(key) in _STRONG_CONTAINERS


def is_outer(head: Path) -> bool:
    """Return whether an optimizer's state is next to the model rather than inside it."""
    return all(wraps(key) or container(key) for key in head)


def is_container(head: Path) -> bool:
    """Return whether a container is not a module, judged by its name or position."""
    return is_strong(head[-1]) or (is_outer(head) and container(head[-1]) not in _WEAK_CONTAINERS)


@lru_cache(maxsize=4096)
def is_average(key: str | int) -> bool:
    """Return whether a key names an average of parameters."""
    words = str(key).lower().split("_")
    return key not in MOMENTS and not _AVERAGES.isdisjoint(words)


def is_hyperparameter(path: Path) -> bool:
    """Return whether a path names a hyperparameter that the user chose for the optimizer."""
    return not _HYPERPARAMETERS.isdisjoint(path)


def iterates(paths: Collection[Path]) -> set[Path]:
    """Return the paths of iterates of schedule-free optimizers, next to `weight_sum` and `max_lr`."""
    first, second = ({path[:-1] for path in paths if path[-1:] == (name,)} for name in _BESIDE_ITERATE)
    may_be = {(*around, _ITERATE) for around in first & second}
    lengths = {len(head) for head in may_be}
    return may_be & {path[:length] for path in paths for length in lengths if length <= len(path)}


def is_random(path: Path) -> bool:
    """Return whether a path names the state of a random number generator."""
    first, *below = _name_prefix(path)
    return RANDOM in path or (first in _GENERATORS and not below)


def is_bookkeeping(keys: Path) -> bool:
    """Return whether a path names a random state, a step count, a schedule or a loss scale."""
    if not may_be_bookkeeping(keys):
        return False
    first, *below = _name_prefix(keys)
    return (
        is_random(keys)
        or first in _SCHEDULES
        or (first in _COUNTERS and not below)
        or (first in _LOSS_SCALES and len(below) < 2)
    )


def may_be_bookkeeping(keys: Collection[str | int]) -> bool:
    """Return whether any of these keys names bookkeeping."""
    return not _BOOKKEEPING.isdisjoint(keys)


def _name_prefix(keys: Path) -> Path:
    """Return the first keys that are not wrappers of states: at least one, at most three."""
    core = keys[:-1] if keys[-1:] == (_VALUE,) else keys
    outer = next((k for k, key in enumerate(core) if not _is_state(key)), len(core))
    return core[outer : outer + 3] or ("",)


def _is_state(key: str | int) -> bool:
    return key in _STATES or str(key).isdecimal()
