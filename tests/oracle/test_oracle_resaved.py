"""What `ckpttools.save` and `ckpt reshard` write is taken up by MaxText itself, on eight devices."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.locations import HF
from support.scripts import answers

from oracle import environments, settings, steps
from oracle.worker import Worker

PYTHON = environments.present(environments.MAXTEXT)
pytestmark = pytest.mark.skipif(PYTHON is None, reason=f"no environment with MaxText: {environments.MAXTEXT}")
MESH = "fsdp=4,tensor=2"
CUT = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
STEPS, MORE_STEPS = 3, 5
WAYS = {
    "saved": {},
    "on another mesh": {"mesh": "data=2,fsdp=2,tensor=2"},
    "with its sharding": {"keep_sharding": True},
    "compressed": {"compression": "zstd"},
    "without an index": {"ocdbt": False},
}


@dataclass(frozen=True)
class Location:
    """Where MaxText works on one model."""

    directory: Path
    maxtext: Worker

    def settings(self, runs: str = "runs", **more):
        model = self.directory / "llama" / "hf"
        return settings.of(model, True, self.directory / runs, **CUT, **more)

    def checkpoint(self, runs: str, step: int) -> Path:
        return self.directory / runs / "run" / "checkpoints" / str(step)

    def train(self, runs: str, count: int, **more) -> str:
        """The digest of the whole state after so many steps."""
        asked = {**settings.TRAINED, "steps": count, "checkpoint_period": count - 1, **more}
        self.maxtext("training", settings=self.settings(runs, **asked))
        return self.maxtext("stored", item=self.checkpoint(runs, count - 1) / "items")


@pytest.fixture(scope="module")
def location(tmp_path_factory):
    """With a model that was converted, trained, and saved again in all ways."""
    directory = tmp_path_factory.mktemp("resaved")
    shutil.copytree(HF, directory / "llama" / "hf")
    steps.ckpt("convert", "hf-to-maxtext", HF, directory / "converted")
    with Worker(PYTHON, "in_maxtext", directory, devices=8) as maxtext:
        built = Location(directory, maxtext)
        built.train("runs", STEPS, load_parameters_path=directory / "converted" / "0" / "items")
        trained = built.checkpoint("runs", STEPS - 1)
        jobs = []
        for way, options in WAYS.items():
            how = {"level": "step", **options}
            mesh = how.pop("mesh", MESH)
            jobs.append([str(trained), str(built.checkpoint(way, STEPS - 1)), mesh, how])
            jobs.append([str(directory / "converted"), str(directory / "weights" / way / "0"), mesh, how])
        answers("resaved_script", jobs, directory)
        words = ("--level", "step", "--mesh", MESH, "--subchunks", "4KiB")
        steps.ckpt("reshard", trained, built.checkpoint("resharded", STEPS - 1), *words)
        steps.ckpt("reshard", directory / "converted", directory / "weights" / "resharded" / "0", *words)
        yield built


def digests(location, item):
    """Way of MaxText -> digest of the weights, or why it refuses."""
    return location.maxtext("loads", settings=location.settings(load_parameters_path=item))


@pytest.fixture(scope="module")
def loaded(location):
    return digests(location, location.directory / "converted" / "0" / "items")


@pytest.fixture(scope="module")
def gone_on(location):
    """The state after more steps of the run itself."""
    shutil.copytree(location.directory / "runs", location.directory / "itself")
    return location.train("itself", MORE_STEPS)


@pytest.mark.parametrize("way", [*WAYS, "resharded"])
def test_maxtext_loads_weights_in_every_way(location, loaded, way):
    assert all("digest" in item for item in loaded.values()), loaded
    assert digests(location, location.directory / "weights" / way / "0" / "items") == loaded


@pytest.mark.parametrize("way", [*WAYS, "resharded"])
def test_training_resumes_with_the_same_bits(location, gone_on, way):
    before = location.maxtext("stored", item=location.checkpoint("runs", STEPS - 1) / "items")
    assert location.maxtext("stored", item=location.checkpoint(way, STEPS - 1) / "items") == before
    assert location.train(way, MORE_STEPS) == gone_on
    assert not location.checkpoint(way, 0).exists(), "MaxText began anew"
