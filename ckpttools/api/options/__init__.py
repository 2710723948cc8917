"""Options that several functions and commands share.

The other modules of this package have the options of single functions.

    @validate_arguments(DIFF)
    def diff(a: Source, b: Source, *, atol: float = 0.0, …, **common: Unpack[Scanning]) -> DiffReport: ...

The type, default and help of each option are declared here. The command line generates its flags from the
declarations (`ckpttools.cli.options.flags`), and docstrings their entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpttools.core.dtypes import DTYPES, parse_dtype
from ckpttools.core.memory_limit import parse_size
from ckpttools.core.message_terms import action
from ckpttools.core.options import Option, any_text, shared, switch, variant
from ckpttools.maxtext.versions import NEWEST, VERSIONS
from ckpttools.stores.registry import parse
from ckpttools.stores.web.hub_name import model_at


def patterns(name: str, help: str) -> Option:
    """Declare an option that takes one or several globs."""
    return Option(name, any_text, (), help, "PATTERN", many=tuple, complete="arrays")


def count(name: str, help: str, **more: Any) -> Option:
    """Declare an option that takes a positive integer."""
    return Option(name, int, None, help, "N", least=1, **more)


def family_names() -> Iterable[str]:
    """Return the names of all model families, which are loaded only now."""
    from ckpttools.model_families.registry import families

    return families()


# Options for opening a path.
OPENING = shared(
    "Source",
    Option(
        "step", int, None, "Training step to open. Default: the latest finished one.", "N", complete="steps"
    ),
    Option(
        "max_header_bytes",
        parse_size,
        "100MB",
        "Reject safetensors headers larger than this.",
        "SIZE",
        env=True,
    ),
    Option(
        "max_index_bytes",
        parse_size,
        "256MiB",
        "Memory limit for OCDBT index nodes that decode to more than their file size.",
        "SIZE",
        env=True,
    ),
    switch("with_optimizer", "Also read DeepSpeed's optimizer state; other formats always include it."),
    Option(
        "prefer_rank",
        int,
        (),
        "If ranks disagree about a tensor (verl, SkyRL), use the copy of rank N.",
        "N",
        many=tuple,
    ),
)
STEP, READING = OPENING[0], OPENING[1:]
MAX_HEADER_BYTES, MAX_INDEX_BYTES, WITH_OPTIMIZER, PREFER_RANK = READING
(DOWNLOAD,) = shared(
    "Source",
    switch("download", "Download hf:// inputs to the Hugging Face cache first, and verify them.", env=True),
)

# Options that limit a function's resources.
LIMITS = shared(
    "Performance",
    Option("memory", parse_size, "1GiB", "Peak memory limit, such as 512MiB or 2GB.", "SIZE", env=True),
    count(
        "jobs", "Parallel workers. Default: one per core, two per core when writing, at most 16.", env=True
    ),
    count("requests", "Concurrent network requests. Default: adjusted between 4 and 32.", env=True),
)
MEMORY, JOBS, REQUESTS = LIMITS
RESOURCES = (*LIMITS, DOWNLOAD)
PROGRESS_CALL = Option(
    "observe",
    callable,
    None,
    "Called with the bytes read so far and the total; first for {download}, if given.",
    flag=None,
)
SCANNING = (*OPENING, *RESOURCES, PROGRESS_CALL)

# Options for writing.
OVERWRITE, RESUME, MANIFEST = shared(
    "Destination",
    switch(
        "overwrite",
        "Replace {destination} if it exists; the old one is deleted only after the new one is complete.",
    ),
    switch("resume", "Fail unless there is an interrupted conversion to resume."),
    Option(
        "manifest",
        parse,
        None,
        f"Also write digests of all arrays to FILE, for {action('verify', 'DST', manifest='FILE')}.",
        "FILE",
    ),
)
PUBLIC, ALLOW_OUTSIDE_LINKS, MODEL_CARD = shared(
    "Hub",
    switch("public", "Make the new Hub repository public."),
    switch(
        "allow_outside_links",
        "With {public}, also publish files outside {source} that symbolic links in {source} point to.",
    ),
    switch("model_card", "Also write a stub README.md to {destination} on the Hub."),
)
COMMAND = Option(
    "command", any_text, "", "Command line of the user, for messages about unfinished work.", flag=None
)
EVENTS_CALL = Option(
    "observe", callable, None, "Called with every event (`ckpttools.run.events`).", flag=None
)
REPOSITORY = (PUBLIC, ALLOW_OUTSIDE_LINKS)
WRITING = (OVERWRITE, RESUME, MANIFEST, *REPOSITORY, MODEL_CARD)
WRITING_OPTIONS = (*RESOURCES, *WRITING, EVENTS_CALL, COMMAND)

# Options for values.
DTYPE = Option(
    "dtype",
    parse_dtype,
    None,
    "Cast floating-point arrays. Default: keep their dtypes.",
    "DTYPE",
    complete=lambda: DTYPES,
)
DEQUANTIZE_LIKE = Option(
    "dequantize_like",
    ("float32", "maxtext"),
    "float32",
    "How products of quantized weights and their scales are rounded: once, from float32; or as MaxText "
    "does when it loads FP8, with scales rounded to bfloat16 first.",
)

# Options for the model.
FAMILY = Option(
    "family",
    str,
    None,
    f"Use this model family's mapping: a name of {action('families')}, or a file. A name is refused if "
    "config.json's own family also fits but gives different values.",
    "NAME|FILE",
    complete=family_names,
    panel="Model",
)
ROPE_LAYOUT = Option(
    "rope_layout",
    ("halves", "interleaved"),
    None,
    "RoPE layout of MaxText's query and key weights. Default: inferred from the model's RoPE type.",
    panel="Model",
)
TIED = Option(
    "tied",
    ("keep", "drop", "materialize"),
    None,
    "Output head: keep the arrays as stored, drop it, or copy it from the embedding if none is stored. "
    "Default: follow config.json, and refuse arrays that contradict it.",
    panel="Model",
)
MODEL = (ROPE_LAYOUT, FAMILY, TIED)
LIKE = Option(
    "like",
    model_at,
    None,
    "Original Hugging Face model or config.json. Default: the one stored in the checkpoint.",
    "HF_DIR|CONFIG",
    panel="Model",
)
MAXTEXT = Option(
    "maxtext",
    tuple(VERSIONS),
    NEWEST,
    "MaxText version that will load it: a release, or a commit of its main branch.",
    env=True,
)

# Options that select arrays.
FILTER = Option(
    "filter",
    any_text,
    "*",
    "Only arrays whose full name matches, such as '*/mlp/*'.",
    "GLOB",
    complete="arrays",
)
PARAMETERS = switch("parameters", "Ignore optimizer state, step and random states.")
PADDING_ROWS = Option(
    "padding_rows",
    ("keep", "drop"),
    None,
    "Whether to compare MaxText's rows beyond Hugging Face's vocabulary. Default: compare them unless all "
    "are zeros.",
)


def with_help(option: Option, help: str) -> Option:
    """Return an option with another help text."""
    return variant(option, help=help)
