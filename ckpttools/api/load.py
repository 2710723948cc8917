"""Loading a checkpoint into arrays of JAX, on the devices where they are wanted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ckpttools.api.arguments import Patterns, dtype_of, patterns_of, text_of
from ckpttools.api.prepared import command
from ckpttools.api.sources import DEFAULT_MEMORY, Opening, Source, opened, part_of, read_options
from ckpttools.array.fingerprint import sources
from ckpttools.array.tree import Tree
from ckpttools.core.budget import allowing, parse_size
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import ConfigError, FormatError, UsageError
from ckpttools.core.notes import Notes
from ckpttools.core.wording import option
from ckpttools.maxtext.direction import refuse_hugging_face, refuse_maxtext
from ckpttools.maxtext.layout import EMBEDDING
from ckpttools.maxtext.model import ModelOptions
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.to_hf import ToHuggingFace, to_huggingface
from ckpttools.maxtext.to_maxtext import ToMaxText, to_maxtext
from ckpttools.maxtext.vocabulary import refuse_learned
from ckpttools.sharding.mesh import parse_mesh
from ckpttools.sharding.rules import RulesLike, rules_of
from ckpttools.stores.fetching import fetch
from ckpttools.stores.pace import requesting
from ckpttools.stores.registry import Where
from ckpttools.transforms.select import Select

if TYPE_CHECKING:
    from typing import Unpack

    from ckpttools.sharding.load_plan import LoadPlan
    from ckpttools.sharding.request import Request
    from ckpttools.sharding.templates import Template

Observe = Callable[[int, int], None]


class Loading(Opening, total=False):
    """How a call loads.

    Attributes:
        memory: bytes of host memory beside the arrays themselves, such as "512MiB"; by default 1 GiB.
        jobs: workers at a time; None for one per core, at most 16, or 16 where a network is between.
        requests: reads under way at once in stores behind a network; None for as many as are found good.
        observe: called with the bytes made so far and the bytes to make in all; the first call has 0.
        download: copy what lies on the hub into the cache of `huggingface_hub` first, and read it there.
    """

    memory: int | str
    jobs: int | None
    requests: int | None
    observe: Observe
    download: bool


@dataclass(frozen=True, slots=True, repr=False)
class PreparedLoad:
    """A load decided in every detail: nothing was read but headers and indexes.

    Attributes:
        plan: what it takes.
        request: what goes where.
        jobs, requests, observe, download: as `Loading`.
    """

    plan: LoadPlan
    request: Request
    jobs: int | None = None
    requests: int | None = None
    observe: Observe = field(default=lambda done, total: None)
    download: bool = False

    def run(self) -> Any:
        """Carries it out.

        Returns:
            As `ckpttools.load`.

        Raises:
            CheckpointError: an array cannot be read.
        """
        from ckpttools.sharding.loading import loaded

        if self.download:
            fetch(sources([leaf.array for leaf in self.request.arrays]), lambda done, total: None)
        total, done = self.plan.bytes_in_memory, 0

        def observe(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self.observe(done, total)

        self.observe(0, total)
        with requesting(self.requests):
            return loaded(self.request, self.plan, jobs=self.jobs, observe=observe)

    def __repr__(self) -> str:
        return f"PreparedLoad({self.plan!r})"


@command(Loading, returns="Any")
def load(
    source: Source,
    *,
    like: Any = None,
    shardings: Any = None,
    rules: RulesLike | None = None,
    mesh: Any = None,
    to: Literal["maxtext", "hf"] | None = None,
    dtype: DType | str | None = None,
    keep: Patterns = (),
    drop: Patterns = (),
    memory_kind: str | None = None,
    max_over_read: float = 1.5,
    single_replica: bool = False,
    scan: bool | None = None,
    scan_axis: int | None = None,
    pad_vocab: int | None = None,
    family: Where | None = None,
    model: Where | None = None,
    rope_layout: Literal["halves", "interleaved"] | None = None,
    tied: Literal["keep", "drop", "materialize"] | None = None,
    padding_rows: Literal["keep", "drop"] | None = None,
    **loading: Unpack[Loading],
) -> PreparedLoad:
    """A checkpoint as a pytree of `jax.Array`s, each byte read once and put where it is wanted.

    Args:
        source: a file, an item, a step or a run directory of any format in any store, or a tree.
        like: what the result is to be: a pytree of `jax.ShapeDtypeStruct`s, arrays, PRNG keys and numbers, an
            `nnx.State`, or an `nnx.Module`, which is filled in place and returned. Names that the checkpoint
            has below one key more are found; what it has beside them is not read. None for all that there is,
            as dictionaries and lists.
        shardings: a `jax.sharding.Sharding` for all arrays, or a pytree of them; without `like` it says what
            is loaded, too. None for those of `like`.
        rules: how arrays are cut over `mesh`: "maxtext", a file, or pairs, of a logical axis and mesh axes,
            or of a pattern of paths and a `PartitionSpec`; see `ckpttools.sharding.rules`.
        mesh: a `jax.sharding.Mesh`, or text such as "fsdp=4,tensor=2" for one of all devices. Without rules
            the names that Flax's variables have for their axes are mesh axes.
        to: whose names, layout and values arrays are to have: of a Hugging Face model "maxtext", of a
            MaxText checkpoint "hf"; None leaves them as they are.
        dtype: of floating-point arrays, such as "bfloat16"; "like" for those of `like`; None for the stored.
        keep, drop: patterns of what is loaded, or is not, by the names it gets; as of `ckpttools.select`.
        memory_kind: memory of the devices, such as "pinned_host"; None for that of the shardings.
        max_over_read: of several processes: bytes read for each byte that their devices need, from which on
            each reads a stretch of the array, and they exchange what they have read.
        single_replica: of several processes that need the same one reads it for all.
        scan, scan_axis, pad_vocab: of `to="maxtext"`, as of `ckpttools.hf_to_maxtext`; None as `like` has it.
        family, rope_layout, tied: of a conversion, as of `ckpttools.hf_to_maxtext`.
        model, padding_rows: of `to="hf"`, as `like` and `padding_rows` of `ckpttools.maxtext_to_hf`.
        loading: `Loading`.

    Returns:
        The tree: arrays without a sharding are on the default device, what were Python numbers are numbers.

    Raises:
        CoverageError: names, shapes or dtypes that do not fit, axes that cannot be divided evenly, and 64-bit
            numbers where JAX would halve them; lists all.
        CheckpointError: the source cannot be read or converted, or does not fit into the memory.
        UsageError: arguments that contradict each other.
    """
    from ckpttools.sharding.assigned import is_abstract
    from ckpttools.sharding.load_plan import Sharing, plan_load
    from ckpttools.sharding.request import request
    from ckpttools.sharding.templates import template_of

    memory = parse_size(loading.get("memory", DEFAULT_MEMORY))
    wanted = like if like is not None else _tree_of(shardings)
    template = None if wanted is None else template_of(wanted)
    leaves = () if template is None else template.leaves
    is_cut = any(leaf.axes or is_abstract(leaf.sharding) for leaf in leaves)
    where = _where(shardings, rules, mesh, memory_kind, is_cut=is_cut)
    names = tuple(leaf.name for leaf in leaves)
    with allowing(memory), requesting(loading.get("requests")):
        tree = opened(source, read_options(part_of(loading, Opening)))
        place = tree.metadata.place
        conversion = ModelOptions(text_of(family), rope_layout, tied)
        if to == "maxtext":
            axis = 1 if scan_axis is None else scan_axis
            scanned = _is_scanned(names) if scan is None else scan
            rows = _rows(tree, template) if pad_vocab is None else pad_vocab
            options = ToMaxText(scan=scanned, scan_axis=axis, pad_vocab=rows, model=conversion)
            tree, notes = _as_maxtext(tree, options)
        elif to == "hf":
            way_back = ToHuggingFace(
                like=model, scan_axis=scan_axis, model=conversion, padding_rows=padding_rows
            )
            tree, notes = _as_hugging_face(tree, way_back, memory)
        elif to is None:
            notes = tree.metadata.notes
        else:
            raise UsageError(f"unknown {option('to', to)}", wanted='"maxtext", "hf" or None')
        if where.rules is not None:
            where.rules.check_patterns(
                [*tree.arrays, *(leaf.path for leaf in (template.leaves if template else ()))]
            )
        if keep or drop:
            tree = tree.pipe(Select(patterns_of(keep), patterns_of(drop)))
        chosen = dtype if dtype == "like" else dtype_of(dtype)
        found = request(tree, template, where, chosen, place)
        plan = plan_load(found, Sharing(max_over_read, single_replica), memory=memory, notes=notes)
    return PreparedLoad(
        plan,
        found,
        loading.get("jobs"),
        loading.get("requests"),
        loading.get("observe", lambda done, total: None),
        loading.get("download", False),
    )


def _where(
    shardings: Any, rules: RulesLike | None, mesh: Any, memory_kind: str | None, *, is_cut: bool
) -> Any:
    """What was said of devices; `is_cut` where a template says how its arrays are cut over a mesh."""
    import jax

    from ckpttools.sharding.assigned import Devices
    from ckpttools.sharding.templates import template_of

    if shardings is not None and rules is not None:
        raise UsageError(
            f"{option('shardings')} and {option('rules')} say the same", hint="leave one of them out"
        )
    said = shardings
    if shardings is not None and not isinstance(shardings, jax.sharding.Sharding):
        leaves = template_of(shardings).leaves
        said = {leaf.path: leaf.sharding for leaf in leaves if leaf.sharding is not None}
    devices = _mesh(mesh)
    made = None if rules is None else rules_of(rules)
    if devices is not None and shardings is None and made is None and not is_cut:
        raise UsageError(
            f"{option('mesh')} alone does not say how arrays are cut",
            hint=f"also give {option('rules', 'maxtext')}, or rules of your own",
        )
    return Devices(said, made, devices, memory_kind)


def _mesh(mesh: Any) -> Any:
    """A mesh of all devices, of its text."""
    if not isinstance(mesh, str):
        return mesh
    import jax

    shape = parse_mesh(mesh)
    if shape.size != jax.device_count():
        raise UsageError(
            "the mesh has not as many places as there are devices",
            got=f"{mesh}, {shape.size}",
            wanted=f"{jax.device_count()}",
        )
    kinds = (jax.sharding.AxisType.Auto,) * len(shape.axes)
    return jax.make_mesh(tuple(shape.axes.values()), tuple(shape.axes), axis_types=kinds)


def _tree_of(shardings: Any) -> Any:
    """Shardings that are a tree of arrays' own; None for one that is for all."""
    import jax

    return None if isinstance(shardings, jax.sharding.Sharding) else shardings


