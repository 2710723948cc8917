"""What looks, from Python: of paths and of trees, the same as the command line prints, and short."""

import json
import subprocess
import sys

import pytest
from support.command_line import ckpt
from support.hf_models import write_llama
from support.internals import Sharding
from support.trees import tree_of

import ckpttools
from ckpttools import CheckpointError, ToMaxText, UsageError, plan_to_maxtext
from ckpttools.cli.diff import _to_plain
from ckpttools.cli.output import print_json
from ckpttools.formats import known_formats, registry
from ckpttools.formats.base import OtherSteps


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A Hugging Face model, what it is in MaxText, stacked and not, and another one of its kind."""
    root = tmp_path_factory.mktemp("models")
    write_llama(root / "hf", num_hidden_layers=2)
    write_llama(root / "other", num_hidden_layers=2, seed=1)
    plan_to_maxtext(root / "hf").run(root / "stacked")
    plan_to_maxtext(root / "hf", ToMaxText(scan=False)).run(root / "unstacked")
    return root


def printed(*arguments, code=0):
    """What the command line prints as JSON."""
    result = ckpt(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def as_json(report, capsys):
    capsys.readouterr()
    print_json(_to_plain(report))
    return json.loads(capsys.readouterr().out)


def short(report, *words):
    text = repr(report)
    assert len(text.splitlines()) < 20 and all(word in text for word in words), text
    assert "nbytes=" not in text
    return True


def both(function, path, *more, **options):
    """What it says of a path as text, which is the same as of the tree."""
    of_path = function(str(path), *more, **options)
    assert function(ckpttools.open(path), *more, **options) == of_path
    return of_path


class TestCallsMatchCommands:
    def test_inspect_call_matches_the_command(self, models, capsys):
        report = both(ckpttools.inspect, models / "stacked", filter="*mlp*", sort="size", against="llama")
        declared = as_json(report, capsys)
        options = ("--filter", "*mlp*", "--sort", "size", "--against", "llama")
        shown = printed("inspect", "tree", models / "stacked", *options)
        assert shown.pop("subtrees")
        assert shown == declared
        assert report.comparison.is_same
        assert short(report, "stacked-inference", "3 arrays", "mlp/wi_{0..1}/kernel: bfloat16[64, 2, 128]")

    def test_inspect_call_reports_differences(self, models):
        tree = ckpttools.open(models / "hf")
        assert ckpttools.inspect(tree, against=tree).comparison.is_same
        assert not ckpttools.inspect(tree, against=models / "stacked").comparison.is_same
        assert ckpttools.inspect(tree).comparison is None

    def test_stats_call_matches_the_command(self, models, capsys):
        report = both(ckpttools.stats, models / "stacked", filter="*mlp*", per_layer=True, sort="norm")
        options = ("--filter", "*mlp*", "--per-layer", "--sort", "norm")
        assert printed("inspect", "stats", models / "stacked", *options) == as_json(report, capsys)
        assert report.finite
        assert short(report, "3 arrays", "0 NaN")

    def test_chunks_call_matches_the_command(self, models, capsys):
        report = both(ckpttools.chunks, models / "stacked", mesh="8", spec="axis0")
        declared = as_json(report, capsys)
        shown = printed("inspect", "chunks", models / "stacked", "--mesh", "8", "--spec", "axis0")
        schema = declared.pop("schema")
        assert shown == {"schema": schema, "advice": declared.pop("advice"), "report": declared}
        assert short(report, "13 arrays", "does not divide")

    def test_report_call_matches_the_command(self, models, tmp_path, capsys):
        page = both(ckpttools.report, models / "hf", stats=False)
        assert page.output is None
        assert "<!doctype html" in page.html.lower()
        written = ckpttools.report(models / "hf", tmp_path / "page.html", stats=False)
        assert (tmp_path / "page.html").read_text() == written.html == page.html
        declared = as_json(written, capsys)
        del declared["html"]
        output = ("--output", tmp_path / "page.html", "--overwrite", "--no-stats")
        assert printed("inspect", "report", models / "hf", *output) == declared
        assert short(page, "<Page of 21 arrays", "not written")

    def test_diff_call_matches_the_command(self, models, capsys):
        options = {"filter": "*mlp*", "rtol": 1e-3, "explain": False}
        report = ckpttools.diff(models / "hf", str(models / "other"), **options)
        trees = (ckpttools.open(models / name) for name in ("hf", "other"))
        assert ckpttools.diff(*trees, **options) == report
        asked = ("--filter", "*mlp*", "--rtol", "1e-3", "--no-explain")
        assert printed("diff", models / "hf", models / "other", *asked, code=1) == as_json(report, capsys)
        assert not report.equal
        assert short(report, "different: 6 differs", "layers.{0..1}", "max abs")
        assert ckpttools.diff(models / "hf", models / "stacked").equal

    def test_verify_call_matches_the_command(self, models, capsys):
        report = both(ckpttools.verify, models / "stacked", models / "hf")
        shown = printed("verify", models / "stacked", "--against", models / "hf")
        assert shown == as_json(report, capsys)
        assert report.equal
        assert short(report, "equal, 21 arrays")
        other = ckpttools.verify(models / "stacked", ckpttools.open(models / "other"))
        assert not other.equal
        assert short(other, "different", ": values")

    def test_hash_call_matches_the_command(self, models, tmp_path, capsys):
        manifest = tmp_path / "manifest.json"
        report = both(ckpttools.hash, models / "stacked", parameters=True)
        shown = printed("hash", models / "stacked", "--parameters", "--manifest", manifest)
        assert shown == as_json(report, capsys)
        assert short(report, f"xxh3-128 {report.digest} of 21 arrays")
        assert ckpttools.verify(str(models / "unstacked"), manifest=manifest).equal
        converted = ckpttools.hash(models / "hf", names="maxtext", manifest=tmp_path / "as_maxtext.json")
        assert converted.parameters == report.parameters
        assert ckpttools.verify(models / "unstacked", manifest=str(tmp_path / "as_maxtext.json")).equal

    def test_doctor_call_matches_the_command(self, models, capsys):
        report = ckpttools.doctor(str(models / "stacked"))
        assert printed("doctor", models / "stacked") == as_json(report, capsys)
        assert report.healthy
        assert short(report, "no errors, values not read")
        item = ckpttools.open(models / "stacked")
        assert ckpttools.doctor(item).path == item.metadata.location

    def test_families_call_matches_the_command(self, capsys):
        known = ckpttools.families()
        assert printed("families") == as_json(known, capsys)
        assert short(known, "<FamilySummary llama: llama>")
        checked = ckpttools.check_family("llama")
        assert checked.sound
        assert short(checked, "FamilyCheck of llama: sound")


def test_plans_and_reports_have_one_line_reprs(models, tmp_path):
    stacked, out = str(models / "stacked"), tmp_path / "out"
    prepared, copy = ckpttools.convert.plan(stacked, out, format="zarr3"), ckpttools.copy.plan(stacked, out)
    told = {
        f"<Plan of 13 arrays in {len(prepared.plan.tasks)} tasks: ": prepared.plan,
        "Prepared(orbax: 13 arrays, ": plan_to_maxtext(models / "hf"),
        f"<PreparedCopy: <CopyReport of {stacked} to {out}: 1 to be copied, ": copy,
        f"<CopyReport of {stacked} to {out}: 1 copied, ": copy.run(),
        f"<RunListing of {out}: 1 step, 1 finished": ckpttools.ls(out),
        f"<Summary of {out}: a run of one step>": ckpttools.summary(out),
        "<HostsListing of 1 save: step 0 is complete>": ckpttools.list_saves([out]),
        f"<PreparedPrune: <PruneReport of {out}: prune to be done: 1 kept, ": ckpttools.prune.plan(
            out, keep_last=1
        ),
        f"<PruneReport of {out}: prune: 1 kept, 0 bytes free>": ckpttools.prune(out, keep_last=1),
        f"<TrainingPlan of {stacked}: persistent checkpoints of ": ckpttools.plan_training(stacked, hosts=2),
    }
    for begins, item in told.items():
        assert repr(item).startswith(begins) and len(repr(item)) < 400, repr(item)


def test_observers_receive_progress(models):
    for look in (ckpttools.stats, ckpttools.hash, ckpttools.report):
        seen = []
        look(models / "hf", observe=lambda *each, seen=seen: seen.append(each))
        dones, totals = zip(*seen, strict=True)
        assert dones[0] == 0 and dones[-1] == totals[0] > 0
        assert list(dones) == sorted(dones) and len(set(totals)) == 1


def test_unambiguous_text_arguments_are_accepted(models):
    hf = models / "hf"
    assert ckpttools.stats(hf, memory="512MiB") == ckpttools.stats(hf, memory=1 << 29, jobs=1)
    refused = (
        (lambda: ckpttools.stats(hf, memory="much"), "`memory` cannot be this"),
        (lambda: ckpttools.stats(hf, sort="beauty"), "cannot sort by"),
        (lambda: ckpttools.diff(hf, hf, atol=float("nan")), "tolerance"),
        (lambda: ckpttools.hash(hf, names="mine"), "unknown kind of names"),
        (lambda: ckpttools.chunks(hf, mesh="8"), "requires a spec"),
        (lambda: ckpttools.inspect(ckpttools.open(hf), step=7), "step 7"),
        (lambda: ckpttools.inspect(hf, step=7), "step 7"),
    )
    for call, words in refused:
        with pytest.raises(UsageError, match=words):
            call()
    with pytest.raises(TypeError, match=r"^inspect\(\) got .* 'stepp': did you mean 'step'\?"):
        ckpttools.inspect(hf, stepp=7)


def test_errors_name_arguments_in_python_and_flags_on_the_command_line(models, tmp_path):
    page = tmp_path / "page.html"
    page.touch()
    write_llama(tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    calls = (
        (lambda: ckpttools.verify(models / "hf"), ("verify", models / "hf"), "against"),
        (
            lambda: ckpttools.report(models / "hf", page),
            ("inspect", "report", models / "hf", "-o", page),
            "overwrite",
        ),
        (
            lambda: ckpttools.hash(models / "hf", family="llama"),
            ("hash", models / "hf", "--family", "llama"),
            "as",
        ),
        (
            lambda: ckpttools.diff(models / "hf", models / "hf", filter="no"),
            ("diff", models / "hf", models / "hf", "--filter", "no"),
            "all",
        ),
        (
            lambda: ckpttools.check_family("llama", config=tmp_path),
            ("families", "check", "llama", "--config", tmp_path),
            "config",
        ),
        (
            lambda: ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt"),
            ("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "mt"),
            "tied keep",
        ),
    )
    for call, command, flag in calls:
        with pytest.raises(CheckpointError) as caught:
            call()
        assert "--" not in str(caught.value)
        assert f"--{flag}" in ckpt(*command).output


def test_format_plugins_report_their_shardings(monkeypatch):
    """A format of a plug-in tells what a checkpoint of Orbax does; one that does not is asked nothing."""

    class Telling:
        name = "telling"

        def shardings(self, tree):
            return dict.fromkeys(tree.arrays, Sharding("NamedSharding", (("data", 2),), (("data",),)))

        def other_steps(self, tree):
            return OtherSteps({"7": "no index"}, {})

    class Silent:
        name = "silent"

    known = {"telling": Telling(), "silent": Silent()}
    monkeypatch.setattr(known_formats, "formats", lambda: known)
    told = tree_of(("params", "kernel"), format="telling", location="/somewhere")
    report = ckpttools.inspect(told, sharding=True)
    assert report.arrays[0].sharding.mesh == (("data", 2),)
    assert [warning.name for warning in report.warnings] == ["unfinished-step"]
    silent = told.with_metadata(format="silent")
    assert registry.other_steps(silent) == OtherSteps({}, {})
    assert registry.stored_shardings(silent) == {}


def test_internal_modules_never_shadow_public_functions():
    code = """if True:
        import pkgutil, sys, ckpttools
        assert not {"numpy", "click", "jax"} & sys.modules.keys()
        first = ckpttools.families()
        rooms = {module.name for module in pkgutil.iter_modules(ckpttools.__path__)}
        assert not rooms & set(ckpttools.__all__)
        import ckpttools.model_families.registry, ckpttools.inspection.tree, ckpttools.api.prune
        assert ckpttools.families() == first
        assert ckpttools.prune.plan and callable(ckpttools.prune)
        assert callable(ckpttools.inspect) and not hasattr(ckpttools.inspect, "plan")
        """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
