"""`ckpt resolve`: MaxText's rules, by tables, and against Orbax's loaders called as MaxText calls them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from functools import partial
from itertools import count, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import ckpt, succeed, with_flags
from support.hf_models import write_llama
from support.internals import NEWEST, VERSIONS, parse
from support.locations import DOCS, GOLDEN, HF, ORBAX, TRAINED
from support.maxtext_loading import PATHS, RULES, RUNS
from support.object_stores import files_in, google
from support.scripts import answers

import ckpttools
from ckpttools import ConfigError, FormatError, StorageError, UnknownNameError, UsageError
from ckpttools.api import resolve as resolutions
from ckpttools.maxtext.loading.command import parse_command
from ckpttools.maxtext.loading.configuration import merge_settings
from ckpttools.maxtext.loading.model_sizes import KNOWN_NAMES, MODELS
from ckpttools.maxtext.loading.paths import list_committed_steps
from ckpttools.maxtext.loading.resolution import NOTHING_FOUND_TEXT
from ckpttools.maxtext.loading.settings import DEFAULTS, SIZES
from ckpttools.maxtext.loading.weights import check_weights

SCANNED = GOLDEN / "llama3.1" / "maxtext_scanned" / "0" / "items"
UNSCANNED = GOLDEN / "llama3.1" / "maxtext_unscanned" / "0" / "items"
VERSION_OF = {"v0": "e591f30", "v1": "0.2.5"}
BOTH = pytest.mark.parametrize("maxtext", VERSIONS)
NUMBERS = count()


def resolve(*arguments, **options):
    return with_flags(resolutions.resolve(*arguments, **options))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [*os.environ]:
        if name.startswith("M_") or name == "JOBSET_NAME":
            monkeypatch.delenv(name)


def texts(result):
    return " | ".join(problem.what for problem in result.problems)


def hints(result):
    return " | ".join(problem.hint or "" for problem in result.problems)


@pytest.fixture
def runs(tmp_path):
    """A base_output_directory with one run, `x`, at step 1."""
    shutil.copytree(TRAINED, tmp_path / "out" / "x" / "checkpoints")
    return tmp_path / "out"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def orbax(built, tmp_path_factory):
    """What Orbax says of each case; the checkpoints are then in `built`."""
    return answers("maxtext_loading_script", [str(built)], tmp_path_factory.mktemp("results"))


class TestAgainstOrbax:
    """The calls that MaxText makes, made: what loads is said to load, and the other way round."""

    # Orbax lets them load, and MaxText begins with a new optimizer without a word.
    WITHOUT_OPTIMIZER = ("parameters/", "bare", "v1/")

    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("api", VERSION_OF)
    def test_predicted_path_loads_match_orbax(self, built, orbax, api, rule, path):
        result = resolve(maxtext=VERSION_OF[api], **{rule: f"{built}/{path}"})
        error = orbax[f"{rule} {api} {path}"]
        if rule == "load_full_state_path" and path.startswith(self.WITHOUT_OPTIMIZER) and not error:
            assert "new optimizer, without a warning" in texts(result)
        else:
            assert result.loads == (not error), (error, result)
        assert result.loads or result.problems

    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("api", VERSION_OF)
    def test_predicted_run_loads_match_orbax(self, built, orbax, api, run):
        result = resolve(maxtext=VERSION_OF[api], base_output_directory=str(built), run_name=run)
        error = orbax[f"resume {api} {run}"]
        if run == "parameters":
            assert not error
            assert "new optimizer, without a warning" in texts(result)
        elif error == "ValueError: no step":
            assert (result.outcome, result.verdict) == ("scratch", NOTHING_FOUND_TEXT)
        else:
            assert result.loads == (not error), (error, result)

    def test_latest_step_matches_orbax(self, built, orbax):
        del orbax
        result = resolve(base_output_directory=built, run_name="named")
        assert (result.step, result.loads) == (2, True)
        assert "007 is skipped" in result.rules[0].result


class TestPrecedence:
    @BOTH
    def test_run_itself_takes_precedence(self, runs, maxtext):
        result = resolve(
            maxtext=maxtext, base_output_directory=str(runs), run_name="x", load_parameters_path=str(SCANNED)
        )
        assert (result.rule, result.step, result.expected) == ("resume", 1, "full state")
        assert result.path == str(runs / "x" / "checkpoints" / "1" / "items")
        assert [item.rule for item in result.rules] == ["resume", "load_parameters_path"]
        assert result.rules[1].result == "not inspected: the run itself takes precedence"
        assert result.loads

    @BOTH
    def test_named_path_is_loaded_without_a_run(self, runs, maxtext):
        result = resolve(
            maxtext=maxtext, base_output_directory=str(runs), run_name="y", load_parameters_path=str(SCANNED)
        )
        assert (result.rule, result.step, result.loads) == ("load_parameters_path", 0, True)
        assert result.rules[0].result == "does not exist"

    @BOTH
    def test_random_parameters_are_the_last_resort(self, runs, maxtext):
        result = resolve(maxtext=maxtext, base_output_directory=str(runs), run_name="y")
        assert (result.outcome, result.verdict, result.path) == ("scratch", NOTHING_FOUND_TEXT, None)
        assert not result.loads

    def test_disabled_checkpointing_resumes_nothing(self, runs):
        result = resolve(base_output_directory=str(runs), run_name="x", enable_checkpointing=False)
        assert result.outcome == "scratch"
        assert "enable_checkpointing is false" in result.rules[0].result

    def test_unnamed_run_is_never_resumed(self, runs, monkeypatch):
        declared = {"base_output_directory": str(runs)}
        assert "run_name is empty" in resolve(**declared).rules[0].result
        monkeypatch.setenv("JOBSET_NAME", "x")
        assert resolve(**declared).step == 1

    def test_default_output_directory_is_the_working_directory(self, runs, monkeypatch):
        monkeypatch.chdir(runs.parent)
        runs.rename("maxtext_output")
        result = resolve(run_name="x")
        assert result.step == 1
        assert "base_output_directory is not set" in result.notes[0]

    def test_finished_run_does_not_start(self, runs):
        declared = {"base_output_directory": str(runs), "run_name": "x"}
        assert "2 steps of 2 are done" in texts(resolve(**declared, steps=2))
        assert "2 steps of 1 are done" in texts(resolve(**declared, steps=-1, learning_rate_schedule_steps=1))
        assert resolve(**declared, steps=3).loads

    def test_empty_latest_step_hides_older_steps(self, runs):
        (runs / "x" / "checkpoints" / "7").mkdir()
        result = resolve(base_output_directory=str(runs), run_name="x")
        assert "7 is the latest step for Orbax, but has no complete item items" in texts(result)
        assert "ckpt doctor" in hints(result)

    def test_parameters_in_a_run_directory_stop_the_run(self, tmp_path):
        shutil.copytree(SCANNED.parents[1], tmp_path / "x" / "checkpoints")
        result = resolve(base_output_directory=tmp_path, run_name="x")
        assert "Type mismatch at key path ('opt_state',)" in texts(result)

    def test_hugging_face_weights_are_converted_on_the_fly(self):
        result = resolve(load_parameters_path=str(HF), source_checkpoint_layout="safetensors_dynamic")
        assert (result.rule, result.outcome, result.step) == ("safetensors_dynamic", "loads", None)
        assert "contains Hugging Face weights" in texts(resolve(load_parameters_path=str(HF)))

    @pytest.mark.parametrize(
        ("declared", "path"),
        [
            ({"load_parameters_path": "hf://org/name"}, "hf://org/name"),
            ({"load_parameters_path": "org/name"}, "hf://org/name"),
            ({"model_name": "llama3.1-8b"}, "the Hub weights for model_name=llama3.1-8b"),
        ],
    )
    def test_hub_weights_are_staged_in_a_bucket(self, declared, path):
        declared = {**declared, "source_checkpoint_layout": "safetensors_dynamic"}
        assert "base_output_directory, which must be on gs://" in texts(resolve(**declared))
        result = resolve(**declared, base_output_directory="gs://bucket/out")
        assert (result.rule, result.path, result.outcome) == ("safetensors_dynamic", path, "loads")

    def test_model_name_gives_the_default_repository(self):
        result = resolve(source_checkpoint_layout="safetensors_dynamic", base_output_directory="gs://b/o")
        assert "model_name determines the weights, but it is not set" in texts(result)

    def test_hugging_face_weights_use_the_conversion_function(self):
        declared = {"load_full_state_path": str(HF), "source_checkpoint_layout": "safetensors"}
        assert "needs checkpoint_conversion_fn" in texts(resolve(**declared))
        declared["checkpoint_conversion_fn"] = "my.module.fn"
        assert resolve(**declared).loads
        assert "only with enable_orbax_v1" in texts(resolve(**declared, maxtext="e591f30"))
        assert resolve(**declared, maxtext="e591f30", enable_orbax_v1=True).loads
        named = {"load_parameters_path": str(HF), "source_checkpoint_layout": "safetensors"}
        assert not resolve(**named).loads, "the layout is ignored for parameters"


class TestPaths:
    @pytest.mark.parametrize(
        ("path", "hint"),
        [
            ("out/x", "load_parameters_path={}/out/x/checkpoints/1/items"),
            ("out/x/checkpoints", "load_parameters_path={}/out/x/checkpoints/1/items"),
            ("out/x/checkpoints/2/items", "load_parameters_path={}/out/x/checkpoints/1/items"),
            ("nothing/at/all", "check its spelling"),
        ],
    )
    def test_nearby_item_is_suggested(self, runs, path, hint):
        result = resolve(load_parameters_path=f"{runs.parent}/{path}")
        assert hint.format(runs.parent) in hints(result)
        assert result.verdict == "does not find the named checkpoint"

    def test_older_version_needs_the_item_directory(self, runs):
        step = runs / "x" / "checkpoints" / "1"
        assert resolve(load_parameters_path=step).loads
        older = resolve(load_parameters_path=step, maxtext="e591f30")
        assert hints(older) == f"set load_parameters_path={step}/items"

    def test_home_directory_is_not_expanded(self):
        assert "does not expand ~" in texts(resolve(load_parameters_path="~/llama/0/items"))

    @pytest.mark.parametrize("name", ["load_parameters_path", "lora.lora_restore_path"])
    def test_relative_paths_are_refused(self, name, monkeypatch):
        """By Orbax, wherever it reads arrays: "Checkpoint path should be absolute"."""
        monkeypatch.chdir(SCANNED.parent)
        result = resolve(f"{name}=items", "lora.enable_lora=true")
        result = result.adapter or result
        assert (texts(result), hints(result)) == (
            f"Orbax refuses relative paths such as {name}=items",
            f"set {name}={SCANNED}",
        )

    @pytest.mark.parametrize("scheme", ["s3", "az", "hf"])
    def test_runs_in_other_stores_are_not_read(self, scheme):
        result = resolve(base_output_directory=f"{scheme}://org/name", run_name="x")
        assert f"but not {scheme}://" in texts(result)
        assert result.rules[0].result == "not inspected"

    def test_relative_runs_are_refused(self, runs, monkeypatch):
        monkeypatch.chdir(runs.parent)
        result = resolve(base_output_directory="out", run_name="x")
        assert hints(result) == f"set base_output_directory={runs}"

    def test_items_with_other_names_need_rewriting(self, built, orbax):
        del orbax
        for path in ("other/checkpoints/3", "other/checkpoints/3/default"):
            newer = resolve(load_full_state_path=built / path)
            assert f"ckpt convert to-orbax {built}/other/checkpoints/3/default DST --item items" in hints(
                newer
            )

    @pytest.mark.parametrize("scheme", ["s3", "az", "https", "hf"])
    def test_other_stores_are_not_read(self, scheme):
        result = resolve(load_parameters_path=f"{scheme}://org/name")
        assert f"but not {scheme}://" in texts(result)


class TestCheckpointKinds:
    def test_full_state_provides_parameters(self, runs):
        result = resolve(load_parameters_path=str(runs / "x" / "checkpoints" / "1" / "items"))
        assert result.loads
        assert "only the parameters are loaded" in " ".join(result.notes)

    @BOTH
    def test_parameters_are_not_a_full_state(self, maxtext):
        result = resolve(load_full_state_path=str(SCANNED), maxtext=maxtext)
        assert "the full state is expected" in texts(result)
        assert "load_parameters_path" in hints(result)

    @pytest.mark.parametrize("path", ["gs://", "gs:///", "gs:///step"])
    def test_unnamed_bucket_is_refused(self, path):
        result = resolve(load_parameters_path=path)
        assert f"load_parameters_path={path} does not name a bucket" in texts(result)
        assert "gs://BUCKET/" in hints(result)

    def test_overlong_name_does_not_exist(self):
        assert "a does not exist" in texts(resolve(load_parameters_path="/" + "a" * 300))

    def test_another_flavor_is_not_found(self, tmp_path):
        ckpttools.strip_optimizer(TRAINED, tmp_path / "nnx", flavor="nnx")
        result = resolve(load_parameters_path=ckpttools.open(tmp_path / "nnx").metadata.location)
        assert (
            "looks for parameters below params/params and misses all: they are nested in the flavor nnx"
            in texts(result)
        )
        assert "--flavor linen" in hints(result)

    @pytest.mark.parametrize("item, declared", [(SCANNED, True), (UNSCANNED, False)])
    def test_mismatched_scan_layers_is_reported(self, item, declared):
        assert resolve(load_parameters_path=str(item), scan_layers=declared).loads
        result = resolve(load_parameters_path=str(item), scan_layers=not declared)
        assert f"scan_layers is {str(not declared).lower()} (command line)" in texts(result)
        assert (
            f"set scan_layers={str(declared).lower()}, or `ckpt {'unstack' if declared else 'stack'}"
            in hints(result)
        )

    def test_wrong_scan_axis_is_reported(self, tmp_path):
        write_llama(tmp_path / "hf")
        ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "out", scan_axis=0)
        item = tmp_path / "out" / "0" / "items"
        assert resolve(load_parameters_path=item, param_scan_axis=0).loads
        assert hints(resolve(load_parameters_path=item)) == "set param_scan_axis=0"

    def test_unfinished_saves_are_reported(self, runs):
        metadata = runs / "x" / "checkpoints" / "1" / "_CHECKPOINT_METADATA"
        metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"commit_timestamp_nsecs": None}))
        assert "commit timestamp null" in texts(resolve(base_output_directory=runs, run_name="x"))


# What MaxText was told when it made the fixtures.
ONE = "base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=2 head_dim=16 vocab_size=256"
MADE_BY = {
    "deepseek2": f"model_name=deepseek2-16b {ONE} base_num_kv_heads=4 base_num_decoder_layers=5",
    "deepseek3": f"model_name=deepseek3-671b {ONE} base_num_kv_heads=4 base_num_decoder_layers=5",
    "gemma2": f"model_name=gemma2-2b {ONE} base_num_decoder_layers=2",
    "gemma3": f"model_name=gemma3-4b {ONE} base_num_decoder_layers=8",
    "gemma4-moe": f"model_name=gemma4-26b {ONE} base_num_decoder_layers=12",
    "gpt-oss": f"model_name=gpt-oss-20b {ONE} base_num_decoder_layers=4",
    "llama3.1": f"model_name=llama3.1-8b {ONE} base_num_decoder_layers=4",
    "llama4-scout": f"model_name=llama4-17b-16e {ONE} base_num_decoder_layers=8",
    "mistral-7b": f"model_name=mistral-7b {ONE} base_num_decoder_layers=4",
    "mixtral-8x7b": f"model_name=mixtral-8x7b {ONE} base_num_decoder_layers=4",
    "qwen2.5": f"model_name=qwen2.5-7b {ONE} base_num_decoder_layers=4",
    "qwen3": f"model_name=qwen3-8b {ONE} base_num_decoder_layers=4",
    "qwen3-moe": f"model_name=qwen3-30b-a3b {ONE} base_num_decoder_layers=4",
    "qwen3-next": f"model_name=qwen3-next-80b-a3b {ONE} base_num_decoder_layers=8",
}


class TestSizes:
    @pytest.mark.parametrize("family, scan", [*product(MADE_BY, [True, False])])
    def test_settings_of_the_run_match_its_checkpoint(self, family, scan):
        plan = partial(ckpttools.hf_to_maxtext.plan, GOLDEN / family / "hf", "memory://out", scan=scan)
        trees = {version: plan(maxtext=version).plan.tree for version in VERSIONS}
        words = [*MADE_BY[family].split(), f"scan_layers={scan}", "override_model_config=true"]

        def problems(version, *more, made_for=""):
            settings = merge_settings(parse_command([*words, *more]), {})
            assert settings.contradictions == ()
            tree = trees[made_for or version]
            result = check_weights(tree, "parameters", "params", settings, VERSIONS[version])
            return [problem.what for problem in result.problems]

        assert problems("e591f30") == []
        assert problems("0.2.5") == []
        differs = scan and family in ("deepseek3", "qwen3-next")
        for version, other in (VERSIONS, reversed(VERSIONS)):
            assert len(problems(version, made_for=other)) == differs, "layouts that versions have otherwise"
        for size in ("vocab_size", "base_num_decoder_layers", "base_emb_dim"):
            assert [problem.split(" ")[0] for problem in problems("e591f30", f"{size}=999")] == [size]

    @pytest.mark.parametrize("declared", ["model_name=qwen3-next-80b-a3b", "decoder_block=qwen3_next"])
    def test_stacks_of_another_version_are_detected(self, declared):
        source = GOLDEN / "qwen3-next" / "hf"
        tree = ckpttools.hf_to_maxtext.plan(source, "memory://out", maxtext="e591f30").plan.tree
        settings = merge_settings(parse_command([declared]), {})
        result = check_weights(tree, "parameters", "params", settings, VERSIONS["0.2.5"])
        stacks = next(problem for problem in result.problems if problem.what.startswith("layers are stacked"))
        assert "--maxtext 0.2.5 --family qwen3-next" in with_flags(stacks.hint or "")

    @pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe", None])
    @pytest.mark.parametrize("made_for", VERSIONS)
    @pytest.mark.parametrize("version", VERSIONS)
    def test_stacks_of_an_unnamed_model_are_reported(self, version, made_for, model_type):
        """Stacks by position are of Qwen3-Next in one version, and of Qwen3.5 in both."""
        plan = partial(ckpttools.hf_to_maxtext.plan, GOLDEN / "qwen3-next" / "hf", "memory://out")
        config = None if model_type is None else {"model_type": model_type}
        tree = plan(maxtext=made_for).plan.tree.with_metadata(config=config)
        result = check_weights(
            tree, "parameters", "params", merge_settings(parse_command([]), {}), VERSIONS[version]
        )
        told = [problem for problem in result.problems if "stacked below" in problem.what]
        by_kind = made_for == "0.2.5"
        expected = version == "0.2.5" and model_type == "qwen3_next"
        if model_type is None and version == "0.2.5":
            assert [item.hint for item in told] == ([] if by_kind else ["set model_name or decoder_block"])
        else:
            assert len(told) == (by_kind != expected)

    def test_sizes_need_a_model_name(self):
        result = resolve(load_parameters_path=SCANNED)
        assert "sizes were not compared" in " ".join(result.notes)
        assert result.loads

    def test_config_file_counts_with_its_defaults(self):
        result = resolve("base.yml", load_parameters_path=SCANNED)
        assert "base_emb_dim is 2048 (default), but the checkpoint has 64" in texts(result)
        assert "base.yml does not exist; MaxText's own file is used" in result.notes

    def test_sizes_of_all_models_are_known(self):
        result = resolve(load_parameters_path=SCANNED, model_name="llama3.1-8b")
        assert "vocab_size is 128256 (model llama3.1-8b), but the checkpoint has 256" in texts(result)
        assert {name for sizes in MODELS.values() for name in sizes} <= {*SIZES, "scan_layers"}
        assert MODELS.keys() <= KNOWN_NAMES


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "versions", "what"),
        [
            (
                "load_parameters_path=a load_full_state_path=b",
                "both",
                "At most one of `load_parameters_path`",
            ),
            ("load_full_state_path=a enable_checkpointing=false", "both", "refuses load_full_state_path"),
            ("load_parameters_path=a enable_checkpointing=false", "e591f30", "refuses load_parameters_path"),
            ("checkpoint_todelete_subdir=.old", "0.2.5", "refuses checkpoint_todelete_subdir"),
            ("run_name=2026", "both", "run_name=2026 (command line): MaxText expects text"),
            ("load_parameters_path=", "both", "MaxText expects text"),
            ("enable_checkpointing=maybe", "both", "MaxText expects true or false"),
            ("steps=many", "both", "MaxText expects an integer"),
            ("steps=1.5", "both", "MaxText expects an integer"),
            ("load_parameters_path=none", "both", "MaxText expects text"),
            ("base_output_directory=none", "both", "MaxText expects text"),
            ("pure_nnx=true", "0.2.5", "MaxText 0.2.5 has no such setting"),
            ("load_paramters_path=a", "both", "has no such setting"),
            ("scan_layer=false", "both", "has no such setting"),
            ("foo=1", "both", "foo=1 (command line): MaxText"),
            ("weight_block_size=[1]", "e591f30", "MaxText e591f30 has no such setting"),
            ("model_name=llama9", "both", "does not support model_name=llama9"),
            ("model_name=weaver-max", "e591f30", "does not support model_name=weaver-max"),
            ("source_checkpoint_layout=torch", "both", "does not support source_checkpoint_layout=torch"),
            ("lora_restore_path=a", "both", "has no such setting"),
            ("model_name=llama3.1-8b vocab_size=7", "both", "the model sets other values"),
            ("enable_emergency_checkpoint=true", "both", "needs local_checkpoint_directory"),
            (
                "enable_emergency_checkpoint=true local_checkpoint_directory=/l",
                "both",
                "needs local_checkpoint_period above 0",
            ),
            (
                "enable_multi_tier_checkpointing=1 local_checkpoint_directory=/l local_checkpoint_period=5",
                "both",
                "but not both",
            ),
            (
                "enable_multi_tier_checkpointing=1 local_checkpoint_directory=/l local_checkpoint_period=5 "
                "multi_tier_checkpointing_backup_interval_steps=4",
                "both",
                "must not be smaller",
            ),
        ],
    )
    def test_maxtext_errors_are_predicted(self, words, versions, what):
        for version in VERSIONS:
            result = resolve(*words.split(), maxtext=version)
            assert (what in texts(result)) == (versions in ("both", version)), result

    @pytest.mark.parametrize(
        ("word", "version", "hint"),
        [
            ("scan_layer=false", "0.2.5", "did you mean scan_layers?"),
            ("lora_rank=4", "0.2.5", "write lora.lora_rank"),
            ("foo=1", "0.2.5", "leave it out"),
            ("pure_nnx=true", "0.2.5", "leave it out, or use MaxText e591f30, which has it"),
            ("weight_block_size=[1]", "e591f30", "leave it out, or use MaxText 0.2.5, which has it"),
        ],
    )
    def test_unknown_settings_are_refused_as_by_maxtext_config(self, word, version, hint):
        (problem,) = resolve(word, maxtext=version).problems
        (invalid,) = ckpttools.maxtext_config(HF, check=[word], maxtext=version).invalid_settings
        assert problem.what.endswith(f"(command line): {invalid.reason}")
        assert hint in problem.hint and hint in invalid.hint

    @pytest.mark.parametrize(
        "words",
        [
            "run_name= steps=-1",
            "steps=1e3",
            "base_output_directory=",
            "checkpoint_todelete_subdir=none",
            "checkpoint_period=10 kv_lora_rank=4 base_moe_mlp_dim=5",
            "enable_checkpointing=yes",
            "model_name=llama3.1-8b-Instruct",
            "model_name=llama3.1-8b vocab_size=128256",
            "model_name=llama3.1-8b vocab_size=7 override_model_config=true",
            "checkpoint_conversion_fn=none",
            'constant_bound_config=""',
        ],
    )
    def test_accepted_settings_have_no_problems(self, words):
        assert resolve(*words.split()).problems == ()


class TestCommand:
    def test_complete_command_line_is_parsed(self, runs):
        words = shlex.split(
            f"python3 -m maxtext.trainers.pre_train.train base.yml run_name=x base_output_directory={runs} "
            "base_emb_dim=64 head_dim=16 vocab_size=256 base_num_decoder_layers=2 base_num_query_heads=4 "
            "base_num_kv_heads=2"
        )
        result = resolve(*words)
        assert result.step == 1
        assert not any("may have others" in note for note in result.notes)
        other = resolve("python3", "-m", "maxtext.inference.decode", f"base_output_directory={runs}")
        assert "maxtext.inference.decode may have others" in " ".join(other.notes)

    @pytest.mark.parametrize(
        ("word", "error"),
        [
            ("gs://b/x", UsageError),
            ("x.yaml", UsageError),
            ("a=[", FormatError),
            ("absent.yml", StorageError),
        ],
    )
    def test_invalid_arguments_are_refused(self, word, error):
        with pytest.raises(error):
            resolve(word)

    def test_unknown_versions_are_refused(self):
        with pytest.raises(UnknownNameError, match=r"0\.2\.4"):
            resolve(maxtext="0.2.4")

    def test_values_are_parsed_like_omegaconf(self):
        declared = parse_command(
            ["a=1e3", "b=2026-01-02", "c=10_000", "d.e=yes", "d.f=null", "g=", "h='\"x\"'"]
        ).overrides
        assert declared == {
            "a": 1000.0,
            "b": "2026-01-02",
            "c": 10_000,
            "d": {"e": True, "f": None},
            "g": None,
            "h": '"x"',
        }

    @given(
        st.dictionaries(
            st.sampled_from(["run_name", "base_output_directory", "load_parameters_path"]),
            st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), min_size=1),
        )
    )
    def test_text_values_stay_text(self, declared):
        settings = merge_settings(
            parse_command(
                [f"{name}={json.dumps(text, ensure_ascii=False)}" for name, text in declared.items()]
            ),
            {},
        )
        for name, text in declared.items():
            if "${" not in text and text.lower() != "none":
                assert settings.text(name) == text


VALUES = ["", "-1", "1.5", "[1]", "{a: b}", ".nan", ".inf", '"a\\0b"', "none", "~", "gs://", "..", "/", '" "']
VALUES += [
    "memory://",
    "s3://a",
    "hf://a/b",
    "~/x",
    "&a [*a]",
    "/dev/null",
    "a" * 300,
    "safetensors",
    str(HF),
]


class TestArbitrarySettings:
    @given(st.dictionaries(st.sampled_from([*DEFAULTS, "lora", "lora.x", "x.y"]), st.sampled_from(VALUES)))
    def test_arbitrary_settings_yield_a_report(self, declared):
        result = resolve(*(f"{name}={value}" for name, value in declared.items()))
        assert result.loads or result.problems or result.outcome in ("scratch", "unknown")
        assert repr(result).isprintable() or "\n" in repr(result)


class TestFiles:
    def write(self, directory, **files):
        for name, content in files.items():
            path = directory / f"{name.replace('__', '/')}.yml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        return directory

    def test_config_files_inherit_from_base_config(self, runs, monkeypatch):
        self.write(
            runs.parent,
            base=f"base_output_directory: {runs}\nrun_name: a\nlora: {{lora_rank: 4, enable_lora: false}}\n",
            mine="base_config: base.yml\nrun_name: x\nlora: {enable_lora: true}\n",
        )
        settings = merge_settings(parse_command([str(runs.parent / "mine.yml"), "steps=7"]), {})
        assert {
            name: (item.value, item.source.rpartition("/")[2]) for name, item in settings.declared.items()
        } == {
            "base_output_directory": (str(runs), "base.yml"),
            "run_name": ("x", "mine.yml"),
            "lora.lora_rank": (4, "base.yml"),
            "lora.enable_lora": (True, "mine.yml"),
            "steps": (7, "command line"),
        }

    def test_model_file_next_to_config_is_read(self, tmp_path):
        self.write(tmp_path, base="model_name: llama3.1-8b\n", models__llama3="")
        (tmp_path / "models" / "llama3.1-8b.yml").write_text("vocab_size: 256\n")
        settings = merge_settings(parse_command([str(tmp_path / "base.yml")]), {})
        assert settings["vocab_size"].value == 256
        assert settings["vocab_size"].source == str(tmp_path / "models" / "llama3.1-8b.yml")

    def test_environment_variables_override_settings(self, runs, monkeypatch):
        monkeypatch.setenv("M_RUN_NAME", "x")
        result = resolve(base_output_directory=runs)
        assert result.step == 1
        assert [setting.source for setting in result.settings] == ["environment", "command line"]
        assert "by M_RUN_NAME, and MaxText refuses both" in texts(resolve(run_name="x"))
        monkeypatch.setenv("M_SCAN_LAYERS", "false")
        assert "scan_layers is false (environment)" in texts(resolve(base_output_directory=runs))

    @pytest.mark.parametrize(
        ("content", "error", "what"),
        [
            ("a: [", FormatError, "not a YAML file"),
            ("- a\n", ConfigError, "not a MaxText configuration"),
            ("base_config: absent.yml\n", StorageError, "absent.yml"),
            ("base_config: bad.yml\n", ConfigError, "in a cycle"),
            ("\x00", FormatError, "not a YAML file"),
            ("!!python/object:os.system {}\n", FormatError, "not a YAML file"),
        ],
    )
    def test_invalid_files_are_refused(self, tmp_path, content, error, what):
        self.write(tmp_path, bad=content)
        with pytest.raises(error, match=what):
            resolve(tmp_path / "bad.yml")

    def test_interpolations_are_noted(self, tmp_path):
        self.write(tmp_path, mine="run_name: ${oc.env:USER}\n")
        assert "run_name contains ${…}" in " ".join(resolve(tmp_path / "mine.yml").notes)


class TestLocalDirectories:
    def persistent(self, tmp_path):
        shutil.copytree(ORBAX / "emergency" / "persistent", tmp_path / "x" / "checkpoints")
        emergency = {"enable_emergency_checkpoint": True, "local_checkpoint_period": 5}
        return {**emergency, "base_output_directory": tmp_path, "run_name": "x"}

    def test_later_local_step_takes_precedence(self, tmp_path):
        declared = self.persistent(tmp_path)
        result = resolve(**declared, local_checkpoint_directory=str(ORBAX / "emergency" / "local_host2"))
        assert (result.rule, result.step) == ("resume", 3)
        assert result.path.endswith("local_host2/3/state")
        assert "only on this host" in " ".join(result.notes)

    def test_missing_local_disk_is_noted(self, tmp_path):
        declared = self.persistent(tmp_path)
        result = resolve(**declared, local_checkpoint_directory="/no/such/disk", scan_layers=False)
        assert (result.step, result.path.rpartition("/")[2]) == (2, "default")
        assert "each host has its own" in " ".join(result.notes)
        assert not result.loads

    def test_gpu_processes_have_separate_directories(self, tmp_path):
        declared = self.persistent(tmp_path)
        shutil.copytree(ORBAX / "emergency" / "local_host2", tmp_path / "local" / "1")
        result = resolve(**declared, local_checkpoint_directory=tmp_path / "local")
        assert (result.step, result.path) == (3, f"{tmp_path}/local/1/3/state")

    def test_plain_steps_are_ignored_by_the_emergency_manager(self, runs):
        declared = {"enable_emergency_checkpoint": True, "local_checkpoint_period": 5}
        declared |= {"base_output_directory": runs, "run_name": "x"}
        result = resolve(**declared, local_checkpoint_directory="/no/such/disk")
        assert "but has no complete item state or default, only items" in texts(result)
        assert "turn emergency checkpointing off" in hints(result)

    def test_multi_tier_uses_only_the_local_disk(self, tmp_path):
        declared = {
            "enable_multi_tier_checkpointing": True,
            "local_checkpoint_period": 5,
            "multi_tier_checkpointing_backup_interval_minutes": 30,
        }
        there = resolve(**declared, local_checkpoint_directory=str(ORBAX / "replicator" / "local_host1"))
        assert (there.rule, there.step) == ("resume", 2)
        gone = resolve(**declared, local_checkpoint_directory="/no/such/disk")
        assert gone.outcome == "unknown"
        assert "the disks of the hosts" in gone.verdict


class TestAdapters:
    def adapter(self, tmp_path, *above):
        rules = "".join(
            f'[[rules]]\nfrom = "params.params.decoder.layers.self_attention.{name}.kernel"\n'
            f'to = "{".".join((*above, "decoder.layers.self_attention", name))}.kernel_lora_a.value"\n'
            for name in ("query", "key")
        )
        (tmp_path / "rules.toml").write_text(rules)
        ckpttools.select(SCANNED, tmp_path / "some", keep="*self_attention.[qk]*")
        ckpttools.remap(tmp_path / "some", tmp_path / "adapter", map=tmp_path / "rules.toml")
        return next((tmp_path / "adapter").rglob("_METADATA")).parent

    def test_adapters_are_found_in_their_directory(self, tmp_path):
        item = self.adapter(tmp_path)
        base = {"load_parameters_path": str(SCANNED)}
        result = resolve(**base, lora={"enable_lora": True, "lora_restore_path": str(item)})
        assert result.loads
        assert (result.adapter.rule, result.adapter.path) == ("lora_restore_path", str(item))
        off = resolve(**base, lora={"lora_restore_path": str(item)})
        assert not off.loads
        assert "lora.enable_lora is false" in texts(off.adapter)

    def test_adapters_outside_their_directory_are_not_found(self, tmp_path):
        item = self.adapter(tmp_path, "params", "params")
        lora = {"enable_lora": True, "lora_restore_path": str(item)}
        assert "looks for adapters below decoder" in texts(resolve(lora=lora).adapter)
        assert "there are none" in texts(resolve(lora=lora | {"lora_restore_path": str(SCANNED)}).adapter)
        assert "only adapters" in texts(resolve(load_parameters_path=str(item)))

    def test_settings_of_other_programs_are_ignored(self):
        result = resolve(
            load_parameters_path=SCANNED, hf_lora_adapter_path="a/b", lora_input_adapters_path="c"
        )
        assert sum("training ignores it" in note for note in result.notes) == 2


class TestBuckets:
    @pytest.fixture
    def cloud(self, gcs_server):
        with google(gcs_server) as cloud:
            yield cloud

    @BOTH
    def test_step_without_commit_file_is_skipped(self, cloud, maxtext):
        files = files_in(TRAINED)
        later = {name.replace("1/", "2/", 1): content for name, content in files.items()}
        del later["2/commit_success.txt"]
        out = cloud.filled({f"x/checkpoints/{name}": item for name, item in (files | later).items()})
        result = resolve(maxtext=maxtext, base_output_directory=str(out), run_name="x")
        assert (result.step, result.loads) == (1, True)
        assert result.rules[0].result == "1 step, the latest 1; 2 is skipped: no commit_success.txt"
        assert result.path == f"{out}/x/checkpoints/1/items"

    def test_adapter_without_base_uses_random_parameters(self, cloud):
        files = {name: item for name, item in files_in(TRAINED).items() if name != "1/commit_success.txt"}
        out = cloud.filled({f"x/checkpoints/{name}": item for name, item in files.items()})
        result = resolve(base_output_directory=str(out), run_name="x")
        assert (result.outcome, result.verdict) == ("scratch", NOTHING_FOUND_TEXT)
        assert "1 is skipped: no commit_success.txt" in result.rules[0].result

    @pytest.mark.parametrize(("maxtext", "missing"), [("e591f30", "0/items"), ("0.2.5", "0")])
    def test_path_without_item_is_refused(self, cloud, maxtext, missing):
        files = files_in(SCANNED.parents[1])
        for level in ("0", "0/items"):
            files[f"{level}/commit_success.txt"] = b""
        path = str(cloud.filled(files) / "0" / "items")
        assert resolve(maxtext=maxtext, load_parameters_path=path).loads
        del files[f"{missing}/commit_success.txt"]
        result = resolve(maxtext=maxtext, load_parameters_path=str(cloud.filled(files) / "0" / "items"))
        assert "has no commit_success.txt" in texts(result)

    def test_bucket_conversion_loads_from_bucket(self, cloud, tmp_path):
        """A conversion has all commit files, so that a plain copy of it is found."""
        write_llama(tmp_path / "hf")
        ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "out")
        path = str(cloud.filled(files_in(tmp_path / "out")) / "0" / "items")
        for maxtext in VERSIONS:
            assert resolve(maxtext=maxtext, load_parameters_path=path).loads

    def test_resolve_makes_few_requests(self, cloud):
        files = files_in(TRAINED)
        out = cloud.filled({f"x/checkpoints/{name}": item for name, item in files.items()})
        cloud.server.log.clear()
        resolve(base_output_directory=str(out), run_name="x")
        assert len(cloud.server.log) <= 12


NAMES = st.sampled_from(["0", "7", "12", "007", "step_3", "3.orbax-checkpoint-tmp", "best", "1e3", "٣"])


class TestSteps:
    @given(st.dictionaries(NAMES, st.booleans()))
    def test_step_names_decide_committed_steps(self, names):
        """What is in a directory does not matter to Orbax, where renaming is atomic."""
        run = parse(f"memory://runs/{next(NUMBERS)}")
        for name, is_whole in names.items():
            (run / name / ("_METADATA" if is_whole else "other")).put(b"{}")
        seen = list_committed_steps(run)
        assert set(seen.steps) == {int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)}
        assert seen.latest == max(seen.steps, default=None)
        assert not set(map(str, seen.steps)) & set(seen.skipped)

    def test_memory_store_is_supported(self):
        ckpttools.convert(TRAINED, "memory://resolve/out/x/checkpoints/5", format="orbax", item="items")
        result = resolve(base_output_directory="memory://resolve/out", run_name="x")
        assert result.rule == "resume"


class TestCommandLine:
    def test_output_lists_steps(self, runs):
        result = succeed("resolve", f"base_output_directory={runs}", "run_name=x", "scan_layers=true")
        lines = result.output.splitlines()
        assert lines[0] == f"MaxText {NEWEST}: loads step 1 of the run itself"
        assert lines[1].split() == ["from", f"{runs}/x/checkpoints/1/items"]
        assert "1 step, the latest 1" in " ".join(map(str.strip, lines))
        assert lines[-2:] == [
            "  run_name=x  (command line)",
            f"  base_output_directory={runs}  (command line)",
        ]

    def test_json_output_equals_the_report(self, runs):
        words = [f"base_output_directory={runs}", "run_name=x"]
        text = json.dumps(resolve(*words), default=lambda item: {n: getattr(item, n) for n in item.__slots__})
        printed = json.loads(succeed("resolve", *words, "--json").stdout)
        assert printed == {"schema": 1, **json.loads(text)}

    @pytest.mark.parametrize(
        ("words", "code", "declared"),
        [
            ("", 2, "No run is described"),
            ("python3 -m MaxText.train base.yml run_name=absent", 1, NOTHING_FOUND_TEXT),
            (
                "X=1 env Y=2 python3.12 -u -m maxtext.trainers.pre_train.train run_name=absent",
                1,
                NOTHING_FOUND_TEXT,
            ),
            (
                "python3 MaxText/train.py run_name=absent --maxtext e591f30 --requests 3",
                1,
                NOTHING_FOUND_TEXT,
            ),
            ("--maxtxt 0.2.5 run_name=absent", 2, "-- python3 -m maxtext"),
            ("run_name=absent", 1, NOTHING_FOUND_TEXT),
            (f"-- base.yml load_parameters_path={SCANNED}", 1, "cannot use it"),
            (f"load_parameters_path={UNSCANNED}", 1, "set scan_layers=false"),
            (f"load_parameters_path={UNSCANNED} scan_layers=false", 0, "loads the parameters of step 0"),
            ("absent.yml run_name=x", 2, "absent.yml does not exist"),
            ("--maxtext 0.1 run_name=x", 2, "is not one of"),
            ("checkpoint", 2, "load_parameters_path=checkpoint"),
            ("load_parameters_path=a load_full_state_path=b", 1, "refuses these settings"),
        ],
    )
    def test_outcomes_have_expected_exit_codes(self, words, code, declared, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        result = ckpt("resolve", *words.split())
        assert (result.exit_code, declared in result.output) == (code, True), result.output

    def test_adapters_have_a_separate_section(self, runs):
        words = [f"base_output_directory={runs}", "run_name=x", f"lora.lora_restore_path={SCANNED}"]
        result = ckpt("resolve", *words)
        assert result.exit_code == 1
        assert "LoRA: does not look for adapters" in result.output

    def test_report_has_a_readable_repr(self):
        assert repr(resolve(run_name="y")) == f"<Resolution by MaxText {NEWEST}: {NOTHING_FOUND_TEXT}>"


def test_every_default_has_a_checked_type():
    assert all(isinstance(default, bool | str | int | float | None) for default in DEFAULTS.values())


def test_commands_of_the_page_work(gcs_server, tmp_path, monkeypatch):
    """Local ones one after the other; buckets hold what the page's own commands have made."""
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "models" / "llama")
    shutil.copytree(TRAINED, tmp_path / "out" / "llama" / "checkpoints")
    with google(gcs_server) as cloud:
        cloud.server.buckets.pop("my-bucket", None)
        cloud.server.put("my-bucket", "there", b"")
        lines = re.findall(
            r"^\$ (?:ckpt|gcloud storage cp) .*$", (DOCS / "maxtext.md").read_text(), re.MULTILINE
        )
        assert len(lines) >= 10
        for line in lines:
            words = shlex.split(line.replace("$PWD", str(tmp_path)))[1:]
            if words[0] == "gcloud":
                source, target = words[-2:]
                key = target.removeprefix("gs://my-bucket/").rstrip("/")
                for name, content in files_in(tmp_path / source).items():
                    cloud.server.put("my-bucket", f"{key}/{source.rpartition('/')[2]}/{name}", content)
            else:
                succeed(*words[1:])
