"""Whether a `config.json` made of MaxText's settings is its model's in transformers.

Of each case, the settings that `ckpt maxtext-config` tells are made a configuration again. transformers makes
a tiny model of the original's text and one of what was made, which takes the weights of the first, all and no
other, and compares logits. Exits with 1 where they differ, but for what MaxText computes otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Beyond every window of the cases.
TOKENS = 40
# What MaxText does whatever the model says, and a configuration of its settings says, too.
OTHERWISE = {
    "llama3.2-tied": "its rope factor is 8",
    "qwen3-moe": "weights of the chosen experts sum up to 1",
    "deepseek4-flash": "positions of compressed layers are not stretched",
}


def made(words: list[str]) -> dict[str, dict[str, Any]]:
    """Case -> configuration of its own text part, and the one made of settings."""
    import ckpttools
    from ckpttools.maxtext.config.to_hf_config import config_from_settings
    from ckpttools.maxtext.model_config import text_config
    from ckpttools.model_families.registry import family_of
    from oracle.cases import configurations, named

    found = {}
    for case in named(words):
        location = configurations()[case]
        config = json.loads(location.read_bytes())
        spellings = [each for each in family_of(config, str(location)).spellings if each.model_types]
        own = text_config(config, spellings[-1]) if spellings else None
        told = ckpttools.maxtext_config(location.parent).arguments()
        both = {"own": own or config.get("text_config", config), "made": config_from_settings(told)}
        found[case] = {name: {**each, "dtype": "float32"} for name, each in both.items()}
    return found


def compared() -> int:
    """Reads the configurations of all cases as JSON, and says of each how far logits are apart."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def model(config: dict[str, Any]) -> Any:
        # transformers has this type with code from the hub alone.
        kind = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
        with tempfile.TemporaryDirectory() as location:
            Path(location, "config.json").write_text(json.dumps({**config, "model_type": kind}))
            read = AutoConfig.from_pretrained(location)
        return AutoModelForCausalLM.from_config(read, attn_implementation="eager").float().eval()

    failed = 0
    for case, configs in json.load(sys.stdin).items():
        torch.manual_seed(0)
        try:
            own, other = model(configs["own"]), model(configs["made"])
            for each in own.parameters():
                if each.ndim > 1:
                    torch.nn.init.normal_(each, std=each.shape[-1] ** -0.5)
            other.load_state_dict(own.state_dict(), strict=True)
            tokens = torch.randint(0, own.config.vocab_size, (1, TOKENS))
            with torch.no_grad():
                apart = float((own(tokens).logits - other(tokens).logits).abs().max())
            said, ok = f"logits {apart:.1e} apart, {type(other).__name__}", apart == 0 or case in OTHERWISE
        except (ValueError, RuntimeError, AttributeError, KeyError) as error:
            said, ok = f"{type(error).__name__}: {error}", False
        failed += not ok
        why = f" ({OTHERWISE[case]})" if case in OTHERWISE else ""
        print(f"{case}: {said}{why}", flush=True)
    return min(failed, 1)


def main() -> int:
    """Asks, and hands on."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from oracle import environments

    command = [environments.found().torch, __file__, "--within"]
    return subprocess.run(command, input=json.dumps(made(sys.argv[1:])), text=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(compared() if "--within" in sys.argv else main())
