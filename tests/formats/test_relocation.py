"""Places as another machine has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttools.stores.relocation import Relocation

HERE = Relocation.of(["/data=/mnt/x"])


@pytest.mark.parametrize(
    ("declared", "meant"),
    [
        ("Writer(path='/mnt/x/a/b')", "Writer(path='/data/a/b')"),
        ("Writer(path='/mnt/x')", "Writer(path='/data')"),
        ("/mnt/x.old /mnt/x-2 /mnt/xy", "/mnt/x.old /mnt/x-2 /mnt/xy"),
        ("/home/mnt/x/a gs://b/mnt/x", "/home/mnt/x/a gs://b/mnt/x"),
    ],
)
def test_path_prefixes_are_mapped_back(declared, meant):
    assert HERE.back(declared) == meant


def test_paths_round_trip():
    assert HERE.there("/data/a") == "/mnt/x/a" and HERE.there("/database") == "/database"
    assert Relocation.of({"/data": "x"}).there("/data/a") == f"{Path.cwd()}/x/a"
    assert Relocation.of("/data=gs://b/x").there("/data/a") == "gs://b/x/a"
