"""Compare `ckpttools.model_families.hf_defaults` with transformers: the meaning of absent config fields.

`fixtures/silent.json` has what transformers takes for each field of each model of the oracle that rows depend
on, if it is left out, and `fixtures/tied.json` whether it ties the output head; `--write` writes both. Exits
with 1 if an answer or a default of a configuration class differs.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[2] / "fixtures"
FILES = {"cases": FIXTURES / "silent.json", "tied": FIXTURES / "tied.json"}
REFUSED = "refused"
TIED = "tie_word_embeddings"
# Values of `TIED` in the whole model and in its text part; None: absent.
STATEMENTS = [(whole, text) for whole in (None, False, True) for text in (None, False, True)]


def asked() -> Mapping[str, Any]:
    """Return the defaults of all types, and the cases with the fields to leave out."""
    from ckpttools.model_families.hf_defaults import defaults_by_type
    from ckpttools.model_families.registry import family_of
    from oracle.cases import configurations

    configs = {case: json.loads(file.read_bytes()) for case, file in configurations().items()}
    cases = {
        case: {"config": config, "fields": sorted(decisive(family_of(config, case), config))}
        for case, config in configs.items()
    }
    return {"types": defaults_by_type(), "cases": cases}


def decisive(family: Any, config: Mapping[str, Any]) -> set[str]:
    """Return the stated fields of a configuration that sizes or flags of a family are read from."""
    names = {each for fields in family.sizes.values() for each in fields if isinstance(each, str)}
    names |= {each for rule in (*family.flags.values(), *family.others.values()) for each in rule.field}
    plain = {".".join(key for key in each.split(".") if not key.startswith("#")) for each in names}
    # Without the sizes of a single layer, the arrays show them.
    return {
        each
        for each in plain - {"model_type"}
        if _states(config, each) and ".per_layer_config." not in f".{each}"
    }


def stating(config: Mapping[str, Any], whole: bool | None, text: bool | None) -> dict[str, Any] | None:
    """Return a configuration with these values of `TIED`; None without the part that would have one."""
    made = json.loads(json.dumps(_without_key(config, TIED)))
    model = made.get("thinker_config", made)
    for part, value in ((model, whole), (model.get("text_config"), text)):
        if value is not None:
            if part is None:
                return None
            part[TIED] = value
    return made


def _without_key(value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _without_key(each, key) for name, each in value.items() if name != key}


def compared() -> Mapping[str, Any]:
    """Read the question as JSON; return the defaults that differ, and the answers of transformers."""
    from transformers import CONFIG_MAPPING, AutoConfig

    question = json.load(sys.stdin)
    odd = []
    for model_type, fields in question["types"].items():
        config = AutoConfig.for_model(model_type).to_dict()
        for name, value in fields.items():
            if "_config." in name and name.partition(".")[0] not in config.get("thinker_config", config):
                continue  # a text model alone, which has no tower
            values = [each for each in _values(config, name) if each is not None]
            if values[:1] != [value] and not (not values and _may_be_absent(name)):
                odd.append(f"{model_type}: {name} is {values[:1]}, not {value}")
    known = {
        case: each
        for case, each in question["cases"].items()
        if each["config"]["model_type"] in CONFIG_MAPPING
    }
    cases = {
        case: {name: _without(CONFIG_MAPPING, each["config"], name) for name in each["fields"]}
        for case, each in known.items()
    }
    tied = {case: list(_tied_answers(each["config"])) for case, each in known.items()}
    return {"odd": odd, "cases": cases, "tied": tied}


def _may_be_absent(name: str) -> bool:
    # Without windows, classes have no list of layers' types, and towers lack fields of others.
    return "_config." in name or name == "layer_types"


def _tied_answers(config: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yield what the whole and its text part state, and whether transformers ties the head then."""
    for whole, text in STATEMENTS:
        if (stated := stating(config, whole, text)) is not None:
            yield [whole, text, _is_tied(stated)]


def _is_tied(config: Mapping[str, Any]) -> bool:
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        read = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(read)
    model = getattr(model, "thinker", model)
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _without(classes: Any, config: Mapping[str, Any], name: str) -> Any:
    """Return what transformers takes for a field that is left out, or `REFUSED`."""
    silent = copy.deepcopy(config)
    *parents, last = name.split(".")
    inner = silent
    for parent in parents:
        inner = inner[parent]
    del inner[last]
    try:
        value = classes[config["model_type"]].from_dict(silent)
    except Exception:  # of whichever kind
        return REFUSED
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else _attribute(value, key)
    return value


def _attribute(config: Any, key: str) -> Any:
    # Fields that layers may have of their own are not attributes.
    fields = vars(config)
    return fields[key] if key in fields else getattr(config, key, None)


def _values(config: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield a field of each part that may have it, the text model first; `TIED` of the whole alone."""
    thinker = config.get("thinker_config", config)
    parts = (thinker.get("text_config", {}), thinker, config)
    for part in parts[1:] if name == TIED else parts:
        rope = part.get("rope_parameters") or {}
        first, _, last = name.partition(".")
        if first == "rope":
            own = rope.get("full_attention", rope)
            yield own.get({"theta": "rope_theta", "type": "rope_type"}.get(last, last))
        elif last:
            yield (part.get(first) or {}).get(last)
        elif name == "layer_types":
            types = set(part.get(name) or ())
            yield sorted(types) if len(types) > 1 else next(iter(types), None)
        else:
            # Experts have two names.
            yield part.get(first, part.get("num_experts" if first == "num_local_experts" else first))


def _states(config: Mapping[str, Any], name: str) -> bool:
    first, _, rest = name.partition(".")
    inner = config.get(first)
    return first in config and (not rest or (isinstance(inner, Mapping) and _states(inner, rest)))


def _lines(answers: Mapping[str, Any]) -> str:
    """Return answers as JSON, an object as one line for each field and a list as one line."""
    cases = []
    for case, answer in sorted(answers.items()):
        indent = 1 if isinstance(answer, Mapping) else None
        text = json.dumps(answer, indent=indent, sort_keys=True).replace("\n", "\n ")
        cases.append(f" {json.dumps(case)}: {text}")
    return "{\n" + ",\n".join(cases) + "\n}\n"


def main() -> int:
    """Ask transformers, print what differs, and write the answers if asked to."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from oracle import environments

    command = [environments.found().torch, __file__, "--within"]
    ended = subprocess.run(
        command, input=json.dumps(asked()), text=True, stdout=subprocess.PIPE, check=True
    ).stdout
    answer = json.loads(ended.splitlines()[-1])
    print("\n".join(answer["odd"]))
    is_same = True
    for name, file in FILES.items():
        if "--write" in sys.argv:
            file.write_text(_lines(answer[name]))
        if not file.is_file() or json.loads(file.read_bytes()) != answer[name]:
            is_same = False
            print(f"{file} differs from what transformers takes; --write writes it")
    return 0 if is_same and not answer["odd"] else 1


if __name__ == "__main__":
    if "--within" in sys.argv:
        print(json.dumps(compared()))
    else:
        sys.exit(main())
