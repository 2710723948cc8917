"""Mistakes in commands on real checkpoints: the exit code, and the part of the message that helps.

The lines run in a directory with these names: `hf` (a Hugging Face Llama), `qwen` (another model), `mt` (`hf`
as MaxText), `run` (steps 1 and 2), `many` (two models), `lora` (adapters), `notes.txt`, `rest.toml` (a rule
with a wrong field), `axes.toml` (a sharding rule with a wrong axis), `empty`, and damaged copies of `hf`:
`corrupt`, `cut`, `bare` (without config.json) and `deep` (with more layers in config.json).
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from support.command_line import ckpt, succeed
from support.locations import GOLDEN, ORBAX, ROOT

# Exit code -> command -> part of the message.
MISTAKES: dict[int, dict[str, str]] = {
    1: {
        "maxtext-config mt --check foo=1": "MaxText 0.2.5 has no such setting; leave it out",
        "maxtext-config mt --check num_decoder_layers=9": "computes it from base_num_decoder_layers)",
        "maxtext-config mt --check base_emb_dim=2048": "expected  64 (config.json: hidden_size)",
        "resolve load_parameters_path=mt/0/items": "Orbax refuses relative paths",
        "verify mt --against qwen": "`ckpt diff qwen mt/0/items` shows the size of the differences",
    },
    2: {
        # commands
        "sho hf": "Did you mean 'cat' to print values?",
        "head hf": "Did you mean 'cat' to print values?",
        "rm run/1": "Did you mean 'prune' to delete steps of a run?",
        "strip mt x": "Did you mean 'strip-optimizer'?",
        "stat mt": "Did you mean 'inspect stats'?",
        "hf-to-maxtxt hf x": "Did you mean 'hf-to-maxtext'?",
        "convrt hf x": "Did you mean 'convert'?",
        "adapter mrge a b c": "Did you mean 'merge'?",
        "adapter hf/": "It is a path: 'ckpt hf/' identifies it",
        "families shw llama": "Did you mean 'show'?",
        "convert hf2maxtext hf x": "Did you mean 'hf-to-maxtext'?",
        "convert to-hf mt x": "Did you mean 'convert maxtext-to-hf'?",
        "convert to-huggingface mt x": "Did you mean 'convert maxtext-to-hf'?",
        "convert to-safetensor mt x": "Did you mean 'to-safetensors'?",
        "convert to-pytorch mt x": "Did you mean 'convert to-safetensors', which PyTorch loads?",
        "convert to-gguf mt x": "convert_hf_to_gguf.py",
        "help convert hf": "No such command 'hf'. It is a path: 'ckpt hf' identifies it",
        "inspect hf": "Did you mean 'ckpt inspect tree hf'?",
        "ckpt inspect hf": "Did you mean the command without a second 'ckpt'?",
        # a directory with the name of a mistyped command
        "lora merge hf lora x": "Did you mean 'adapter merge', or 'average' for whole models?",
        "many hf x": "No such command 'many'. It is a path: 'ckpt many' identifies it",
        # steps
        "run@1": "did you mean run/1?",
        "diff run@1 run@2": "did you mean run/1?",
        "inspect tree run@latest": "did you mean run?",
        "diff run/1 run/3": "the steps there are 1..2",
        "inspect tree run --step 99": "expected one of 1, 2",
        "inspect tree hf --step 3": "leave --step out",
        "copy run x --step 9": "expected one of 1..2",
        "average run x --last 5": "`ckpt ls run` lists them",
        "average run x --steps 1..9/1": "there are no steps 3, 4, 5, 6, 7, 8, 9",
        # missing and extra arguments
        "diff run": "hint     compare two steps: ckpt diff",
        "diff hf": "hint     name the other checkpoint after it",
        "diff": "Pass two checkpoints, or two steps of a run: RUN/1 RUN/2.",
        "diff hf qwen --sort size": "'size' is not one of 'rel-l2', 'max', 'name'",
        "diff hf qwen --top 0": "'0' is not an integer of at least 1",
        "cat hf": "`ckpt inspect tree PATH --flat` lists the names of the arrays.",
        "copy mt": "Missing argument 'DST'. Pass the path to write, after the source.",
        "convert hf-to-maxtext": "Missing argument 'SRC'. Pass the path of a checkpoint.",
        "families check notes.txt": "the name of a family file ends in .toml or .py",
        "families show": "`ckpt families` lists the names.",
        "doctor": "Missing argument 'PATH'. Pass the path of a checkpoint; --list lists the checks.",
        "stitch hf qwen": "Missing argument 'DST'. Pass the path to write, after SRC and DECODER.",
        "adapter merge hf lora": "Missing argument 'DST'. Pass the path to write, after BASE and ADAPTER.",
        "plan-training mt": "Missing option '--hosts'. Pass --hosts N: hosts per slice.",
        "reshard mt x": "Missing option '--mesh'. Pass --mesh MESH: axes of the devices and their sizes",
        "plan convert hf-to-maxtext hf x": "Pass --output PLAN: file for the plan.",
        "stitch hf": "Pass the multimodal model, the model with the new decoder, and the path to write.",
        "verify mt hf": "Did you mean --against hf?",
        "hash hf mt": "(mt). The command takes PATH.",
        "formats orbax": "(orbax). The command takes no arguments.",
        "adapter merge hf lora lora x": "(x). The command takes BASE ADAPTER DST.",
        "convert maxtext-to-hf mt mt x": "ckpt convert maxtext-to-hf mt mt --into x",
        "assemble run": "missing DST: pass the host directories, then DST; or --list",
        "completion": "Missing argument SHELL: bash, zsh, fish.",
        "convert hf-to-maxtext hf ''": "'DST': the text is empty; a shell variable may not be set",
        # options
        "maxtext-to-hf mt x --scan_layers=false": "The layout is read from the checkpoint: leave it out.",
        "convert hf-to-maxtext hf x --to zarr3": "For another format, use ckpt convert to-zarr3 SRC DST.",
        "convert hf-to-maxtext hf x --to npz": "For another format, use ckpt convert to-FORMAT SRC DST.",
        "convert hf x --to maxtext": "The command writes this format: leave --to maxtext out.",
        "convert mt x --to hf": "The command writes this format: leave --to hf out.",
        "convert maxtext-to-hf hf x --to maxtext": "Did you mean 'ckpt convert hf-to-maxtext'?",
        "quantize hf x --to int8": "Did you mean --scheme?",
        "hash hf --output x": "Did you mean --manifest?",
        "cat hf model.norm.weight --out x": "Did you mean --output?",
        "ls mt --output x": "To write the output to a file, append > FILE.",
        "inspect tree hf --summary": "Did you mean --depth 1?",
        "cast hf x --dtpye float16": "Did you mean --dtype",
        "select mt x --to maxtext": "To convert to MaxText, use `ckpt convert hf-to-maxtext`.",
        "select mt x --to hf": "To convert to Hugging Face, use `ckpt convert maxtext-to-hf`.",
        "cast hf x --dtype float8": "expected one of float8_e3m4, float8_e4m3fn, ",
        "cast hf x --dtype int": "expected one of int4, int2, int8, int16, int32, int64",
        "cast hf x --dtype bfloat": "did you mean bfloat16?",
        "cast hf x --dtype fp4": "did you mean float4_e2m1fn?",
        "cast hf x --dtype-map '*mlp*:float32'": "is not PATTERN=DTYPE, such as '*/mlp/*=bfloat16'",
        "cast hf x": "give --dtype DTYPE or --dtype-map PATTERN=DTYPE",
        "hash hf --jobs 0": "'--jobs': '0' is not an integer of at least 1",
        "hash hf --jobs four": "'--jobs': 'four' is not an integer of at least 1",
        "hash hf --memory lots": "'lots' is not a size. Write 512MiB, 2GB or a number of bytes.",
        "hash hf --algorithm md5": "'md5' is not one of 'xxh3-128', 'sha256'",
        "convert hf-to-maxtext hf x --family lama": "did you mean llama?",
        "convert hf-to-maxtext hf x --tied yes": "'yes' is not one of 'keep', 'drop', 'materialize'",
        "convert hf-to-maxtext hf x --maxtext 0.1": "'0.1' is not one of '0.2.5'",
        "convert hf-to-maxtext hf x --compression gzip": "expected none, zstd or zstd:LEVEL",
        "convert hf-to-maxtext hf x --chunks x": "expected name patterns and shapes, such as",
        "convert hf-to-maxtext hf x --scan-axis 5": "expected 0 or 1",
        "convert hf-to-maxtext hf x --drop nothing": "`ckpt inspect tree hf --flat` shows all names",
        "convert hf-to-maxtext hf mt --resume": "to replace it, use --overwrite instead of --resume",
        "doctor mt --fix nothing": "expected commit-marker or index or",
        "maxtext-config mt foo=1": "Did you mean --check foo=1?",
        "maxtext-config mt --check": "--check needs settings, after PATH",
        "prune run --keep-best accuracy:1": "expected one of loss",
        "prune run --keep-best loss": "such as loss:3",
        "reshard mt x --mesh fsdp=4 --rules axes.toml": "did you mean embed?",
        "inspect chunks hf --mesh fsdp=4 --rules axes.toml": "expected one of embed, embed_attn, ",
        "reshard mt x --mesh fdsp=4 --rules axes.toml": "did you mean fsdp?",
        "reshard mt x --mesh model=4 --rules axes.toml": "the rules use no axis of the mesh",
        "reshard mt x --mesh fsdp:8": "expected such as 8, 4x2 or data=4,fsdp=2",
        "completion tcsh": "'tcsh' is not one of 'bash', 'zsh', 'fish'",
        # what is wanted
        "select hf x": "give --keep PATTERN or --drop PATTERN",
        "shrink hf x": "give --layers or --experts or --vocab",
        "shrink hf x --layers 99": "expected one or more of the model's 4: 0 to 3, ascending",
        "prune run": "give --keep-last or --keep-every or --keep-best",
        "remap hf x": "give --rename OLD=NEW, --map FILE.toml, --map FILE.py:function or --maxtext VERSION",
        "remap hf x --rename model": "is not OLD=NEW, such as 'model.*=base.*'.",
        "remap hf x --rename model=": "to leave arrays out, use --drop PATTERN",
        "remap hf x --rename a=b --rename a=c": "a name cannot become two names",
        "remap hf x --rename a=b --map rest.toml": "several renamings are given",
        "remap hf x --rename 'model.*=base'": "only in the old name: *",
        "remap hf x --rename 'model.*=base.{i}.*'": "only in the new name: {i}",
        "remap hf x --rename model=base": "write --rename 'model.*=base.*'",
        "remap hf x --rename 'model.{rest}=x.{rest}'": "* for any text; {rest} matches only a number",
        "remap hf x --rename 'Model.*=x.*'": "'model' instead of 'Model'",
        "remap hf x --rename 'model.layer.{i}.*=x.{i}.*'": "'layers' instead of 'layer'",
        "remap hf x --rename norm.weight=x": "write --rename model.norm.weight=x",
        "remap hf x --rename base.model.norm.weight=x": "names without 'base.' at the beginning",
        "remap hf x --rename 'model/*=base/*'": "write --rename 'model.*=base/*'",
        "remap mt x --rename 'params.params.*=base/*'": "write --rename 'params/params/*=base/*'",
        "remap hf x --rename 'model.*=x.*' --rename 'model.norm.*=y.*'": "taken by model.* -> x.*",
        "remap hf x --rename zzzz=y": "`ckpt inspect tree hf --flat` lists the names",
        "verify mt": "expected one of: --against SRC, --manifest FILE",
        "average run/1 run/2": "got      one source, and the destination",
        "average mt x": "name several, or the last steps of a run: --last N",
        "average hf hf x --weights 1": "expected one finite number for each of the 2 checkpoints",
        "adapter extract hf hf x": "give --rank N, --error X, or both",
        "stack mt x": "there is nothing to do; `ckpt unstack` unstacks them",
        "strip-optimizer mt x": "to cast it, use `ckpt cast`; to leave out other arrays, --drop PATTERN",
        # paths
        "inspect tree qwenn": "did you mean qwen?",
        "inspect tree hf/model.safetensor": "did you mean hf/model.safetensors?",
        "hash nothing": "check the spelling of the path",
        "synth llama x": "the name of a family has no sizes",
        "verify mt --manifest none.json": "pass a file that --manifest or `ckpt hash` wrote",
        "remap hf x --map none.toml": "pass a file of rules (.toml, .json)",
        "run mt": "`ckpt plan` wrote",
        "cat mt norm": "no array has this name",
        "cat mt lm_head": "`ckpt inspect tree mt/0/items --flat` lists the names",
        "cat hf model.norm.weigth": "did you mean model.norm.weight",
        "convert hf-to-maxtext hf mt": "or allow its replacement with --overwrite",
        "convert hf-to-maxtext hf hf": "DST is SRC itself",
        "convert hf-to-maxtext hf hf/x": "DST is in SRC",
        "plan inspect tree mt -o x": "expected a command that writes a checkpoint",
        "stitch hf qwen x": "expected a multimodal model first",
        "inspect tree hf://": "expected hf://org/name",
        "inspect tree ftp://x/y": "copy it to a local directory",
        "meta-llama/Llama-3.2-1B": "a model on the Hugging Face Hub is named hf://meta-llama/Llama-3.2-1B",
        "demo /proc/x": "name a directory that can be created",
        "demo notes.txt": "name a directory that does not exist",
    },
    3: {
        "convert hf-to-maxtext mt x": "`ckpt convert maxtext-to-hf mt/0/items DST` converts it",
        "convert maxtext-to-hf hf x": "`ckpt convert hf-to-maxtext hf DST` converts it",
        "convert hf-to-maxtext many x": "name one of them: ckpt convert hf-to-maxtext many/hf x",
        "convert hf-to-maxtext empty x": "name one with a checkpoint in it",
        "convert hf-to-maxtext notes.txt x": "safetensors: the name ends in neither",
        "convert hf-to-maxtext corrupt x": "the file is not a complete torch.save archive",
        "convert hf-to-maxtext cut x": "truncated file: 182,820 bytes are missing",
        "remap hf x --map rest.toml": 'write `from = "model.{...}"` and `to = "base.{...}"`',
        "remap hf x --rename lm_head.weight=model.norm.weight": "both become model.norm.weight",
        "remap hf x --rename 'model.*=base.*' --strict": "leave them out with --drop PATTERN",
        "convert hf-to-maxtext bare x": "`cp HF_DIR/config.json bare`",
        "convert hf-to-maxtext deep x": "num_hidden_layers is 6, but the arrays have 4 layers",
        "convert hf-to-maxtext hf x --family gemma2": (
            "leave out --family gemma2: config.json has model_type llama"
        ),
        "inspect tree mt/0/items/_METADATA": "pass mt/0/items",
        "inspect tree mt/0/items/d": "pass mt/0/items",
        "inspect tree hf/config.json": "`ckpt hf` inspects its weights",
        "shrink hf x --experts 2": "expected a model with experts",
        "prune hf --keep-last 1": "hf` identifies it",
        "ls hf": "`ckpt hf` identifies it",
        "unstack hf x": "`ckpt convert hf-to-maxtext hf DST`",
        "average hf qwen x": "--force averages them anyway",
        "run notes.txt": "pass a file that `ckpt plan` wrote",
        "verify mt --manifest notes.txt": "pass a file that --manifest or `ckpt hash` wrote",
        "adapter merge hf qwen x": "`ckpt qwen` identifies it",
        "adapter extract hf qwen x --rank 4": "use the model that was fine-tuned as the base",
        "synth hf/model.safetensors x": "name the config.json of a model",
        "doctor notes.txt": "`ckpt formats` lists the supported formats",
    },
    4: {
        "convert hf-to-maxtext hf x --memory 8MB": "got      --memory 8MB",
        "convert hf-to-maxtext hf x --memory 8": "try --memory",
    },
    5: {
        "convert hf-to-maxtext hf /proc/out": "files cannot be created in it",
        "inspect tree gs://": "expected the name of a bucket: gs://NAME/…",
    },
}
ROWS = [(line, code, text) for code, lines in MISTAKES.items() for line, text in lines.items()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the commands run."""
    top = tmp_path_factory.mktemp("mistakes")
    model = GOLDEN / "llama3.1" / "hf"
    (top / "hf").symlink_to(model)
    (top / "qwen").symlink_to(GOLDEN / "qwen3" / "hf")
    shutil.copytree(ORBAX / "cm_best_metrics", top / "run")
    (top / "lora").symlink_to(ROOT / "fixtures" / "peft")
    (top / "notes.txt").write_text("hello\n")
    (top / "rest.toml").write_text('[[rules]]\nfrom = "model.{rest}"\nto = "base.{rest}"\n')
    (top / "axes.toml").write_text('axes = [["embd", "fsdp"]]\n')
    (top / "empty").mkdir()
    for name in ("hf", "qwen"):
        shutil.copytree(top / name, top / "many" / name)
    for name in ("corrupt", "cut", "bare", "deep"):
        shutil.copytree(model, top / name)
    (top / "bare" / "config.json").unlink()
    (top / "corrupt" / "model.safetensors").rename(top / "corrupt" / "pytorch_model.bin")
    data = (model / "model.safetensors").read_bytes()
    (top / "cut" / "model.safetensors").write_bytes(data[: len(data) // 2])
    config = json.loads((model / "config.json").read_text())
    (top / "deep" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    succeed("-q", "convert", "hf-to-maxtext", top / "hf", top / "mt")
    return top


@pytest.mark.parametrize(("line", "code", "text"), ROWS)
def test_message_helps(line, code, text, directory, monkeypatch):
    monkeypatch.chdir(directory)
    done = ckpt(*shlex.split(line), COLUMNS="400", HF_HUB_OFFLINE="1")
    assert done.exit_code == code, done.output
    assert text in done.output
    assert "Traceback" not in done.output and "\ue000" not in done.output
    assert not (directory / "x").exists()


def test_table_has_enough_rows():
    assert len(ROWS) >= 120
