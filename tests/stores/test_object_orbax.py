"""What is written to buckets, as Orbax and tensorstore see it: whole, and at each stage before."""

from __future__ import annotations

from typing import Any

import pytest
import tensorstore as ts
from support.command_line import ckpt, run
from support.gcs_server import Fault
from support.golden_data import described, golden_leaves, leaves_by_package
from support.locations import HF, TRAINED
from support.object_stores import amazon, google
from support.scripts import answers

import ckpttools

# What is put last, in this order, after the data: the request that fails.
STAGES = {
    "data": r"(PUT|POST) .*/d/data",
    "small-files": r"PUT .*/_METADATA",
    "item": r"PUT .*/0/items/commit_success\.txt",
    "step": r"PUT .*/0/commit_success\.txt",
}


# Orbax has the step as a number of its own.
EXPECTED = {path: leaf for path, leaf in golden_leaves("llama3.1", scan=True).items() if path != "step"}


@pytest.fixture(scope="module")
def seen(gcs_server, tmp_path_factory):
    """What Orbax makes of a checkpoint that is whole, of those that were stopped, and of one that went on."""
    with google(gcs_server) as cloud, pytest.MonkeyPatch.context() as patch:
        cloud.filled({"a": b""})
        where = {name: f"gs://{cloud.bucket}/runs/{name}" for name in ("whole", "went-on", *STAGES)}
        run("convert", "hf-to-maxtext", HF, where["whole"])
        for name, request in {**STAGES, "went-on": STAGES["step"]}.items():
            cloud.server.faults = [Fault(request, count=99, status=400, body="<Error/>")]
            assert ckpt("convert", "hf-to-maxtext", HF, where[name]).exit_code == 5
            cloud.server.faults = []
        run("convert", "hf-to-maxtext", HF, where["went-on"])
        # tensorstore asks this before it goes without credentials.
        patch.setenv("GCE_METADATA_ROOT", gcs_server.url.removeprefix("http://"))
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", gcs_server.url)
        # Orbax over obstore and tensorstore ended without a word once, in a busy run of all tests.
        directory = tmp_path_factory.mktemp("orbax")
        declared = answers("orbax_gs_script", list(where.values()), directory, attempts=2)
        yield {name: declared[location] for name, location in where.items()}


class TestOrbax:
    @pytest.mark.parametrize("name", ["whole", "went-on"])
    def test_orbax_lists_and_restores_the_output(self, seen, name):
        assert seen[name]["steps"] == [0]
        for loader in ("manager", "item", "step_by_v1"):
            assert _without_step(seen[name][loader]) == EXPECTED, loader

    @pytest.mark.parametrize("stage", STAGES)
    def test_orbax_lists_no_step_before_the_last_file(self, seen, stage):
        assert seen[stage]["steps"] == []
        assert isinstance(seen[stage]["step_by_v1"], str), "v1 refuses"

    @pytest.mark.parametrize("stage", ["data", "small-files", "item"])
    def test_orbax_restores_nothing_before_the_item_commit_file(self, seen, stage):
        assert isinstance(seen[stage]["item"], str)

    def test_item_is_complete_before_the_step_commit_file(self, seen):
        assert _without_step(seen["step"]["item"]) == EXPECTED


class TestTensorstore:
    """Orbax does not open s3://, so its arrays are read there by what it reads them with."""

    @pytest.fixture
    def amazon_cloud(self, s3_server):
        with amazon(s3_server) as cloud:
            cloud.filled({"a": b""})
            yield cloud, s3_server

    def test_tensorstore_reads_ocdbt_on_s3(self, amazon_cloud):
        cloud, url = amazon_cloud
        run("convert", "hf-to-maxtext", HF, f"s3://{cloud.bucket}/out")
        base = _on_s3(cloud.bucket, "out/0/items/", url)
        kvstore = {"driver": "ocdbt", "base": base}
        keys = ts.KvStore.open(kvstore).result().list().result()
        names = sorted(key.decode().removesuffix("/zarr.json") for key in keys if key.endswith(b"/zarr.json"))
        result = {name.replace(".", "/"): _read({**kvstore, "path": f"{name}/"}) for name in names}
        assert _without_step(result) == {
            path: leaf for path, leaf in EXPECTED.items() if isinstance(leaf, dict)
        }

    def test_tensorstore_reads_zarr3_on_s3(self, amazon_cloud):
        cloud, url = amazon_cloud
        location = f"s3://{cloud.bucket}/zarr"
        run("convert", "to-zarr3", TRAINED, location)
        expected = leaves_by_package(ckpttools.open(location))
        for name in [name for name, leaf in expected.items() if isinstance(leaf, dict)][:5]:
            assert _read(_on_s3(cloud.bucket, f"zarr/{name}/", url)) == expected[name]


def _without_step(leaves: Any) -> Any:
    return (
        {path: leaf for path, leaf in leaves.items() if path != "step"}
        if isinstance(leaves, dict)
        else leaves
    )


def _on_s3(bucket: str, path: str, url: str) -> dict[str, Any]:
    where = {"endpoint": url, "aws_region": "us-east-1"}
    return {"driver": "s3", "bucket": bucket, "path": path, **where}


def _read(kvstore: dict[str, Any]) -> dict[str, Any]:
    """One array, of which no chunk may be missing."""
    spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
    return described(ts.open(spec, open=True, read=True).result().read().result())
