"""Suggestions for mistyped commands and options.

Synonyms from other tools take precedence over spelling: `ckpt show` means `cat`, not `shrink`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise, zip_longest
from shlex import join, split
from typing import NamedTuple

import click

from ckpttools.cli.command_line import COMMAND_LINE_KEY
from ckpttools.core.text import printable

# Other names of commands, with the words of the command.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "tree": ("inspect", "tree"),
    "stats": ("inspect", "stats"),
    "report": ("inspect", "report"),
    "rename": ("remap",),
    "hf-to-maxtext": ("convert", "hf-to-maxtext"),
    "maxtext-to-hf": ("convert", "maxtext-to-hf"),
}

# Commands of other tools, with what to type instead. Text in quotes is a command.
_COMMAND_SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(
        ("show", "head", "tail", "print", "values", "slice", "dump", "peek"), "'cat' to print values"
    ),
    **dict.fromkeys(("identify", "what", "summary", "describe"), "'ckpt PATH'"),
    **dict.fromkeys(("rm", "delete", "remove", "clean", "gc", "purge"), "'prune' to delete steps of a run"),
    **dict.fromkeys(("mv", "move"), "'copy' to copy a checkpoint, or 'remap' to rename its arrays"),
    **dict.fromkeys(("cp", "sync", "rsync", "upload", "download", "push", "pull", "fetch"), "'copy'"),
    **dict.fromkeys(("merge", "lora", "peft"), "'adapter merge', or 'average' for whole models"),
    **dict.fromkeys(("soup", "ema", "mean", "avg"), "'average'"),
    **dict.fromkeys(("check", "validate", "lint", "fsck"), "'doctor', or 'verify' to compare with a source"),
    **dict.fromkeys(("repair", "fix", "recover"), "'doctor PATH --fix'"),
    **dict.fromkeys(("compare", "cmp"), "'diff'"),
    **dict.fromkeys(("checksum", "digest", "sha256", "md5", "sha256sum", "md5sum"), "'hash'"),
    **dict.fromkeys(("list", "steps", "runs", "dir"), "'ls' for the steps of a run"),
    **dict.fromkeys(("keys", "names", "shapes"), "'inspect tree'"),
    **dict.fromkeys(("stat", "histogram"), "'inspect stats'"),
    **dict.fromkeys(("nan", "nans", "inf"), "'doctor PATH --values', or 'inspect stats --nan'"),
    **dict.fromkeys(("agent", "agents", "llm", "skills"), "'skill' for instructions for coding agents"),
    **dict.fromkeys(("schema", "schemas", "json"), "'ckpt COMMAND --json'"),
    **dict.fromkeys(("dequantize", "dtype", "bf16"), "'cast'"),
    **dict.fromkeys(("strip", "slim"), "'strip-optimizer'"),
    **dict.fromkeys(("filter", "drop", "keep", "split"), "'select'"),
    **dict.fromkeys(("scan", "unroll", "unscan"), "'stack' or 'unstack'"),
    **dict.fromkeys(("export", "save", "import", "load"), "'convert'"),
    **dict.fromkeys(("config", "settings"), "'maxtext-config'"),
    **dict.fromkeys(("init", "random", "generate"), "'synth' for a randomly initialized model"),
    **dict.fromkeys(("models", "supported"), "'families'"),
    **dict.fromkeys(("resume", "continue"), "the interrupted command again, which resumes"),
    **dict.fromkeys(("version", "about"), "'ckpt --version'"),
    **dict.fromkeys(("to-hf", "to-huggingface", "to-transformers", "export-hf"), "'convert maxtext-to-hf'"),
    **dict.fromkeys(("to-maxtext", "from-hf", "import-hf"), "'convert hf-to-maxtext'"),
    **dict.fromkeys(("to-pytorch", "to-torch", "to-bin"), "'convert to-safetensors', which PyTorch loads"),
    **dict.fromkeys(("to-zarr", "to-zarr2"), "'convert to-zarr3'"),
    **dict.fromkeys(
        ("to-gguf", "gguf"),
        "'convert maxtext-to-hf', whose output llama.cpp's convert_hf_to_gguf.py converts",
    ),
    **dict.fromkeys(("bench", "benchmark", "profile", "time"), "'inspect chunks', which predicts load I/O"),
    **dict.fromkeys(("train", "decode"), "'maxtext-config PATH --command train'"),
    **dict.fromkeys(("exit-codes", "options", "environment"), "'ckpt help TOPIC'"),
    "open": "'ckpt PATH', or 'inspect tree'",
    "ckpt": "the command without a second 'ckpt'",
    "shard": "'reshard'",
    "optimizer": "'strip-optimizer'",
}

# Options of other tools, with ours in order of preference, also with a value. Those that the command has are
# suggested.
_OPTION_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("--force", "-f", "--replace", "--clobber"), ("--overwrite", "--yes", "--force")),
    **dict.fromkeys(("--silent", "--no-verbose", "--log-level"), ("--quiet", "--verbose")),
    "--debug": ("--verbose",),
    **dict.fromkeys(("--no-color", "--no-colors"), ("--color",)),
    **dict.fromkeys(
        ("--workers", "--num-workers", "--threads", "--processes", "--parallel", "-j", "-n"), ("--jobs",)
    ),
    **dict.fromkeys(("--max-memory", "--mem", "--ram", "--memory-limit"), ("--memory",)),
    **dict.fromkeys(("--nan", "--nans", "--deep", "--data", "--read-values"), ("--values", "--nan")),
    **dict.fromkeys(("--output-dir", "--output_dir", "--out-dir", "--target-directory"), ("--into",)),
    **dict.fromkeys(("--ndjson", "--json-lines", "--stream-json"), ("--jsonl", "--json")),
    **dict.fromkeys(
        ("--type", "--precision", "--torch-dtype", "--torch_dtype", "--dtype"), ("--dtype", "--ignore-dtype")
    ),
    **dict.fromkeys(("--include", "--only", "--pattern", "--keys", "--match"), ("--keep", "--filter")),
    **dict.fromkeys(("--remove", "--ignore", "--skip", "--without"), ("--drop", "--exclude")),
    **dict.fromkeys(("--revision", "--checkpoint-step", "--at", "--iteration"), ("--step",)),
    **dict.fromkeys(("--summary", "--short", "--brief"), ("--depth 1", "--top")),
    **dict.fromkeys(("--pretend", "--simulate", "--noop"), ("--dry-run",)),
    **dict.fromkeys(("--private", "--visibility"), ("--public",)),
    **dict.fromkeys(("--base", "--reference-model", "--original", "--hf-model"), ("--like", "--against")),
    **dict.fromkeys(("--shard-size", "--max_shard_size"), ("--max-shard-size",)),
    **dict.fromkeys(("--to", "--format", "--method", "--quantization"), ("--scheme", "--to")),
    **dict.fromkeys(("--link", "--hardlink"), ("--reference",)),
    **dict.fromkeys(("--no-link", "--deep"), ("--copy",)),
    **dict.fromkeys(("--hf_model_path", "--hf-model-path"), ("--like",)),
    **dict.fromkeys(("--scan_layers", "--scan-layers"), ("--scan", "--no-scan")),
    **dict.fromkeys(("--tie", "--tie-word-embeddings", "--tied-embeddings"), ("--tied",)),
}

# Minimum similarity to an option of another tool.
_NEAR_OPTION = 0.9
# Options of other tools for the destination.
_DESTINATIONS = ("--output", "-o", "--out", "--to", "--dest", "--output-dir", "--output_dir")
# Options of other tools that a command may not need, with advice.
_OPTION_ADVICE: Mapping[str, str] = {
    **dict.fromkeys(_DESTINATIONS, "The destination is an argument, after the source."),
    **dict.fromkeys(("--input", "-i", "--source", "--src", "--model"), "The source is an argument."),
    **dict.fromkeys(("--device", "--device-map", "--cuda"), "No device is needed: leave it out."),
    "--trust-remote-code": "No code of a model is ever run: leave it out.",
    "--json": "Put --json after the command: ckpt COMMAND --json.",
}


class _Script(NamedTuple):
    """A script of MaxText, and the command that replaces it.

    Attributes:
        command: Words of our command.
        source, destination: Settings that name the input and the output.
        missing: Placeholder for an input that no setting names.
        options: Options that the script always implies.
    """

    command: str
    source: str
    destination: str = "base_output_directory"
    missing: str = "HF_DIR"
    options: tuple[str, ...] = ()


_TO_MAXTEXT = _Script("convert hf-to-maxtext", "hf_model_path")
_TO_HUGGING_FACE = _Script("convert maxtext-to-hf", "load_parameters_path", missing="SRC")
_FROM_HUB = _Script("convert hf-to-maxtext", "base_model_path", "maxtext_model_path")
_UNSCANNED = _FROM_HUB._replace(options=("--no-scan",))
_MAXTEXT_SCRIPTS: Mapping[str, _Script] = {
    "to_maxtext": _TO_MAXTEXT,
    "to_huggingface": _TO_HUGGING_FACE,
    **dict.fromkeys(
        (
            "llama_or_mistral_ckpt",
            "convert_deepseek_family_ckpt",
            "convert_gpt_oss_ckpt",
            "convert_qwen3_moe",
            "convert_qwen3_next_scanned",
        ),
        _FROM_HUB,
    ),
    **dict.fromkeys(
        (
            "convert_deepseek_family_unscanned_ckpt",
            "convert_gpt_oss_unscanned_ckpt",
            "convert_qwen3_next_unscanned",
            "llama4_ckpt_unscanned",
        ),
        _UNSCANNED,
    ),
    "llama_mistral_mixtral_orbax_to_hf": _Script(
        "convert maxtext-to-hf", "load_parameters_path", "hf_model_path", "SRC"
    ),
    "generate_param_only_checkpoint": _Script(
        "strip-optimizer", "load_full_state_path", missing="RUN/STEP", options=("--flavor", "linen")
    ),
    **dict.fromkeys(
        ("deepseek_dequantize", "dequantize_mxfp4"), _Script("cast", "input_path", "output_path")
    ),
    "reshard_checkpoint": _Script("reshard", "load_parameters_path", missing="SRC"),
    "inspect_checkpoint": _Script("inspect tree", "path", "", "PATH"),
    "compare_hf_ckpt": _Script("diff", "candidate_path", "reference_path"),
}
_CONVERSIONS = ("convert", "hf-to-maxtext", "maxtext-to-hf")
# Settings that occur only in MaxText command lines; `ckpt resolve` and others also take settings.
_SETTINGS = ("model_name", "base_output_directory", "load_parameters_path", "hf_model_path", "scan_layers")
# Our option for each MaxText setting, for values that are not the default, by command.
_STORAGE_OPTIONS: Mapping[tuple[str, str], str] = {
    **dict.fromkeys((("checkpoint_storage_use_ocdbt", "false"), ("use_ocdbt", "false")), "--no-ocdbt"),
    **dict.fromkeys((("checkpoint_storage_use_zarr3", "false"), ("use_zarr3", "false")), "--zarr2"),
}
_SETTING_OPTIONS: Mapping[str, Mapping[tuple[str, str], str]] = {
    "convert hf-to-maxtext": {
        ("scan_layers", "false"): "--no-scan",
        ("use_multimodal", "false"): "--text-only",
        **_STORAGE_OPTIONS,
    },
    "strip-optimizer": _STORAGE_OPTIONS,
    "reshard": _STORAGE_OPTIONS,
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# MaxText's settings for the devices of a slice: ici_fsdp_parallelism=16.
_MESH_AXIS = ("ici_", "_parallelism")


def find_synonym(name: str) -> str | None:
    """Return what to type instead of another tool's command."""
    return _COMMAND_SYNONYMS.get(_plain(name))


