"""Mistakes that users make at the command line, and what `ckpt` answers.

Each case is a command, its exit code, and the part of the answer that helps.
"""

import shlex
from pathlib import Path

import pytest
from support.command_line import ckpt

MODEL = Path(__file__).parents[3] / "fixtures" / "golden" / "qwen3" / "hf"

COMMANDS = {
    "show M": "Did you mean 'cat' to print values?",
    "identify M": "Did you mean 'ckpt PATH'?",
    "rm M": "Did you mean 'prune' to delete steps of a run?",
    "mv M x": "'remap' to rename its arrays",
    "merge M x": "Did you mean 'adapter merge', or 'average' for whole models?",
    "lora merge M x": "'adapter merge'",
    "check M": "Did you mean 'doctor'",
    "keys M": "Did you mean 'inspect tree'?",
    "version": "Did you mean 'ckpt --version'?",
    "help inspct": "Did you mean 'inspect'?",
    "inspct tree M": "Did you mean 'inspect'?",
    "dif M M": "Did you mean 'diff'?",
    "zzzz": "Commands: adapter, assemble,",
    "convert hf-to-maxtex M x": "hf-to-maxtext",
    "convert": "[COMMAND] SRC DST",
    "convert M": "Missing argument 'DST'",
    "convert --jobs 2": "Missing arguments SRC and DST",
    "convert nothere x": "No path has this name either. Commands: hf-to-maxtext,",
    "convert new M": "to read it: ckpt convert M new",
    "convert hf-to-maxtext new M": "to read it: ckpt convert hf-to-maxtext M new",
    "convert maxtext-to-hf new M": "to read it: ckpt convert hf-to-maxtext M new",
    "convert to-zarr3 new M --jobs 2": "to read it: ckpt convert to-zarr3 M new --jobs 2",
    "cast new M --dtype half": "to read it: ckpt cast M new --dtype half",
    "convert hf-to-maxtext M M x": "To convert several: ckpt convert hf-to-maxtext M M --into x",
    "convert M M x --no-scan": "To convert several: ckpt convert M M --no-scan --into x",
    "nan M": "Did you mean 'doctor PATH --values'",
    "schema": "Did you mean 'ckpt COMMAND --json'?",
    "convert M M/ --into x": "several sources would become x/hf",
    "convert M --into x --distributed": "convert one SRC at a time",
    "--json": "Put --json after the command",
}

SCRIPTS = {
    "to_maxtext model_name=qwen3-0.6b base_output_directory=/out scan_layers=false": (
        "ckpt convert hf-to-maxtext HF_DIR /out --no-scan"
    ),
    "maxtext.checkpoint_conversion.to_maxtext hf_model_path=/hf base_output_directory=/out": (
        "ckpt convert hf-to-maxtext /hf /out"
    ),
    "python3 -m maxtext.checkpoint_conversion.to_maxtext base.yml model_name=x weight_dtype=bfloat16": (
        "ckpt convert hf-to-maxtext HF_DIR DST --dtype bfloat16"
    ),
    "src/maxtext/checkpoint_conversion/to_maxtext.py model_name=x base_output_directory=/out": (
        "ckpt convert hf-to-maxtext HF_DIR /out"
    ),
    "python to_maxtext.py --hf_model_path /hf --base_output_directory=/out param_scan_axis=0": (
        "ckpt convert hf-to-maxtext /hf /out --scan-axis 0"
    ),
    "convert model_name=x base_output_directory=/out use_multimodal=False": (
        "ckpt convert hf-to-maxtext HF_DIR /out --text-only"
    ),
    "convert hf-to-maxtext model_name=x base_output_directory=/out": "ckpt convert hf-to-maxtext HF_DIR /out",
    "maxtext-to-hf load_parameters_path=/run/0/items base_output_directory=/hf": (
        "ckpt convert maxtext-to-hf /run/0/items /hf --like HF_DIR"
    ),
    "to_huggingface.py load_parameters_path=/run/0/items base_output_directory=/hf": (
        "ckpt convert maxtext-to-hf /run/0/items /hf --like HF_DIR"
    ),
    "llama_or_mistral_ckpt.py --base-model-path /hf --maxtext-model-path /out --model-size llama2-7b": (
        "ckpt convert hf-to-maxtext /hf /out"
    ),
    "llama_mistral_mixtral_orbax_to_hf load_parameters_path=/run/0/items hf_model_path=/hf": (
        "ckpt convert maxtext-to-hf /run/0/items /hf"
    ),
    "generate_param_only_checkpoint load_full_state_path=/run/9/items base_output_directory=/out": (
        "ckpt strip-optimizer /run/9/items /out --flavor linen"
    ),
    "to_maxtext hf_model_path=/hf base_output_directory=/out save_dtype=float8_e4m3fn": (
        "ckpt convert hf-to-maxtext /hf /out --quantized keep"
    ),
    "to_maxtext hf_model_path=/hf checkpoint_storage_use_ocdbt=false base_output_directory=/out": (
        "ckpt convert hf-to-maxtext /hf /out --no-ocdbt"
    ),
    "to_maxtext hf_model_path=/hf hf_lora_adapter_path=/lora base_output_directory=/out": (
        "ckpt adapter to-maxtext /lora /out --base /hf"
    ),
    "to_maxtext load_parameters_path=/mt hf_lora_adapter_path=/lora base_output_directory=/out": (
        "ckpt adapter merge /mt /lora /out"
    ),
    "to_huggingface lora.lora_restore_path=/lora base_output_directory=/out": (
        "ckpt adapter to-peft /lora /out --base HF_DIR"
    ),
    "to_huggingface load_parameters_path=/mt lora.lora_restore_path=/lora base_output_directory=/out": (
        "ckpt adapter merge /mt /lora MERGED && ckpt convert maxtext-to-hf MERGED /out --like HF_DIR"
    ),
    "convert_gpt_oss_unscanned_ckpt --base-model-path /hf --maxtext-model-path /out": (
        "ckpt convert hf-to-maxtext /hf /out --no-scan"
    ),
    "dequantize_mxfp4 --input-path=/fp4 --output-path=/out --dtype-str=fp16": (
        "ckpt cast /fp4 /out --dtype float16"
    ),
    "reshard_checkpoint load_parameters_path=/mt base_output_directory=/out ici_fsdp_parallelism=8": (
        "ckpt reshard /mt /out --mesh fsdp=8"
    ),
    "inspect_checkpoint orbax --path /mt": "ckpt inspect tree /mt",
    "compare_hf_ckpt --candidate_path=/a --reference_path=/b --atol=1e-2": "ckpt diff /a /b --atol=1e-2",
}

