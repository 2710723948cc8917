"""Suggestions for mistyped commands and options.

Synonyms from other tools come before spelling: `ckpt show` means `cat`, and not `shrink`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from shlex import join, quote

import click

from ckpttools.core.text import printable

# Other names of commands: top-level name -> words of the command.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "tree": ("inspect", "tree"),
    "stats": ("inspect", "stats"),
    "report": ("inspect", "report"),
    "rename": ("remap",),
    "hf-to-maxtext": ("convert", "hf-to-maxtext"),
    "maxtext-to-hf": ("convert", "maxtext-to-hf"),
}

# Words of other tools -> what to type here. Text in quotes is a command.
_COMMAND_SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("show", "head", "print", "values", "slice", "dump"), "'cat' to print values"),
    **dict.fromkeys(("info", "identify", "what", "summary", "describe"), "'ckpt PATH'"),
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
    **dict.fromkeys(("nan", "stat", "histogram"), "'inspect stats'"),
    **dict.fromkeys(("dequantize", "dtype", "bf16"), "'cast'"),
    **dict.fromkeys(("strip", "slim"), "'strip-optimizer'"),
    **dict.fromkeys(("filter", "drop", "keep", "split"), "'select'"),
    **dict.fromkeys(("scan", "unroll", "unscan"), "'stack' or 'unstack'"),
    **dict.fromkeys(("export", "save", "import", "load"), "'convert'"),
    **dict.fromkeys(("config", "settings"), "'maxtext-config'"),
    **dict.fromkeys(("init", "random", "generate"), "'synth' for a randomly initialized model"),
    **dict.fromkeys(("models", "supported"), "'families'"),
    **dict.fromkeys(("resume", "continue"), "the interrupted command again, which resumes"),
    "version": "'ckpt --version'",
    "help": "'ckpt --help'",
    "open": "'ckpt PATH', or 'inspect tree'",
    "shard": "'reshard'",
    "optimizer": "'strip-optimizer'",
}

# Options of other tools -> ours, in order of preference; the first that the command has is suggested.
_OPTION_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("--force", "-f", "--replace", "--clobber"), ("--overwrite", "--yes", "--force")),
    **dict.fromkeys(("--quiet", "--silent", "-q", "--no-verbose"), ("--no-progress",)),
    **dict.fromkeys(
        ("--workers", "--num-workers", "--threads", "--processes", "--parallel", "-j", "-n"), ("--jobs",)
    ),
    **dict.fromkeys(("--max-memory", "--mem", "--ram", "--memory-limit"), ("--memory",)),
    **dict.fromkeys(("--type", "--precision", "--torch-dtype", "--torch_dtype"), ("--dtype",)),
    **dict.fromkeys(("--include", "--only", "--pattern", "--keys", "--match"), ("--keep", "--filter")),
    **dict.fromkeys(("--remove", "--ignore", "--skip", "--without"), ("--drop", "--exclude")),
    **dict.fromkeys(("--revision", "--checkpoint-step", "--at", "--iteration"), ("--step",)),
    **dict.fromkeys(("--summary", "--short", "--brief"), ("--depth", "--top")),
    **dict.fromkeys(("--pretend", "--simulate", "--noop"), ("--dry-run",)),
    **dict.fromkeys(("--private", "--visibility"), ("--public",)),
    **dict.fromkeys(("--base", "--reference-model", "--original", "--hf-model"), ("--like", "--against")),
    **dict.fromkeys(("--shard-size", "--max_shard_size"), ("--max-shard-size",)),
    **dict.fromkeys(("--link", "--hardlink"), ("--reference",)),
    **dict.fromkeys(("--no-link", "--deep"), ("--copy",)),
    **dict.fromkeys(("--scan_layers", "--scan-layers"), ("--scan", "--no-scan")),
    **dict.fromkeys(("--tie", "--tie-word-embeddings", "--tied-embeddings"), ("--tied",)),
}

# Options of other tools that a command may not need -> what to do instead.
_OPTION_ADVICE: Mapping[str, str] = {
    **dict.fromkeys(
        ("--output", "-o", "--out", "--to", "--dest", "--output-dir", "--output_dir"),
        "The destination is an argument, after the source.",
    ),
    **dict.fromkeys(("--input", "-i", "--source", "--src", "--model"), "The source is an argument."),
    **dict.fromkeys(("--device", "--device-map", "--cuda"), "No device is needed: leave it out."),
    **dict.fromkeys(("--verbose", "-v", "--debug"), "`ckpt --traceback COMMAND` shows details of an error."),
    "--trust-remote-code": "No code of a model is ever run: leave it out.",
    "--json": "Put --json after the command: ckpt COMMAND --json.",
}

# Scripts of MaxText -> our command, and the settings of theirs that name source and destination.
_MAXTEXT_SCRIPTS: Mapping[str, tuple[str, str, str]] = {
    "to_maxtext": ("hf-to-maxtext", "hf_model_path", "base_output_directory"),
    "to_huggingface": ("maxtext-to-hf", "load_parameters_path", "base_output_directory"),
    "llama_or_mistral_ckpt": ("hf-to-maxtext", "--base-model-path", "--maxtext-model-path"),
}


def find_synonym(name: str) -> str | None:
    """Return what to type here for a command of another tool."""
    return _COMMAND_SYNONYMS.get(name.lower().lstrip("-"))


def near_commands(name: str, known: Iterable[str]) -> list[str]:
    """Return known commands that are spelled like `name`, best first."""
    return get_close_matches(name, list(known), n=3, cutoff=0.7)


def translate_maxtext_script(name: str, words: Sequence[str]) -> str | None:
    """Return our command line for one of MaxText's conversion scripts; None for any other name.

    Args:
        name: of the script, such as "to_maxtext" or "to_maxtext.py".
        words: its arguments: `key=value`, or flags.
    """
    script = name.removesuffix(".py").replace("/", ".").rpartition(".")[2].replace("-", "_")
    if script not in _MAXTEXT_SCRIPTS:
        return None
    command, source, destination = _MAXTEXT_SCRIPTS[script]
    settings = dict(_settings(words))
    is_to_maxtext = command == "hf-to-maxtext"
    source_path = settings.get(source.lstrip("-"), "HF_DIR" if is_to_maxtext else "SRC")
    options = []
    if settings.get("scan_layers", "true").lower() == "false" and is_to_maxtext:
        options.append("--no-scan")
    if dtype := settings.get("weight_dtype"):
        options += ["--dtype", dtype]
    if not is_to_maxtext:
        options += ["--like", "HF_DIR"]
    output = settings.get(destination.lstrip("-"), "DST")
    return join(["ckpt", "convert", command, source_path, output, *options])


def _settings(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield the settings of `key=value`, `--key=value` and `--key value`."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        key, equals, value = word.lstrip("-").partition("=")
        if equals:
            yield key, value
        elif word.startswith("--"):
            yield key, following


def explain_unknown_option(error: click.NoSuchOption) -> str:
    """Return the message for an unknown option, with the option that is probably meant."""
    name, ctx = error.option_name, error.ctx
    known: list[str] = []
    if ctx is not None:
        known = [
            item for param in ctx.command.get_params(ctx) for item in (*param.opts, *param.secondary_opts)
        ]
    meant = [item for item in _OPTION_SYNONYMS.get(name, ()) if item in known]
    if meant:
        return f"No such option: {printable(name)}. Did you mean {' or '.join(meant)}?"
    if name in _OPTION_ADVICE:
        return f"No such option: {name}. {_OPTION_ADVICE[name]}"
    near = get_close_matches(name, [item for item in known if item.startswith("--")], n=2, cutoff=0.75)
    starts = [item for item in known if len(name) > 4 and item.startswith(name)]
    if meant := list(dict.fromkeys([*starts, *near]))[:2]:
        return f"No such option: {printable(name)}. Did you mean {' or '.join(meant)}?"
    where = f"{quote(ctx.command_path)} --help" if ctx is not None else "--help"
    return f"No such option: {printable(name)}. `{where.replace(chr(39), '')}` lists all options."
