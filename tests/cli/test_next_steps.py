"""What is said below the closing line: settings and calls that load what was written."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import ckpt, doctor, hint_of, succeed, with_flags
from support.hf_models import write_llama
from support.internals import dotted, parse
from support.locations import FIXTURES, GOLDEN, GOLDEN_0_2_5, HF, TRAINED
from support.trees import tree_of

import ckpttools
from ckpttools import ConfigError, Tree
from ckpttools.api import next_steps as steps
from ckpttools.api import summary as summaries
from ckpttools.formats.interrupted import resume_hint
from ckpttools.maxtext.model_config import absent_layers
from ckpttools.stores.publishing import Unfinished

PEFT = FIXTURES / "peft"


def words_of(use):
    return dict(item.split("=", 1) for item in use.split())


@pytest.fixture
def converted(tmp_path):
    ckpttools.hf_to_maxtext(HF, tmp_path / "it")
    return tmp_path / "it"


def next_steps(path):
    return with_flags(steps.next_steps(path))


def summary(path):
    return with_flags(summaries.summary(path))


class TestMaxText:
    def test_family_in_a_file_is_named_again_for_the_settings(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        text = succeed("families", "show", "llama", "--toml").stdout.replace('"llama"', '"mine"')
        Path("mine.toml").write_text(text)
        write_llama(tmp_path / "hf", model_type="mine")
        done = succeed("convert", "hf-to-maxtext", "hf", "out", "--family", "mine.toml")
        command = "ckpt maxtext-config out/0/items --family mine.toml"
        assert command in " ".join(done.stderr.split())
        assert "decoder_block=llama2" in succeed(*command.split()[1:]).stdout

    @pytest.mark.parametrize("flags", [(), ("--no-scan",), ("--scan-axis", 0)])
    def test_suggested_settings_load_the_parameters(self, flags, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        done = succeed("convert", "hf-to-maxtext", HF, "it", *flags)
        assert done.stdout.count("\n") == 1
        declared = next(line for line in done.stderr.splitlines() if line.startswith("next"))
        given = words_of(declared.removeprefix("next"))
        assert given["load_parameters_path"] == f"{tmp_path}/it/0/items"
        assert given["scan_layers"] == ("false" if "--no-scan" in flags else "true")
        assert given.get("param_scan_axis") == ("0" if "--scan-axis" in flags else None)
        assert ckpttools.resolve(**given).loads

    def test_next_steps_name_the_maxtext_config_command(self, converted):
        assert next_steps(converted).uses[1:] == (f"all settings: `ckpt maxtext-config {converted}`",)

    def test_next_steps_name_a_known_maxtext_model(self, converted, monkeypatch):
        config = "ckpttools.api.maxtext_config.matching_model"
        monkeypatch.setattr(config, lambda values: "llama3.1-8b")
        (use,) = next_steps(converted).uses
        assert use.startswith("model_name=llama3.1-8b load_parameters_path=/")

    def test_next_steps_list_padding_and_dtype_surprises(self, tmp_path):
        write_llama(tmp_path / "hf", vocab_size=500)
        ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "it", pad_vocab=512)
        assert next_steps(tmp_path / "it").surprises == (
            "stored in bfloat16; MaxText loads it in weight_dtype, by default float32",
            "vocab_size=512, but config.json has 500",
        )

    def test_next_steps_list_maxtext_deviations(self, tmp_path):
        ckpttools.hf_to_maxtext(GOLDEN / "llama3.2-tied" / "hf", tmp_path / "it", dtype="float32")
        factor, tied = next_steps(tmp_path / "it").surprises
        assert factor.startswith("rope_parameters.factor is 32") and "bfloat16" in tied

    def test_next_steps_name_left_out_towers(self, tmp_path):
        hf = GOLDEN_0_2_5 / "gemma3-vision" / "hf"
        ckpttools.hf_to_maxtext(hf, tmp_path / "it", text_only=True)
        assert (
            "text only: the checkpoint does not contain vision_config"
            in next_steps(tmp_path / "it").surprises
        )

    def test_next_steps_name_unread_config_fields(self, tmp_path):
        write_llama(tmp_path / "hf", clip_qkv=8.0)
        ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "it", dtype="float32")
        assert next_steps(tmp_path / "it").surprises == ("no MaxText setting represents clip_qkv 8.0",)

    def test_next_steps_report_a_missing_head(self, converted, tmp_path):
        ckpttools.select(converted, tmp_path / "new", drop=["*logits_dense*"])
        assert any("declares one" in surprise for surprise in next_steps(tmp_path / "new").surprises)

    def test_expected_output_has_no_surprises(self, tmp_path):
        ckpttools.hf_to_maxtext(HF, tmp_path / "it", dtype="float32")
        assert next_steps(tmp_path / "it").surprises == ()

    def test_training_state_loads_with_suggested_settings(self, tmp_path):
        ckpttools.unstack(TRAINED, tmp_path / "it")
        (use, _) = (*next_steps(tmp_path / "it").uses, "")
        given = words_of(use)
        assert given == {"load_full_state_path": f"{tmp_path}/it/1/items", "scan_layers": "false"}
        assert ckpttools.resolve(run_name="new", **given).loads

    def test_run_directory_resumes_in_maxtext(self, tmp_path):
        run = tmp_path / "out" / "mine" / "checkpoints"
        ckpttools.cast(TRAINED, run, dtype="float32")
        expected = f"resume the run: base_output_directory={tmp_path}/out run_name=mine"
        assert expected in next_steps(run).uses
        assert ckpttools.resolve(base_output_directory=tmp_path / "out", run_name="mine").loads

    def test_nnx_parameters_suggest_linen_flavor(self, tmp_path):
        ckpttools.strip_optimizer(TRAINED, tmp_path / "it", flavor="nnx")
        assert not ckpttools.resolve(load_parameters_path=tmp_path / "it/0/items").loads
        (use,) = next_steps(tmp_path / "it").uses
        assert use.endswith(f"`ckpt strip-optimizer {tmp_path}/it DST --flavor linen`")

    def test_unsupported_bucket_is_not_advised_for_maxtext(self, converted):
        ckpttools.convert(converted, "memory://next/it", format="orbax")
        assert next_steps("memory://next/it").uses == (
            "MaxText reads only disks and gs://: `ckpt copy memory://next/it DIR`",
        )


class TestTransformers:
    def test_next_steps_name_transformers_class_and_vllm(self, converted, tmp_path):
        done = succeed("convert", "maxtext-to-hf", converted, tmp_path / "my model")
        lines = done.stderr.splitlines()
        first = lines.index(f'next     AutoModelForCausalLM.from_pretrained("{tmp_path}/my model")')
        assert lines[first + 1] == f"         vllm serve '{tmp_path}/my model'"

    def test_missing_tokenizer_is_reported_for_vllm(self, converted, tmp_path):
        ckpttools.maxtext_to_hf(converted, tmp_path / "model")
        (surprise,) = next_steps(tmp_path / "model").surprises
        assert "--tokenizer" in surprise
        (tmp_path / "model" / "tokenizer.json").write_text("{}")
        assert next_steps(tmp_path / "model").surprises == ()

    def test_paths_with_quotes_are_escaped(self, converted, tmp_path):
        ckpttools.maxtext_to_hf(converted, tmp_path / 'a "b"')
        use = next_steps(tmp_path / 'a "b"').uses[0].removeprefix("AutoModelForCausalLM.from_pretrained")
        assert ast.literal_eval(use) == str(tmp_path / 'a "b"')

    def test_custom_code_needs_trust_remote_code(self, tmp_path):
        write_llama(tmp_path / "hf", auto_map={"AutoConfig": "configuration_mine.Mine"})
        loaded, served = next_steps(tmp_path / "hf").uses
        assert loaded.endswith(", trust_remote_code=True)") and served.endswith(" --trust-remote-code")

    def test_next_steps_use_the_class_of_the_config(self, tmp_path):
        write_llama(tmp_path / "hf", architectures=["MineForConditionalGeneration"])
        assert next_steps(tmp_path / "hf").uses[0].startswith("MineForConditionalGeneration.from")


class TestNoNextSteps:
    def test_partial_model_has_no_next_steps(self, converted, tmp_path):
        done = succeed("select", converted, tmp_path / "part", "--drop", "*norm*")
        assert "next" not in done.stderr

    def test_unsupported_dtype_has_no_next_steps(self, converted, tmp_path):
        ckpttools.cast(converted, tmp_path / "new", dtype="float8_e4m3fn")
        assert next_steps(tmp_path / "new") is None

    def test_other_formats_have_no_next_steps(self, converted, tmp_path):
        ckpttools.convert(converted, tmp_path / "new", format="zarr3")
        assert next_steps(tmp_path / "new") is None

    def test_missing_path_has_no_next_steps(self, tmp_path):
        assert next_steps(tmp_path / "none") is None

    def test_json_output_has_no_next_steps(self, tmp_path):
        done = ckpt("convert", "hf-to-maxtext", HF, tmp_path / "it", "--json")
        assert json.loads(done.stdout) and "next" not in done.stderr


class TestAdapters:
    def test_adapter_settings_fit_one_line(self, tmp_path, monkeypatch):
        monkeypatch.setenv("COLUMNS", "60")
        base, adapter = PEFT / "bases" / "llama-float32", PEFT / "plain"
        done = succeed("adapter", "to-maxtext", adapter, tmp_path / "lora", "--base", base)
        (declared,) = (line for line in done.stderr.splitlines() if line.startswith("next"))
        told = dict(item.split("=", 1) for item in shlex.split(declared.removeprefix("next")))
        assert told["lora.enable_lora"] == "true"
        assert (told["lora.lora_rank"], float(told["lora.lora_alpha"])) == ("2", 6)
        assert told["lora.lora_restore_path"] == f"{tmp_path}/lora/0/items"
        assert re.match(told["lora.lora_module_path"], "decoder/layers/mlp/wi_0")

    def test_training_layout_settings_omit_restore_path(self, tmp_path):
        base, adapter = PEFT / "bases" / "llama-float32", PEFT / "plain"
        ckpttools.adapter_to_maxtext(adapter, tmp_path / "lora", base=base, layout="training")
        told = next_steps(tmp_path / "lora").uses
        assert "lora.lora_module_path" in told[0] and "lora_restore_path" not in told[0]
        assert "lora.lora_rank=2 lora.lora_alpha=6" in told[0]
        ckpttools.copy(tmp_path / "lora", "memory://next/lora")
        assert next_steps("memory://next/lora").uses == (
            "MaxText reads only disks and gs://: `ckpt copy memory://next/lora DIR`",
        )

    def test_inspect_suggests_next_commands(self, tmp_path):
        base, adapter = PEFT / "bases" / "llama-float32", PEFT / "plain"
        ckpttools.adapter_to_maxtext(adapter, tmp_path / "lora", base=base)
        for path in (tmp_path / "lora", tmp_path / "lora" / "0" / "items"):
            result = summary(path)
            assert "a LoRA adapter of MaxText's" in result.what
            assert f"ckpt adapter to-peft {path} DST --base BASE" in result.next
        assert f"ckpt adapter to-maxtext {adapter} DST --base BASE" in summary(adapter).next
        assert next_steps(adapter).uses[0] == f'PeftModel.from_pretrained(model, "{adapter}")'

    def test_unsupported_adapters_get_no_maxtext_command(self, tmp_path):
        """DoRA and factors of embeddings have no place in MaxText; of another kind nothing is read."""
        for name in ("dora", "embeddings"):
            found = summary(PEFT / name)
            assert not any(warning.name == "unmerged" for warning in found.tree.warnings)
            result = found.next
            assert f"ckpt adapter merge BASE {PEFT / name} DST" in result
            assert not any("to-maxtext" in item for item in result)
        other = shutil.copytree(PEFT / "plain", tmp_path / "ia3")
        declared = json.loads((other / "adapter_config.json").read_text())
        (other / "adapter_config.json").write_text(json.dumps(declared | {"peft_type": "IA3"}))
        assert summary(other).next == (f"ckpt inspect tree {other}",)
        assert "PEFT's IA3 of " in succeed(other).output
        (finding,) = doctor(other).findings
        assert "in Python: PeftModel.from_pretrained" in finding.hint and finding.command is None
        (finding,) = doctor(PEFT / "plain").findings
        assert finding.command == f"ckpt adapter merge BASE {PEFT / 'plain'} MODEL"
        with pytest.raises(ckpttools.CheckpointError, match="a LoRA adapter") as told:
            ckpttools.maxtext_config(PEFT / "plain")
        assert "ckpt adapter merge BASE" in hint_of(told.value)
        assert "it configures an adapter" in ckpt(PEFT / "plain" / "adapter_config.json").output

    def test_peft_training_model_is_not_an_adapter(self, tmp_path):
        """Its weights have PEFT's prefix, too; verl and others save it so."""
        base = ckpttools.open(PEFT / "bases" / "llama-float32")
        factors = ckpttools.open(PEFT / "plain")
        tuned = {name.split(".lora_")[0] for name in map(dotted, factors)}

        def wrapped(name):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            return f"{module}.base_layer.weight" if module in tuned else f"base_model.model.{name}"

        both = {(wrapped(dotted(at)),): leaf for at, leaf in base.items()} | dict(factors)
        ckpttools.save(Tree(both), tmp_path / "both", "safetensors")
        shutil.copy(PEFT / "bases" / "llama-float32" / "config.json", tmp_path / "both")
        assert "are not merged into them" in " ".join(succeed(tmp_path / "both").output.split())
        told = ckpt("convert", "hf-to-maxtext", tmp_path / "both", tmp_path / "mt").output
        assert "contains LoRA adapters that are not merged" in told and "merge_and_unload" in told


