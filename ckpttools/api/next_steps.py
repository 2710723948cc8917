"""Suggest how to load a new checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from shlex import join

from ckpttools.api.maxtext_config import maxtext_config
from ckpttools.api.sources import opened
from ckpttools.api.trainer_hints import elsewhere, loading_steps
from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import action
from ckpttools.maxtext.config.observed_model import LOAD_PARAMETERS, PARAM_SCAN_AXIS
from ckpttools.maxtext.config.report import MaxTextConfig
from ckpttools.maxtext.model_config import absent_layers
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.native_fp8 import CODES, scale_pairs
from ckpttools.maxtext.recognition import guess_families
from ckpttools.maxtext.versions import EMBEDDING, SCAN_AXIS, SCAN_LAYERS
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import families, family_of
from ckpttools.quantized.view import quantized_view
from ckpttools.stores.abilities import SupportsCacheInvalidation
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.stores.web.hub_name import HubName

# Labels of the lines of an error that a remark repeats.
_FACTS = ("got", "expected")
_LOAD_STATE = "load_full_state_path"
_CHECKPOINTS = "checkpoints"
# Flavor of parameters that MaxText loads without training state.
_LOADABLE_FLAVOR = "linen"
_CAUSAL = "ForCausalLM"
_TOKENIZERS = frozenset(("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json"))
# Dtypes in which models compute. Loaders do not accept other stored dtypes as weights.
_COMPUTED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class NextSteps:
    """Commands that load a checkpoint, and caveats.

    Attributes:
        uses: Commands that load the checkpoint.
        surprises: Caveats, one clause each.
    """

    uses: tuple[str, ...]
    surprises: tuple[str, ...] = ()


def next_steps(where: LocationLike) -> NextSteps | None:
    """Return commands that load a checkpoint, and caveats. Reads no arrays.

    Args:
        where: Location of the checkpoint: a run or a model directory.

    Returns:
        None if the location is not an adapter or a complete model that MaxText or transformers loads, or if
        it cannot be inspected.
    """
    location = parse(where)
    try:
        tree = opened(location)
        if uses := loading_steps(tree, location):
            return NextSteps(uses)
        if not _is_complete(tree):
            return None
        return (
            _maxtext_steps(tree, location)
            if view_of(tree).is_maxtext
            else _transformers_steps(tree, location)
        )
    except CheckpointError:
        # The checkpoint was written, so a failure to describe it is not an error.
        return None
    finally:
        # A later write to this location in the same process must list it again.
        if isinstance(location.store, SupportsCacheInvalidation):
            location.store.forget(location.key)


def _is_complete(tree: Tree) -> bool:
    """Return whether all arrays of a model exist, with compute dtypes or with scales."""
    is_computed = _main_dtype(view_of(tree).parameters.values()) in _COMPUTED
    # Families do not know all names of quantized values and scales.
    named, of = quantized_view(tree).plain_where_possible().tree, _declared_family(tree)
    has_all_names = (of is not None and _has_names_of(named, [of])) or _has_names_of(
        named, families().values()
    )
    return has_all_names and (is_computed or quantized_view(tree).is_described)


def _has_names_of(tree: Tree, among: Collection[Family]) -> bool:
    return any(family.num_matched == family.num_expected for family in guess_families(tree, among))


def _declared_family(tree: Tree) -> Family | None:
    """Return the family that config.json declares. Matching the names of all families takes 0.1 s."""
    try:
        return family_of(tree.metadata.config or {}, tree.metadata.location)
    except CheckpointError:
        return None


def _main_dtype(arrays: Iterable[LazyArray]) -> str:
    """Return the dtype of most elements."""
    count: Counter[str] = Counter()
    for array in arrays:
        count[array.dtype.name] += array.size
    return count.most_common(1)[0][0] if count else ""


def _maxtext_steps(tree: Tree, location: Location) -> NextSteps | None:
    if tree.metadata.format != "orbax":
        return None
    if away := elsewhere(location):
        return NextSteps((away,))
    if view_of(tree).optimizer is None and view_of(tree).flavor.name != _LOADABLE_FLAVOR:
        result = action("strip_optimizer", str(location), "DST", flavor=_LOADABLE_FLAVOR)
        return NextSteps((f"{LOAD_PARAMETERS} takes parameters in Linen's nesting: {result}",))
    config, problem = _config_of(tree)
    settings = config.required_settings if config is not None and config.is_named else ()
    values = [
        str(item) for item in settings if item.name not in (LOAD_PARAMETERS, SCAN_LAYERS, PARAM_SCAN_AXIS)
    ]
    uses = [join([*values, *_location_settings(tree)])]
    if config is not None and not config.is_named:
        uses.append(f"all settings: {action('maxtext_config', str(location))}")
    resumed = _resume_settings(tree)
    problems = [problem] if problem else []
    return NextSteps((*uses, *resumed), (*problems, *_surprises(tree), *_model_remarks(tree, config)))


def _config_of(tree: Tree) -> tuple[MaxTextConfig | None, str]:
    """Return the settings of a model.

    If its configuration is known but the settings are not, return the reason.
    """
    try:
        return maxtext_config(tree), ""
    except CheckpointError as error:
        files = ModelFiles.of(tree, None)
        if files.config is None:
            return None, ""
        if files.family and files.family not in families():  # the name of a file
            command = action("maxtext_config", str(tree.metadata.location), family=files.family)
            return None, f"the family's file determines the settings: {command}"
        facts = "; ".join(f"{label} {text}" for label, text in error.raw.details() if label in _FACTS)
        return None, f"MaxText cannot be configured for this model: {error.raw.line} ({facts})"


def _location_settings(tree: Tree) -> Iterator[str]:
    """Yield the checkpoint's location and layout as MaxText settings."""
    view = view_of(tree)
    setting = LOAD_PARAMETERS if view.optimizer is None else _LOAD_STATE
    yield f"{setting}={parse(tree.metadata.location).absolute()}"
    yield f"{SCAN_LAYERS}={'true' if view.is_stacked else 'false'}"
    if view.scan_axis not in (None, SCAN_AXIS):
        yield f"{PARAM_SCAN_AXIS}={view.scan_axis}"


