"""Whether transformers takes what `ckpttools.maxtext.config.silent` says, where a configuration says nothing.

Of each `model_type` the default configuration is made, and each field looked up in it. Exits with 1 where one
is another.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def asked() -> Mapping[str, Mapping[str, Any]]:
    """Type of a model -> field -> value, of all types of which something is said."""
    from ckpttools.families.registry import families
    from ckpttools.maxtext.config.silent import taken

    types = {each for family in families().values() for each in family.model_types}
    return {each: taken(each) for each in sorted(types) if taken(each)}


def compared() -> int:
    """Reads what is asked as JSON, and says what transformers has otherwise."""
    from transformers import AutoConfig

    odd = 0
    for model_type, fields in json.load(sys.stdin).items():
        config = AutoConfig.for_model(model_type).to_dict()
        for name, value in fields.items():
            if "_config." in name and not {"text_config", "thinker_config"} & config.keys():
                continue  # a text model alone, which has no tower
            found = [each for each in _found(config, name) if each is not None]
            if not found or found[0] != value:
                odd += 1
                print(f"{model_type}: {name} is {found[:1]}, not {value}")
    return min(odd, 1)


def _found(config: Mapping[str, Any], name: str) -> Iterator[Any]:
    """A field in each part that may have it, the text model first."""
    thinker = config.get("thinker_config", config)
    for part in (thinker.get("text_config", {}), thinker, config):
        rope = part.get("rope_parameters") or {}
        first, _, last = name.partition(".")
        if first == "rope":
            own = rope.get("full_attention", rope)
            yield own.get({"theta": "rope_theta", "type": "rope_type"}.get(last, last))
        else:
            yield part.get(first, {}).get(last) if last else part.get(first)


def main() -> int:
    """Asks, and hands on."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from oracle import environments

    command = [environments.found().torch, __file__, "--within"]
    return subprocess.run(command, input=json.dumps(asked()), text=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(compared() if "--within" in sys.argv else main())