class TestTrainerCheckpoints:
    def test_advised_commands_can_be_run(self, tmp_path, monkeypatch):
        """Each makes what the next loads: the model of the hub that the trainers were given, to the bit."""
        monkeypatch.chdir(tmp_path)
        trainers = FIXTURES / "torch" / "trainers"
        shutil.copytree(trainers / "torchtitan" / "step-10", "titan")
        (tmp_path / "titan" / "config.json").unlink()
        copied, to_hub, *_ = summary("titan").next[1:]
        assert copied == "cp HF_DIR/config.json titan"
        shutil.copy(trainers / "hub" / "config.json", "titan")
        succeed(*shlex.split(to_hub)[1:])
        assert ckpttools.verify("DST", trainers / "hub").equal
        locations = "titan", trainers / "fsdp" / "pytorch_model_fsdp_0", trainers / "open-instruct"
        for number, path in enumerate(locations):
            built = [item for item in summary(path).next if " DST" in item]
            assert len(built) == (1 if number == 2 else 2), built
            for kind, command in enumerate(built):
                out = f"{number}-{kind}"
                succeed(*shlex.split(command.replace(" DST", f" {out}"))[1:])
                assert ckpttools.verify(out, trainers / "hub").equal, command

    def test_hint_drops_arrays_outside_the_model(self, tmp_path, monkeypatch):
        """An optimizer's state and a head of TRL; no command is advised that this would stop."""
        monkeypatch.chdir(tmp_path)
        hub = FIXTURES / "torch" / "trainers" / "hub"
        arrays = {"v_head.summary.weight": "lm_head.weight", "optimizer_state.step": "model.norm.weight"}
        model = ckpttools.open(hub)
        more = {tuple(name.split(".", 1)): model[other] for name, other in arrays.items()}
        ckpttools.save(Tree({**model, **more}), "both", "safetensors")
        alone = [item for item in summary("both").next if "convert" in item or "config" in item]
        assert alone == ["cp HF_DIR/config.json both"]
        shutil.copy(hub / "config.json", "both")
        (built,) = (item for item in summary("both").next if "convert" in item or "config" in item)
        assert "--drop 'v_head.*'" in built and "--drop 'optimizer_state.*'" in built
        succeed(*shlex.split(built)[1:])
        assert ckpttools.verify("DST", hub).equal

    def test_hint_drops_optimizer_state_mixed_with_weights(self, tmp_path, monkeypatch):
        """Where a trainer put all in one dictionary, whose names are joined."""
        monkeypatch.chdir(tmp_path)
        hub = FIXTURES / "torch/trainers/hub"
        titan = ckpttools.open(FIXTURES / "torch/trainers/torchtitan/step-10")
        flat = {(dotted(path),): leaf for path, leaf in titan.items()}
        ckpttools.save(Tree(flat), "flat", "safetensors")
        shutil.copy(hub / "config.json", "flat")
        built = [item for item in summary("flat").next if "--drop" in item]
        assert built and all("--drop 'optimizer.*' --drop 'train_state.*'" in item for item in built)
        for number, item in enumerate(built):
            succeed(*shlex.split(item.replace(" DST", f" made-{number}"))[1:])
            assert ckpttools.verify(f"made-{number}", hub).equal
        for refused in (
            ckpt("convert", "to-safetensors", "flat", "x", "--names", "hub"),
            ckpt("convert", "hf-to-maxtext", "flat", "x"),
        ):
            assert "leave them out with --drop 'optimizer.*' --drop 'train_state.*'" in refused.output

    def test_names_unsupported_by_transformers_are_reported(self, tmp_path):
        trainers, flax = FIXTURES / "torch/trainers", FIXTURES / "flax/llama"
        bare = shutil.copy(PEFT / "plain/adapter_model.safetensors", tmp_path)
        for source, declared in (
            (trainers / "open-instruct", "names begin with policy, "),
            (flax, "names and axes are those of Flax, "),
            (bare, "adapter_config.json is not written: "),
        ):
            told = ckpttools.convert.plan(source, tmp_path / "x", format="safetensors").plan.notes.remarks
            assert any(item.startswith(declared) for item in told), told
        whole = ckpttools.convert.plan(PEFT / "plain", tmp_path / "x", format="safetensors")
        assert not any("is not written" in remark for remark in whole.plan.notes.remarks)
        told = ckpttools.convert.plan(
            trainers / "verl/global_step_10/actor", tmp_path / "x", format="safetensors"
        )
        assert not any("do not load" in remark for remark in told.plan.notes.remarks)

    def test_partial_checkpoints_are_described(self, tmp_path):
        """A file of one process, an optimizer alone; and names that several families have."""
        zero = FIXTURES / "torch/trainers/deepspeed"
        state = next(zero.glob("global_step*/*model_states.pt"))
        assert summary(state).next[-1] == f"ckpt {state.parent}"
        assert "a model of gemma or llama or mistral" in summary(state.parent).what
        model = ckpttools.open(zero)
        moments = {
            ("optimizer_state", dotted(at), item): leaf
            for at, leaf in model.items()
            for item in ("exp_avg", "exp_avg_sq")
        }
        ckpttools.save(Tree(moments), tmp_path / "optimizer", "zarr3")
        result = summary(tmp_path / "optimizer")
        assert result.what.startswith("the state of an optimizer")
        assert not any("--strip-optimizer" in item for item in result.next)

    @pytest.mark.parametrize("is_written", [True, False])
    def test_hint_adds_a_config_to_weights(self, is_written, tmp_path, monkeypatch):
        """Both ways: into the directory, and beside a copy where nothing can be written there."""
        monkeypatch.chdir(tmp_path)
        trainers = FIXTURES / "torch" / "trainers"
        shutil.copytree(
            trainers / "torchtitan/step-10", "my titan", ignore=shutil.ignore_patterns("config.json")
        )
        succeed("convert", "hf-to-maxtext", trainers / "hub", "maxtext")
        drop = "--drop", "optimizer", "--drop", "train_state"
        # Against MaxText's own arrays, names and shapes tell the model.
        succeed("verify", "maxtext", "--against", "my titan", *drop)
        refused = ckpt("convert", "hf-to-maxtext", "my titan", "out", *drop)
        assert refused.exit_code == 3
        commands = re.findall("`(.*?)`", refused.output)
        beside, kept, copied = map(shlex.split, commands)
        assert beside == ["cp", "HF_DIR/config.json", "my titan"]
        if not is_written:
            succeed(*kept[1:])
        shutil.copy(trainers / "hub/config.json", (beside if is_written else copied)[2])
        source = "my titan" if is_written else "MODEL"
        succeed("convert", "hf-to-maxtext", source, "out", *drop)
        succeed("verify", "maxtext", "--against", source, *drop)
        assert ckpttools.diff("out", "maxtext").equal

    @pytest.mark.parametrize("sides", [(0, 1), (1, 0)])
    def test_verify_recognizes_torchtitan_names(self, sides, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        hub, titan = (FIXTURES / "torch" / "trainers" / name for name in ("hub", "torchtitan/step-10"))
        shutil.copytree(titan, "bare", ignore=shutil.ignore_patterns("config.json"))
        pairs = [[(hub, item)[side] for side in sides] for item in (titan, "bare")]
        for pair in pairs:
            assert ckpttools.verify(*pair).hints == ("parameters=True compares only the parameters",)
            assert ckpttools.verify(*pair, parameters=True).equal
        assert not ckpttools.verify(hub, hub, filter="*norm*").hints

    def test_t5x_checkpoint_is_not_identified_as_maxtext(self, tmp_path):
        """T5X calls layers as MaxText does."""
        tree = tree_of(*(("target", "decoder", f"layers_{n}", "mlp", "wi", "kernel") for n in range(2)))
        ckpttools.convert(tree, tmp_path / "t5x", format="zarr3")
        assert ckpttools.inspect(tmp_path / "t5x").kind is not None
        assert not [item for item in summary(tmp_path / "t5x").next if "maxtext-" in item]


def test_resume_hint_names_the_directory(tmp_path):
    """The place is named where the command was given elsewhere: relative paths mean others here."""
    left = Unfinished(parse(tmp_path / "out"), command="ckpt copy a b")
    here = replace(left, directory=str(Path.cwd()))
    assert resume_hint(left) == resume_hint(here) == "run `ckpt copy a b` again"
    assert resume_hint(replace(left, directory="/elsewhere")) == "run `ckpt copy a b` again in /elsewhere"
    assert resume_hint(replace(left, command="")) == "run its command again"


@pytest.mark.parametrize(("declared", "count"), [({"keep": "*"}, 2), ({"drop": "*layers.1.*"}, 0)])
def test_partial_model_suggests_no_loader(tmp_path, declared, count):
    """All names of its family are there, but not all of its layers."""
    write_llama(tmp_path / "hf", num_hidden_layers=2)
    ckpttools.select(tmp_path / "hf", tmp_path / "out", **declared)
    result = next_steps(tmp_path / "out")
    assert len(result.uses if result else ()) == count


def test_only_text_layers_are_counted():
    names = ["model.language_model.layers.0.norm.weight", "model.visual.blocks.5.norm.weight"]
    of_text = {"text_config": {"num_hidden_layers": 2}, "num_hidden_layers": 1}
    assert absent_layers(of_text, names) == {1}
    assert absent_layers({"thinker_config": of_text}, names) == {1}
    assert absent_layers({"num_hidden_layers": 1}, names) == set()
    assert absent_layers(of_text, ["h.0.norm.weight"]) == absent_layers({}, names) == set()


def test_peft_is_suggested_only_for_loadable_names(tmp_path):
    for prefix, count in ((None, 2), ("base_model.model", 1)):
        ckpttools.select(PEFT / "plain", tmp_path / "out", keep="*", prefix=prefix, overwrite=True)
        uses = next_steps(tmp_path / "out").uses
        assert [use.startswith("PeftModel") for use in uses] == [True, False][-count:]


def test_conversion_explains_why_maxtext_cannot_be_configured(tmp_path):
    write_llama(tmp_path / "hf", num_hidden_layers=1, hidden_act="gelu")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt")
    (problem, *_) = next_steps(tmp_path / "mt").surprises
    assert problem.startswith(
        "MaxText cannot be configured for this model: MaxText has no value of mlp_activations"
    )
    assert 'hidden_act "gelu"' in problem
    with pytest.raises(ConfigError) as refused:
        ckpttools.maxtext_config(tmp_path / "hf")
    assert refused.value.location == f"{tmp_path / 'hf'}/config.json"
    assert "cannot run this model" in refused.value.hint
