"""Options of functions that show, compare, verify and diagnose checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.api.options import (
    FAMILY,
    FILTER,
    JOBS,
    LIKE,
    MAX_INDEX_BYTES,
    MEMORY,
    PADDING_ROWS,
    PARAMETERS,
    PROGRESS_CALL,
    REQUESTS,
    ROPE_LAYOUT,
    TIED,
    count,
    family_names,
    patterns,
    with_help,
)
from ckpttools.core.message_terms import action
from ckpttools.core.options import Option, any_text, switch
from ckpttools.stores.registry import parse

_FILTER_READ = with_help(FILTER, f"{FILTER.help[:-1]}; other arrays are not read.")

TREE = (
    with_help(FILTER, f"{FILTER.help[:-1]}; counts and bytes cover only these."),
    Option(
        "sort",
        ("size", "name"),
        None,
        "Sort by size (largest first) or name. Default: parameters, then optimizer state, then the rest.",
    ),
    switch("sharding", "Show the device layout that was saved: bfloat16[4096@fsdp,14336]."),
    Option(
        "against",
        str,
        None,
        f"Compare with a family ({action('families')}), a config.json or another checkpoint, and report "
        "missing, "
        "unexpected or mismatched arrays. The command exits with 1 if there are any.",
        "FAMILY|FILE|PATH",
        complete=family_names,
    ),
)
SORTS = ("size", "min", "max", "mean", "std", "norm", "max-abs", "zeros", "subnormals", "nan", "inf")
STATS = (
    _FILTER_READ,
    Option(
        "sort",
        SORTS,
        None,
        "Sort by this value, largest first. Default: parameters, then optimizer state, then the rest.",
    ),
    switch("per_layer", "Also compute the statistics of each layer of stacked arrays."),
    switch("histogram", "Also compute a histogram of each array over powers of two."),
)
CHUNKS = (
    with_help(FILTER, f"{FILTER.help[:-1]}; files are always shown."),
    Option("mesh", any_text, None, "Predict the reads of these devices: 8, 4x2 or data=4,fsdp=2.", "MESH"),
    Option(
        "spec",
        any_text,
        None,
        "How devices share each array: axis0, layer, replicated, axis0=0,axis1=1 or P('fsdp', None).",
        "SPEC",
    ),
    Option(
        "rules",
        any_text,
        None,
        "Sharding rules instead of {spec}: maxtext, or a TOML or JSON file. Default: maxtext if the mesh "
        "axes have names.",
        "maxtext|FILE",
        complete=lambda: ("maxtext",),
    ),
    Option(
        "processes",
        int,
        None,
        "Predict the reads of N processes that load together with these devices.",
        "N",
        least=None,
    ),
)
REPORT = (switch("overwrite", "Replace FILE if it exists."),)

CONVERSION = (
    ROPE_LAYOUT,
    FAMILY,
    TIED,
    patterns("drop", "Hugging Face arrays that the conversion left out, such as '*.rotary_emb.*'."),
)
"""Options of the conversion between two checkpoints."""
SELECTION = (
    FILTER,
    Option("per_layer", bool, True, "Hash stacked layers one by one, or as stored.", negative="--whole"),
    PARAMETERS,
)
HASH = (
    Option(
        "manifest",
        parse,
        None,
        f"Also write the digests to a new file, for {action('verify', 'PATH', manifest='FILE')}.",
        "FILE",
    ),
    Option(
        "algorithm",
        ("xxh3-128", "sha256"),
        "xxh3-128",
        "xxh3-128 detects damage and mistakes; sha256 also detects deliberate changes.",
    ),
    Option(
        "names",
        ("stored", "maxtext"),
        "stored",
        "Names to print: as stored, or those of the MaxText checkpoint that a Hugging Face one converts to.",
    ),
    *CONVERSION,
    *SELECTION,
)
VERIFY = (
    Option("against", parse, None, "Checkpoint to compare with.", "SRC"),
    Option("manifest", parse, None, f"Digests that {action('hash', manifest='FILE')} wrote.", "FILE"),
    switch("cast", "Compare with {against} cast to the dtypes of the verified checkpoint."),
    PADDING_ROWS,
    *CONVERSION,
    *SELECTION,
)

DIFF_SORTS = ("rel-l2", "max", "name")
DIFF = (
    Option(
        "sort",
        DIFF_SORTS,
        None,
        "List arrays one by one, and layers, by relative L2 distance, by the largest difference, or by name. "
        "Default: arrays by name with layers folded, layers by relative L2 distance.",
    ),
    count(
        "top",
        "List at most N layers, and N arrays of each role (parameters, optimizer, other), by {sort} or by "
        "relative L2 distance.",
    ),
    switch("summary", "Report totals and layers, but no individual arrays."),
    Option("atol", float, 0.0, "Treat elements as equal if |a-b| <= atol + rtol * max(|a|,|b|).", "X"),
    Option("rtol", float, 0.0, "Relative tolerance.", "X"),
    Option(
        "ulp",
        int,
        0,
        "Treat elements as equal if they are at most N units in the last place apart, in the coarser dtype.",
        "N",
    ),
    switch("ignore_dtype", "Treat equal values in different dtypes as equal."),
    _FILTER_READ,
    PARAMETERS,
    switch("everything", "Also list equal arrays."),
    Option("explain", bool, True, "Look for the cause of each difference."),
    with_help(LIKE, "A model's directory or config.json, if the arrays have no config.json next to them."),
    FAMILY,
    ROPE_LAYOUT,
    PADDING_ROWS,
)


def _fix_names() -> Iterable[str]:
    from ckpttools.diagnosis.examine import fixes

    return fixes()


DOCTOR = (
    Option(
        "fix",
        any_text,
        (),
        "Apply this fix wherever it helps. No file is deleted or overwritten.",
        "NAME",
        many=tuple,
        complete=_fix_names,
    ),
    switch(
        "checksums", "Also read data files that store checksums, as torch.save writes them, and verify them."
    ),
    switch(
        "values",
        "Also read all arrays, and report NaN, Inf, all-zero weights, repeated layers and unsound scales.",
    ),
    MAX_INDEX_BYTES,
    MEMORY,
    JOBS,
    REQUESTS,
    PROGRESS_CALL,
)
CHECK_FAMILY = (
    Option(
        "against",
        parse,
        None,
        "A Hugging Face or MaxText checkpoint of such a model; only its headers are read.",
        "PATH",
    ),
    Option(
        "config",
        parse,
        None,
        "The model's config.json, or its directory. Default: the config.json of {against}.",
        "CONFIG",
    ),
)
CAT = (
    switch("full", "Print all values, even if there are more than 1,000."),
    switch("stats", "Print statistics of the selected values instead."),
    switch("raw", "Print quantized weights as stored."),
    Option("output", parse, None, "Write the selected values to a new .npy file.", "FILE.npy", short="-o"),
)
