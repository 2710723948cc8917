"""Parse YAML like OmegaConf, and therefore MaxText, does."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no annotations
    """A YAML loader like OmegaConf's: 1e-3 is a number, and a date is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in result if not tag.endswith(":timestamp")]
    for first, result in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+|[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)"),
    list("-+0123456789."),
)


def load_yaml(text: str) -> Any:
    """Parse a YAML text like OmegaConf does.

    Raises:
        ValueError: The text is not valid YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    except (RecursionError, ValueError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
