"""Load a family from a user's file: TOML, or Python with `FAMILY = Family(...)`."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from traceback import extract_tb

from ckpttools.core.errors import FormatError, MappingError, UsageError, system_error
from ckpttools.core.user_code import check_code
from ckpttools.mapping.documents import add_location
from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import SUFFIXES
from ckpttools.model_families.toml_read import family_from_toml

_NAME = "FAMILY"


def family_from_file(path: Path) -> Family:
    """Load a family from a file. Python files are executed; TOML files are only parsed.

    Raises:
        StorageError: The file cannot be read.
        UsageError: The file is neither TOML nor Python.
        CodeNotAllowedError: Only a plan, not the user, names the Python file.
        FormatError: The file is not valid TOML, or running it fails. The message names the line.
        MappingError: The file does not describe a family.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError("a family is described in a file that ends in .toml or .py", got=path)
    if path.suffix == ".py":
        check_code("family", str(path))
    content = _content(path)
    family = family_from_toml(content, str(path)) if path.suffix == ".toml" else _run(path)
    for scan_axis in (None, 1):
        with add_location(str(path)):
            family.all_rows(scan_axis)
    return family


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise system_error("cannot read", path, error, "check the path") from error
    except UnicodeDecodeError as error:
        raise FormatError("not a text file in UTF-8", location=path, got=error) from error


def _run(path: Path) -> Family:
    """Run a Python file and return its FAMILY."""
    try:
        names = run_path(str(path), run_name="ckpttools_family_file")
    except MappingError as error:
        with add_location(_line(error, path)):
            raise
    except (Exception, SystemExit) as error:
        got = f"{type(error).__name__}: {error}"
        raise FormatError("running the file fails", location=_line(error, path), got=got) from error
    family = names.get(_NAME)
    if isinstance(family, Family):
        return family
    family_names = [name for name, value in names.items() if isinstance(value, Family)]
    got = (
        f"{_NAME} of type {type(family).__name__}"
        if _NAME in names
        else ", ".join(family_names) or "no family"
    )
    raise MappingError(
        "the file does not define a family", location=path, got=got, expected=f"{_NAME} = Family(...)"
    )


def _line(error: BaseException, path: Path) -> str:
    """Return the file name with the line at which running the file failed."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    return f"{path}, line {lines[-1]}" if lines else str(path)
