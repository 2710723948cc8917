"""Whether transformers takes what `ckpttools.families.silent` says, where a configuration says nothing.

Of each `model_type` the default configuration is made, and each field looked up in it. Of each model of the
oracle every field that rows depend on is left out, one at a time, and what transformers then takes is
compared with `fixtures/silent.json`, or written there with --write. Exits with 1 where one is another.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parents[2] / "fixtures" / "silent.json"
REFUSED = "refused"


def asked() -> Mapping[str, Any]:
    """Types, each with its fields and values as we have them; and cases, with the fields to leave out."""
    from ckpttools.families.registry import families, family_of
    from ckpttools.families.silent import compared_values
    from oracle.cases import configurations

    known = {each for family in families().values() for each in family.model_types}
    types = {each: compared_values(each) for each in sorted(known)}
    configs = {case: json.loads(file.read_bytes()) for case, file in configurations().items()}
    cases = {
        case: {"config": config, "fields": sorted(decisive(family_of(config, case), config))}
        for case, config in configs.items()
    }
    return {"types": {each: fields for each, fields in types.items() if fields}, "cases": cases}


def decisive(family: Any, config: Mapping[str, Any]) -> set[str]:
    """The fields of a configuration that sizes or flags of a family are read from."""
    names = {each for fields in family.sizes.values() for each in fields if isinstance(each, str)}
    names |= {each for rule in (*family.flags.values(), *family.others.values()) for each in rule.field}
    plain = {".".join(key for key in each.split(".") if not key.startswith("#")) for each in names}
    return {each for each in plain - {"model_type"} if _states(config, each)}


def compared() -> Mapping[str, Any]:
    """Reads what is asked as JSON, says what transformers has otherwise, and gives its answers."""
    from transformers import CONFIG_MAPPING, AutoConfig

    question = json.load(sys.stdin)
    odd = []
    for model_type, fields in question["types"].items():
        config = AutoConfig.for_model(model_type).to_dict()
        for name, value in fields.items():
            if "_config." in name and name.partition(".")[0] not in config.get("thinker_config", config):
                continue  # a text model alone, which has no tower
            found = [each for each in _found(config, name) if each is not None]
            if found[:1] != [value] and not (not found and "_config." in name):
                odd.append(f"{model_type}: {name} is {found[:1]}, not {value}")
    cases = {
        case: {name: _without(CONFIG_MAPPING, each["config"], name) for name in each["fields"]}
        for case, each in question["cases"].items()
        if each["config"]["model_type"] in CONFIG_MAPPING
    }
    return {"odd": odd, "cases": cases}


def _without(classes: Any, config: Mapping[str, Any], name: str) -> Any:
    """What transformers takes for a field that is left out, or that it refuses."""
    silent = copy.deepcopy(config)
    *parents, last = name.split(".")
    inner = silent
    for parent in parents:
        inner = inner[parent]
    del inner[last]
    try:
        found = classes[config["model_type"]].from_dict(silent)
    except Exception:  # of whichever kind
        return REFUSED
    for key in name.split("."):
        found = found.get(key) if isinstance(found, dict) else _attribute(found, key)
    return found


def _attribute(config: Any, key: str) -> Any:
    # What layers may have each for themselves is no attribute.
    there = vars(config)
    return there[key] if key in there else getattr(config, key, None)


def _found(config: Mapping[str, Any], name: str) -> Iterator[Any]:
    """A field in each part that may have it, the text model first; how heads are tied, of the whole."""
    thinker = config.get("thinker_config", config)
    parts = (thinker.get("text_config", {}), thinker, config)
    for part in parts[1:] if name == "tie_word_embeddings" else parts:
        rope = part.get("rope_parameters") or {}
        first, _, last = name.partition(".")
        if first == "rope":
            own = rope.get("full_attention", rope)
            yield own.get({"theta": "rope_theta", "type": "rope_type"}.get(last, last))
        elif last:
            yield (part.get(first) or {}).get(last)
        else:
            # Experts have two names.
            yield part.get(first, part.get("num_experts" if first == "num_local_experts" else first))


def _states(config: Mapping[str, Any], name: str) -> bool:
    first, _, rest = name.partition(".")
    inner = config.get(first)
    return first in config and (not rest or (isinstance(inner, Mapping) and _states(inner, rest)))


def main() -> int:
    """Asks, and hands on."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from oracle import environments

    command = [environments.found().torch, __file__, "--within"]
    ended = subprocess.run(
        command, input=json.dumps(asked()), text=True, stdout=subprocess.PIPE, check=True
    ).stdout
    answer = json.loads(ended.splitlines()[-1])
    if "--write" in sys.argv:
        ANSWERS.write_text(json.dumps(answer["cases"], indent=1, sort_keys=True) + "\n")
    print("\n".join(answer["odd"]))
    same = json.loads(ANSWERS.read_bytes()) == answer["cases"]
    if not same:
        print(f"{ANSWERS} says otherwise: --write puts down what transformers takes")
    return 0 if same and not answer["odd"] else 1


if __name__ == "__main__":
    if "--within" in sys.argv:
        print(json.dumps(compared()))
    else:
        sys.exit(main())