def _is_scanned(names: tuple[str, ...]) -> bool:
    """Whether layers of a template are stacked: none has a number of its own right below the decoder."""
    return not any(re.search(r"(^|/)decoder/(\w+_)?layers_\d+/", name) for name in names)


def _rows(tree: Tree, template: Template | None) -> int | None:
    """Rows of the embedding that a template wants, where they are more than the vocabulary has."""
    config = tree.metadata.config or {}
    vocab = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    wanted = [leaf.shape for leaf in template.leaves if leaf.path[-2:] == EMBEDDING] if template else []
    rows = wanted[0][0] if wanted and wanted[0] else None
    return rows if rows and isinstance(vocab, int) and rows > vocab else None


def _as_maxtext(tree: Tree, options: ToMaxText) -> tuple[Tree, Notes]:
    """The parameters of a Hugging Face model as MaxText's Linen trees nest them."""
    with _worded("maxtext"):
        refuse_maxtext(tree)
    made = to_maxtext(tree, options)
    kept = {path: leaf for path, leaf in made.state.items() if path[0] == "params"}
    return Tree(kept, made.state.metadata), made.notes


@contextmanager
def _worded(what: str) -> Iterator[None]:
    """Within it, what the converting commands would say next is said for loading."""
    try:
        yield
    except FormatError as error:
        if what == "model":
            raise
        raise error.at(hint=f"leave out {option('to', what)}: its arrays have these names already") from error
    except ConfigError as error:
        # Those calls name the model `like`.
        said = (error.hint or "").replace("like=", "model=")
        raise error.at(hint=said or None) from error


def _as_hugging_face(tree: Tree, options: ToHuggingFace, memory: int) -> tuple[Tree, Notes]:
    """The arrays of a MaxText checkpoint under Hugging Face's names; what would be lost is refused."""
    with _worded("hf"):
        refuse_hugging_face(tree)
    with _worded("model"):
        files = ModelFiles.of(tree, options.like)
        made = to_huggingface(tree, options, files)
    if options.padding_rows is None:
        refuse_learned(made.surplus, tree.metadata.place, memory=memory, reserved=0)
    config: Mapping[str, Any] | None = None if made.config is None else made.config.config
    return made.tree.with_metadata(config=config), made.notes