def find_near_synonym(name: str) -> str | None:
    """Return what to type instead of a misspelled command of another tool, or a misspelled alias."""
    plain = _plain(name)
    if len(plain) < _MIN_NEAR_LENGTH:
        return None
    near = get_close_matches(plain, [*ALIASES, *_COMMAND_SYNONYMS], n=1, cutoff=_NEAR_SYNONYM)
    return next((f"'{item}'" if item in ALIASES else _COMMAND_SYNONYMS[item] for item in near), None)


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")


# A misspelled synonym must be closer than a misspelled command, because the table has many short words.
_NEAR_SYNONYM, _MIN_NEAR_LENGTH = 0.85, 3


def similar_commands(name: str, known: Iterable[str]) -> list[str]:
    """Return known commands that are spelled like `name`, best first."""
    return get_close_matches(name, list(known), n=3, cutoff=0.7)


def translate_maxtext_script(words: Sequence[str]) -> str | None:
    """Return our command line for one of MaxText's conversion scripts; None for other command lines.

    Args:
        words: The typed words: the script, also as `python -m maxtext.checkpoint_conversion.to_maxtext` or as
            a path, or one of our conversions, followed by MaxText settings.
    """
    launcher = 2 if words[0].startswith("python") and words[1:2] == ["-m"] else 0
    launcher = launcher or int(words[0].startswith("python"))
    if len(words) <= launcher:
        return None
    script = _MAXTEXT_SCRIPTS.get(_script_name(words[launcher]))
    settings = dict(_read_settings(words[launcher + 1 :]))
    if script is None and words[0] in _CONVERSIONS:
        script = next((_MAXTEXT_SCRIPTS.get(_script_name(word)) for word in words[1:2]), None)
        script = script if settings else None
        # --maxtext-config takes settings of MaxText.
        others = [word for before, word in pairwise(words) if before != "--maxtext-config"]
        if script is None and any(word.partition("=")[0] in _SETTINGS for word in others):
            is_export = words[0] == "maxtext-to-hf" or words[1] == "maxtext-to-hf"
            is_import = words[0] == "hf-to-maxtext" or words[1] == "hf-to-maxtext"
            is_export |= "load_parameters_path" in settings and not is_import
            script = _TO_HUGGING_FACE if is_export else _TO_MAXTEXT
    return None if script is None else _command_of(script, settings)