def _resume_settings(tree: Tree) -> Iterator[str]:
    """Yield the settings that resume a run from its full state, if MaxText's layout allows it."""
    run = parse(tree.metadata.location).absolute().parent.parent
    if view_of(tree).optimizer is not None and run.name == _CHECKPOINTS:
        out = run.parent.parent
        yield "resume the run: " + join([f"base_output_directory={out}", f"run_name={run.parent.name}"])


def _surprises(tree: Tree) -> Iterator[str]:
    view = view_of(tree)
    dtype = _main_dtype(view.parameters.values())
    if dtype != "float32" and view.optimizer is None and not (dtype in CODES and scale_pairs(view.named)):
        yield f"stored in {dtype}; MaxText loads it in weight_dtype, by default float32"
    rows = view.parameters[EMBEDDING].shape[0] if EMBEDDING in view.parameters else None
    config = ModelFiles.of(tree, None).config or {}
    declared = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if rows is not None and isinstance(declared, int) and rows != declared:
        yield f"vocab_size={rows}, but config.json has {declared}"


def _model_remarks(tree: Tree, config: MaxTextConfig | None) -> Iterator[str]:
    """Yield computations that differ in MaxText, and missing parts of the model."""
    if config is None:
        return
    yield from map(str, config.deviations)
    if config.unmapped_fields:
        yield f"no MaxText setting represents {', '.join(config.unmapped_fields)}"
    if view_of(tree).optimizer is None:
        yield from config.notes


def _transformers_steps(tree: Tree, location: Location) -> NextSteps | None:
    config = tree.metadata.config
    kinds = (config or {}).get("architectures") or ()
    if tree.metadata.format != "safetensors" or config is None or not kinds:
        return None
    if absent_layers(config, list(map(dotted, tree.arrays))):
        return None  # transformers initializes missing layers randomly.
    kind = "AutoModelForCausalLM" if str(kinds[0]).endswith(_CAUSAL) else str(kinds[0])
    where = _name_for_transformers(location)
    if where is None:
        return NextSteps((f"transformers reads disks and the Hub: {action('copy', str(location), 'DIR')}",))
    name, revision = where
    values = [f"revision={_quoted(revision)}"] if revision else []
    flags = ["--revision", revision] if revision else []
    # The model type has its own code.
    if config.get("auto_map"):
        values, flags = [*values, "trust_remote_code=True"], [*flags, "--trust-remote-code"]
    loaded = f"{kind}.from_pretrained({', '.join([_quoted(name), *values])})"
    if quantized_view(tree).is_half_quantized:
        return NextSteps((loaded,))  # vLLM does not load the model.
    return NextSteps((loaded, join(["vllm", "serve", name, *flags])), tuple(_missing_server_files(location)))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _missing_server_files(location: Location) -> Iterator[str]:
    """Yield the missing files that a server needs in addition to the weights."""
    if location.is_dir() and not any(entry.name in _TOKENIZERS for entry in location.entries()):
        yield "the directory has no tokenizer: pass the original model's to vllm, --tokenizer HF_DIR"


def _name_for_transformers(location: Location) -> tuple[str, str] | None:
    """Return the name and revision for transformers and vLLM; None if they cannot read the location."""
    if location.store.scheme == "file":
        return str(location), ""
    if location.store.scheme != "hf":
        return None
    result = HubName.of(location.key)
    return None if result.path else (result.repo, result.revision)
