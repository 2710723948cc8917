"""Packages that ckpttools needs only for some functions, and the extra that installs each."""

from __future__ import annotations

from importlib.util import find_spec

from ckpttools.core.errors import MissingPackageError

_EXTRAS = {
    "boto3": "cloud",
    "botocore": "cloud",
    "obstore": "cloud",
    "jax": "jax",
    "jaxlib": "jax",
    "orbax": "jax",
    "resvg_py": "plot",
    "textual": "browse",
}
_PROJECTS = {"orbax": "orbax-checkpoint", "resvg_py": "resvg-py"}


def require_package(package: str, purpose: str) -> None:
    """Check that a package is installed.

    Args:
        package: Name that Python imports.
        purpose: Subject of the message, such as "gs://".

    Raises:
        MissingPackageError: The package is not installed; the hint is the command that installs it.
    """
    if find_spec(package) is None:
        project = _PROJECTS.get(package, package)
        raise MissingPackageError(
            f"{purpose} needs the Python package {project}, which is not installed", hint=_install(package)
        )


def missing_package(error: ModuleNotFoundError) -> MissingPackageError:
    """Return the error for a failed import of a package of ckpttools, or of a module of the user."""
    package = (error.name or "").partition(".")[0]
    if package in _EXTRAS:
        project = _PROJECTS.get(package, package)
        return MissingPackageError(
            f"the Python package {project} is not installed", got=str(error), hint=_install(package)
        )
    return MissingPackageError(
        f"the Python package {package} is not installed" if package else "a Python package is not installed",
        got=str(error),
        hint="install ckpttools with its dependencies (pip install ckpttools), and the packages that your "
        "modules import",
    )


def _install(package: str) -> str:
    return f"pip install 'ckpttools[{_EXTRAS[package]}]'" if package in _EXTRAS else f"pip install {package}"