OPTIONS = {
    "convert hf-to-maxtext M x --scan_layers False": "Did you mean --no-scan?",
    "convert M x --scan_layers=true": "Did you mean --scan?",
    "convert hf-to-maxtext M x --force": "Did you mean --overwrite?",
    "convert hf-to-maxtext M x --drpo y": "Did you mean --drop?",
    "convert hf-to-maxtext M x --scan_layers=false": "Did you mean --no-scan?",
    "convert hf-to-maxtext M x --num-workers 4": "Did you mean --jobs?",
    "convert hf-to-maxtext M --output x": "The destination is an argument, after the source.",
    "convert hf-to-maxtext M x --device cpu": "No device is needed",
    "convert hf-to-maxtext M x --trust-remote-code": "No code of a model is ever run",
    "convert M --output-dir x": "Did you mean --into?",
    "doctor M --nan": "Did you mean --values?",
    "doctor M --valus": "Did you mean --values?",
    "hash M --ndjson": "Did you mean --jsonl or --json?",
    "ls M --jsonl": "Did you mean --json?",
    "copy M --to x": "The destination is an argument",
    "copy M x --zzzz": "`ckpt copy --help` lists all options.",
    "inspect tree M --include '*'": "Did you mean --filter?",
    "diff M M --dtyp": "Did you mean --ignore-dtype?",
    "diff M M --dtype bf16": "Did you mean --ignore-dtype?",
}

PATHS = {
    "inspect tree fixtures/goldn/qwen3/hf": "did you mean fixtures/golden/qwen3/hf?",
    "cat fixtures/golden/qwen33/hf lm_head.weight": "did you mean fixtures/golden/qwen3/hf?",
    "diff fixtures/golden/qwen3/hff M": "did you mean fixtures/golden/qwen3/hf?",
    "convert to-zarr3 /no/such/directory x": "check the spelling of the path",
    "cat M norm.weight": "did you mean model.norm.weight?",
    "cat M lm_head.weigth": "did you mean lm_head.weight?",
    "cat M 'lm_head.weight[900]'": "index 900 is out of bounds for axis 0 of length 256",
    "cat M 'lm_head.weight[1,2,3]'": "3 indices for an array of 2 axes",
}


def at_model(word: str) -> str:
    """Replace M by the path of a model."""
    return str(MODEL) + word[1:] if word in ("M", "M/") else word


@pytest.mark.parametrize("line", [*COMMANDS, *SCRIPTS, *OPTIONS, *PATHS])
def test_message_names_the_right_command(line, monkeypatch):
    monkeypatch.chdir(MODEL.parents[3])
    done = ckpt(*(at_model(word) for word in shlex.split(line)))
    assert done.exit_code == 2, done.output
    expected = {**COMMANDS, **SCRIPTS, **OPTIONS, **PATHS}[line]
    assert " ".join(map(at_model, expected.split(" "))) in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "" or "--json" in line


@pytest.mark.parametrize("alias", ["tree", "stats", "report", "rename", "hf-to-maxtext", "maxtext-to-hf"])
def test_alias_resolves_to_the_command(alias):
    assert ckpt(alias, "--help").exit_code == 0


def test_alias_prints_what_the_command_prints():
    assert ckpt("tree", MODEL, "--depth", 1).stdout == ckpt("inspect", "tree", MODEL, "--depth", 1).stdout