def _script_name(word: str) -> str:
    return word.removesuffix(".py").replace("/", ".").rpartition(".")[2].replace("-", "_")


def _command_of(script: _Script, settings: Mapping[str, str]) -> str:
    command, source = script.command, settings.get(script.source, script.missing)
    destination = settings.get(script.destination, "HF_DIR" if command == "diff" else "DST")
    if adapter := settings.get("hf_lora_adapter_path"):
        if base := settings.get("load_parameters_path"):
            return join(["ckpt", "adapter", "merge", base, adapter, destination])
        return join(["ckpt", "adapter", "to-maxtext", adapter, destination, "--base", source])
    options = [
        option
        for (name, value), option in _SETTING_OPTIONS.get(command, {}).items()
        if settings.get(name) == value
    ]
    options += script.options
    if axis := settings.get("param_scan_axis") if command == "convert hf-to-maxtext" else None:
        options += ["--scan-axis", axis]
    options += _dtype_options(command, settings)
    if command == "convert maxtext-to-hf":
        hub = settings.get("hf_model_path") if script is _TO_HUGGING_FACE else None
        model = hub or settings.get("tokenizer_path") or "HF_DIR"
        if adapter := settings.get("lora.lora_restore_path"):
            if "load_parameters_path" not in settings:
                return join(["ckpt", "adapter", "to-peft", adapter, destination, "--base", model])
            merge = join(["ckpt", "adapter", "merge", source, adapter, "MERGED"])
            convert = join(["ckpt", *command.split(), "MERGED", destination, *options, "--like", model])
            return f"{merge} && {convert}"
        options += ["--like", model]
    if command == "reshard":
        options += ["--mesh", _mesh(settings)]
    if command == "diff":
        options += [f"--{name}={settings[name]}" for name in ("atol", "rtol") if name in settings]
    locations = [source, destination] if script.destination else [source]
    return join(["ckpt", *command.split(), *locations, *options])


