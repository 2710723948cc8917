"""Wheels and source distributions: what they contain, and that two builds are equal."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from support.locations import ROOT

TOP = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore")


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Both distributions, built twice in copies whose files have other times."""
    result = []
    for number in range(2):
        work = tmp_path_factory.mktemp("build")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "ckpttools", work / "ckpttools", ignore=ignored, copy_function=shutil.copyfile)
        (work / "tests").mkdir()
        (work / "tests" / "test_x.py").write_text(f"# {number}")
        for name in TOP:
            shutil.copyfile(ROOT / name, work / name)
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build"], cwd=work, check=True, capture_output=True
        )
        result.append(sorted((work / "dist").iterdir()))
    return result


def test_two_builds_have_equal_bytes(builds):
    one, two = ({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in b} for b in builds)
    assert one == two
    assert [name.rpartition(".")[2] for name in one] == ["whl", "gz"]


def test_wheel_has_the_package_alone(builds):
    names = zipfile.ZipFile(builds[0][0]).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"ckpttools"}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "ckpttools").rglob("*.py")}
    assert package <= {*names}
    assert "ckpttools/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("__pycache__" in name or name.endswith(".pyc") for name in names)


def test_source_distribution_builds_without_tests(builds):
    with tarfile.open(builds[0][1]) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert tops == {*TOP, "PKG-INFO", "ckpttools"}
