"""Options of functions for training runs, copies and plans."""

from __future__ import annotations

from ckpttools.api.options import MAXTEXT, MEMORY, REPOSITORY, REQUESTS, STEP, count, with_help
from ckpttools.core.memory_limit import parse_size
from ckpttools.core.options import Option, any_text, switch, variant
from ckpttools.maxtext.training_plan import MODES
from ckpttools.stores.registry import parse

COPY = (
    Option(
        "steps",
        int,
        (),
        "Copy only this step of a run. Default: all finished steps.",
        "N",
        many=tuple,
        complete="steps",
    ),
    count("latest", "Copy only the latest N finished steps of a run."),
    switch(
        "verify",
        "Read back everything that was written before it becomes visible, and compare every byte that "
        "{destination} already has.",
    ),
    switch(
        "overwrite", "Replace steps or checkpoints in {destination} that differ; the old one is deleted last."
    ),
    *REPOSITORY,
)
PRUNE = (
    count("keep_last", "Keep the last N finished steps."),
    count("keep_every", "Keep steps that are a multiple of N."),
    Option(
        "keep_best",
        any_text,
        None,
        "Keep the K best steps by a stored metric: loss:3, or reward:3:max. Steps without it are kept.",
        "METRIC:K",
    ),
    switch(
        "strip_older",
        "Drop the optimizer state of kept steps before the last N, keeping the data files if possible.",
    ),
    switch("copy", "Rewrite the parameters of stripped steps, so that no optimizer data remains."),
    switch("finish", "Complete an interrupted prune."),
    switch("undo", "Restore the steps of an interrupted prune that are still complete."),
    REQUESTS,
)
ASSEMBLE = (
    Option(
        "prefer", parse, (), "Where hosts disagree about bytes, use this host's copy.", "HOST_DIR", many=tuple
    ),
    with_help(STEP, "Step to assemble. Default: the newest complete one."),
)
RESOLVE = (
    with_help(MAXTEXT, "MaxText version whose rules apply: a release, or a commit of its main branch."),
    REQUESTS,
)


def _time(name: str, help: str) -> Option:
    return Option(name, str, None, help, "TIME")


PLAN_TRAINING = (
    Option("hosts", int, None, "Hosts per slice.", "N", least=1, is_required=True),
    Option("slices", int, 1, "Number of slices.", "N", least=1),
    Option("mesh", str, None, "Sizes of the mesh axes. Default: as in {source}.", "AXIS=N,…"),
    Option(
        "mode", MODES, None, "Checkpointing mode. Default: multi-tier with several slices, else persistent."
    ),
    Option("local_bandwidth", parse_size, "2GB", "Bytes per second that a host writes to its ramdisk."),
    Option("persistent_bandwidth", parse_size, "500MB", "Bytes per second that a host writes to storage."),
    _time("step_time", "Duration of a training step, such as 4s."),
    _time("mtbf", "Mean time between failures of the job, such as 6h."),
    _time("mtbf_all", "Time between failures that no ramdisk survives. Default: ten times {mtbf}."),
    _time("local_save", "How long a local save blocks training. Default: as long as it writes."),
    _time("persistent_save", "How long a save to storage blocks training. Default: as long as it writes."),
    count("total_steps", "Steps of the run, to compute the space of its checkpoints."),
    count("keep", "Number of persistent checkpoints to keep. Default: all."),
    Option("plot", parse, None, "Plot lost time against the save interval.", "FILE.svg|png"),
)

RUN_PART = (
    Option(
        "part",
        any_text,
        None,
        "Run part I of N, counted from 0. Default: from JOB_COMPLETION_INDEX, SLURM_ARRAY_TASK_ID, "
        "SLURM_PROCID, CLOUD_RUN_TASK_INDEX or AWS_BATCH_JOB_ARRAY_INDEX.",
        "I/N",
    ),
    count("parts", "Number of parts, if the environment only gives the index."),
)
CODE = (
    Option(
        "map",
        any_text,
        None,
        "Confirm the function that PLAN names in {map}. Code that is named only in a plan never runs.",
        "FILE.py:FUNCTION",
        complete="files",
    ),
    Option(
        "family",
        any_text,
        None,
        "Confirm the Python file that PLAN names in {family}.",
        "FILE.py",
        complete="files",
    ),
)
PLAN_LIMITS = (
    variant(MEMORY, default=None, help="Peak memory limit. Default: the plan's."),
    count("jobs", "Parallel workers."),
)