def _dtype_options(command: str, settings: Mapping[str, str]) -> list[str]:
    """Return the option for the dtype of the result."""
    if command in ("reshard", "inspect tree", "diff"):
        return []
    dtype = settings.get("save_dtype") or settings.get("weight_dtype")
    if command == "cast":
        dtype = _DTYPES.get(settings.get("dtype_str", "bf16"), "bfloat16")
    if dtype == "float8_e4m3fn":
        return ["--quantized", "keep"]
    return ["--dtype", dtype] if dtype else []


def _mesh(settings: Mapping[str, str]) -> str:
    """Return the mesh of MaxText's parallelism settings."""
    start, end = _MESH_AXIS
    axes = {
        name.removeprefix(start).removesuffix(end): size
        for name, size in settings.items()
        if name.startswith(start) and name.endswith(end) and size not in ("1", "-1")
    }
    devices = settings.get("simulated_cpu_devices_count", "16")
    return ",".join(f"{name}={size}" for name, size in axes.items()) or f"fsdp={devices}"


def _read_settings(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield the settings of `key=value`, `--key=value` and `--key value`, spelled as in MaxText."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        key, equals, value = word.lstrip("-").partition("=")
        if equals or word.startswith("--"):
            value = value if equals else following
            is_switch = value.lower() in ("true", "false")
            yield key.replace("-", "_"), value.lower() if is_switch else value


# Metavars of missing arguments -> what to pass.
_MISSING_ARGUMENTS: Mapping[str, str] = {
    "SRC": "Pass the path of a checkpoint.",
    "PATH": "Pass the path of a checkpoint.",
    "DST": "Pass the path to write, after the source.",
    "A": "Pass two checkpoints, or two steps of a run: RUN/1 RUN/2.",
    "NAME[INDEX]": "`ckpt inspect tree PATH --flat` lists the names of the arrays.",
    "NAME|FILE": "`ckpt families` lists the names.",
    "ADAPTER": "Pass the base model, the adapter and the path to write.",
    "DECODER": "Pass the multimodal model, the model with the new decoder, and the path to write.",
}
# Commands -> the option for another path after their arguments.
_EXTRA_PATHS: Mapping[str, str] = {"verify": "--against"}


def explain_usage_error(error: click.UsageError) -> click.UsageError:
    """Return an error of the command line with what is probably meant."""
    if isinstance(error, click.NoSuchOption):
        return click.UsageError(explain_unknown_option(error), error.ctx)
    ctx, message = error.ctx, error.format_message()
    name = (ctx.command.name if ctx is not None else None) or ""
    if isinstance(error, click.MissingParameter) and error.param is not None:
        if isinstance(error.param, click.Option):
            advice, _, _ = (error.param.help or "").partition(". ")
            usage = f"{error.param.opts[-1]} {error.param.metavar or 'VALUE'}"
            advice = f"Pass {usage}: {advice[:1].lower()}{advice[1:]}"
        else:
            metavar = error.param.metavar or (error.param.name or "").upper()
            advice = _MISSING_ARGUMENTS.get(metavar, "")
            *first, _ = _usage_of_arguments(ctx) if ctx is not None else [""]
            if metavar == "DST" and len(first) > 1:
                advice = f"Pass the path to write, after {' and '.join(first)}."
        return click.UsageError(f"{message} {advice}".rstrip(), ctx)
    if message.startswith("Got unexpected extra argument") and name in _EXTRA_PATHS:
        path = message.partition("(")[2].split(" ")[0].rstrip(")")
        return click.UsageError(f"{message}. Did you mean {_EXTRA_PATHS[name]} {path}?", ctx)
    if message.startswith("Got unexpected extra argument") and message.endswith(")") and ctx is not None:
        arguments = " ".join(_usage_of_arguments(ctx)) or "no arguments"
        return click.UsageError(f"{message}. The command takes {arguments}.", ctx)
    return error


def _usage_of_arguments(ctx: click.Context) -> list[str]:
    """Return the arguments of a command as its usage line shows them."""
    return [piece for param in ctx.command.get_params(ctx) for piece in param.get_usage_pieces(ctx)]


def _explain_format(command: str, meant: str) -> str:
    """Explain what to type instead of --to for one of the two main conversions."""
    own, other = {"maxtext", "orbax"}, {"hf", "huggingface"}
    reverse = "maxtext-to-hf"
    if command == reverse:
        own, other, reverse = {"hf", "huggingface", "safetensors"}, {"maxtext"}, "hf-to-maxtext"
    if meant in own:
        return f"The command writes this format: leave --to {meant} out."
    if meant in other:
        return f"Did you mean 'ckpt convert {reverse}'?"
    name = f"to-{meant}" if meant in ("orbax", "safetensors", "zarr3") else "to-FORMAT"
    return f"For another format, use ckpt convert {name} SRC DST."


def _known_synonyms(name: str, known: Sequence[str]) -> list[str]:
    """Return the options of a command that another tool calls `name`."""
    return [item for item in _OPTION_SYNONYMS.get(name, ()) if item.split()[0] in known]


def explain_unknown_option(error: click.NoSuchOption) -> str:
    """Return the message for an unknown option, with the option that is probably meant."""
    name, ctx = error.option_name, error.ctx
    known: list[str] = []
    if ctx is not None:
        known = [
            item for param in ctx.command.get_params(ctx) for item in (*param.opts, *param.secondary_opts)
        ]
    synonyms = _known_synonyms(name, known)
    typed = dict(_read_settings(split(str(ctx.meta.get(COMMAND_LINE_KEY, ""))))) if ctx is not None else {}
    if name == "--to" and ctx is not None and ctx.command.name in _CONVERSIONS:
        return f"No such option: {name}. {_explain_format(ctx.command.name, typed.get('to', ''))}"
    if name.replace("-", "_") == "__scan_layers" and ctx is not None and "--no-scan" not in known:
        return f"No such option: {name}. The layout is read from the checkpoint: leave it out."
    if name.replace("-", "_") == "__scan_layers" and "--no-scan" in synonyms:
        synonyms = ["--no-scan" if typed.get("scan_layers") == "false" else "--scan"]
    if synonyms:
        return f"No such option: {printable(name)}. Did you mean {' or '.join(synonyms)}?"
    if name in _DESTINATIONS and ctx is not None and "DST" not in " ".join(_usage_of_arguments(ctx)):
        synonyms = [item for item in ("--output", "--manifest") if item in known]
        advice = (
            f"Did you mean {synonyms[0]}?" if synonyms else "To write the output to a file, append > FILE."
        )
        return f"No such option: {name}. {advice}"
    if name in _OPTION_ADVICE:
        return f"No such option: {name}. {_OPTION_ADVICE[name]}"
    near = get_close_matches(name, [item for item in known if item.startswith("--")], n=2, cutoff=0.75)
    starts = [item for item in known if len(name) > 4 and item.startswith(name)]
    meant = get_close_matches(name, _OPTION_SYNONYMS, n=1, cutoff=_NEAR_OPTION)
    others = _known_synonyms(meant[0], known) if meant else []
    if synonyms := list(dict.fromkeys([*starts, *near, *others]))[:2]:
        return f"No such option: {printable(name)}. Did you mean {' or '.join(synonyms)}?"
    help_command = f"{ctx.command_path} --help" if ctx is not None else "--help"
    return f"No such option: {printable(name)}. `{help_command}` lists all options."
