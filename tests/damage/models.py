"""Create tiny Hugging Face model directories with random damage, reproducible by seed.

Only the standard library and numpy: the environment of transformers runs this file, too.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Config = dict[str, Any]
DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I32": np.int32, "I8": np.int8}
_COMMON = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 24,
    "vocab_size": 48,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Config] = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
    },
    "llama-tied": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": True,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "tie_word_embeddings": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a model."""
    embed, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    value = config["num_key_value_heads"] * config["head_dim"]
    kind = config["model_type"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (embed,),
        "self_attn.q_proj.weight": (query, embed),
        "self_attn.k_proj.weight": (value, embed),
        "self_attn.v_proj.weight": (value, embed),
        "self_attn.o_proj.weight": (embed, query),
        "post_attention_layernorm.weight": (embed,),
    }
    if kind in ("qwen3", "gemma3_text"):
        layer |= {f"self_attn.{item}_norm.weight": (config["head_dim"],) for item in "qk"}
    if kind == "gemma3_text":
        layer |= {f"{item}_feedforward_layernorm.weight": (embed,) for item in ("pre", "post")}
    if kind == "mixtral":
        layer["block_sparse_moe.gate.weight"] = (config["num_local_experts"], embed)
        for expert in range(config["num_local_experts"]):
            at = f"block_sparse_moe.experts.{expert}"
            layer |= {f"{at}.w1.weight": (mlp, embed), f"{at}.w2.weight": (embed, mlp)}
            layer |= {f"{at}.w3.weight": (mlp, embed)}
    else:
        layer |= {f"mlp.{item}_proj.weight": (mlp, embed) for item in ("gate", "up")}
        layer["mlp.down_proj.weight"] = (embed, mlp)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, embed)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (embed,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, embed)
    return shapes


def noise(shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return values that depend on a name: multiples of 2**-16 within ±0.5, which stay exact."""
    count = int(np.prod(shape))
    drawn = np.frombuffer(random.Random(name).randbytes(2 * count), "<u2")
    return (drawn.astype(np.float32) / 65536 - 0.5).reshape(shape)


@dataclass
class Model:
    """A model directory in memory, which damage changes.

    Attributes:
        config: of config.json.
        shards: file name -> tensor name -> values.
        index: of model.safetensors.index.json, or None.
        files: other files; they are written last and replace what has their names.
        cut: file name -> bytes to remove from its end (negative: to append).
        words: strings of which a message must name at least one, for each damage.
        damage: what was done.
        made_of: the arguments of `base`.
    """

    config: Config
    shards: dict[str, dict[str, np.ndarray]]
    index: Config | None
    files: dict[str, bytes]
    cut: dict[str, int] = field(default_factory=dict)
    words: list[list[str]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    made_of: tuple[str, int] = ("llama", 1)

    def where(self, name: str) -> str:
        """Return the file that has a tensor."""
        return next(file for file, tensors in self.shards.items() if name in tensors)

    @property
    def names(self) -> list[str]:
        return [name for tensors in self.shards.values() for name in tensors]

    def note(self, what: str, *words: str) -> None:
        self.damage.append(what)
        self.words.append(list(words))

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        if self.config:
            (directory / "config.json").write_text(json.dumps(self.config, indent=1))
        for file, tensors in self.shards.items():
            (directory / file).write_bytes(safetensors_bytes(tensors))
        if self.index is not None:
            (directory / "model.safetensors.index.json").write_text(json.dumps(self.index))
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        for name, count in self.cut.items():
            if (path := directory / name).exists():
                content = path.read_bytes()
                path.write_bytes(content[:-count] if count > 0 else content + bytes(-count))


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    """Return the bytes of a safetensors file."""
    codes = {np.dtype(item): code for code, item in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, data = 0, []
    for name, values in tensors.items():
        end = offset + values.nbytes
        header[name] = {
            "dtype": codes[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [offset, end],
        }
        data.append(values.tobytes())
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data)


def tokenizer_files(vocab_size: int) -> dict[str, bytes]:
    """Return the files of a tokenizer of single letters that transformers loads."""
    letters = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(97 + n): n + 3 for n in range(min(26, vocab_size - 3))}
    added = [
        {
            "id": number,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, word in enumerate(("<unk>", "<s>", "</s>"))
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": letters, "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "generation_config.json": json.dumps({"bos_token_id": 1, "eos_token_id": 2}).encode(),
    }


def base(name: str, shards: int) -> Model:
    """Return a model without damage."""
    config = _COMMON | CONFIGS[name]
    shapes = shapes_of(config)
    names = list(shapes)
    files = ["model.safetensors"]
    if shards > 1:
        files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    parts: dict[str, dict[str, np.ndarray]] = {}
    for number, file in enumerate(files):
        own = names[len(names) * number // shards : len(names) * (number + 1) // shards]
        parts[file] = {item: noise(shapes[item], item) for item in own}
    index = None
    if shards > 1:
        total = sum(values.nbytes for tensors in parts.values() for values in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {tensor: file for file, tensors in parts.items() for tensor in tensors},
        }
    return Model(config, parts, index, tokenizer_files(config["vocab_size"]), made_of=(name, shards))


Damage = Callable[[Model, random.Random], None]
_DAMAGE: list[Damage] = []


def _damage(function: Damage) -> Damage:
    _DAMAGE.append(function)
    return function


def _tensor(model: Model, rng: random.Random) -> tuple[str, str]:
    name = rng.choice(model.names)
    return model.where(name), name


def _unlist(model: Model, name: str) -> None:
    if model.index is not None:
        model.index["weight_map"].pop(name, None)


def _list(model: Model, name: str, file: str) -> None:
    if model.index is not None:
        model.index["weight_map"][name] = file


@_damage
def drop(model: Model, rng: random.Random) -> None:
    """Remove a tensor from its file, and from the index or not."""
    file, name = _tensor(model, rng)
    del model.shards[file][name]
    if rng.random() < 0.5:
        _unlist(model, name)
    model.note(f"drop {name}", name, file, "index")


@_damage
def drop_layer(model: Model, rng: random.Random) -> None:
    """Remove every tensor of one layer."""
    number = rng.randrange(model.config.get("num_hidden_layers") or 1)
    start = f"model.layers.{number}."
    for file, tensors in model.shards.items():
        model.shards[file] = {item: values for item, values in tensors.items() if not item.startswith(start)}
    if model.index is not None:
        listed = model.index["weight_map"]
        model.index["weight_map"] = {
            item: file for item, file in listed.items() if not item.startswith(start)
        }
    model.note(f"drop layer {number}", start, f"layer {number}", "layer", "num_hidden_layers")


@_damage
def rename(model: Model, rng: random.Random) -> None:
    """Give a tensor a name that the model does not have."""
    file, name = _tensor(model, rng)
    new = rng.choice(
        [
            name + ".old",
            name.replace("weight", "weights"),
            name.replace("proj", "projection"),
            name.replace("layers.1", "layers.9"),
            "module." + name,
            name.removeprefix("model."),
            name.upper(),
        ]
    )
    if new == name or new in model.names:
        new = name + "_0"
    model.shards[file] = {new if item == name else item: v for item, v in model.shards[file].items()}
    if rng.random() < 0.7:
        _unlist(model, name)
        _list(model, new, file)
    model.note(f"rename {name} to {new}", name, new)


@_damage
def duplicate(model: Model, rng: random.Random) -> None:
    """Store a tensor a second time in another file, with the same or other values."""
    file, name = _tensor(model, rng)
    other = rng.choice([*(shard for shard in model.shards if shard != file), "model-extra.safetensors"])
    values = model.shards[file][name]
    is_same = rng.random() < 0.4
    model.shards.setdefault(other, {})[name] = values if is_same else values + np.asarray(1, values.dtype)
    what = "the same" if is_same else "other values"
    model.note(f"duplicate {name} in {other}: {what}", name, other)


@_damage
def add(model: Model, rng: random.Random) -> None:
    """Add a tensor that the model does not have."""
    file = rng.choice([*model.shards])
    name = rng.choice(
        [
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.layers.1.self_attn.q_proj.bias",
            "model.layers.77.mlp.up_proj.weight",
            "score.weight",
            "value_head.weight",
            "model.embed_tokens.weight_scale",
            "optimizer.step",
        ]
    )
    model.shards[file][name] = noise((8,), name)
    if rng.random() < 0.7:
        _list(model, name, file)
    model.note(f"add {name}", name)


@_damage
def resize(model: Model, rng: random.Random) -> None:
    """Change the shape of a tensor."""
    file, name = _tensor(model, rng)
    values = model.shards[file][name]
    if values.ndim == 0 or values.size == 0:
        return drop(model, rng)
    how = rng.choice(["crop", "pad", "transpose", "flatten", "lift", "empty"])
    if how == "crop":
        axis = rng.randrange(values.ndim)
        values = np.delete(values, -1, axis)
    elif how == "pad":
        axis = rng.randrange(values.ndim)
        values = np.concatenate([values, np.take(values, [0], axis)], axis)
    elif how == "transpose" and values.ndim == 2 and values.shape[0] != values.shape[1]:
        values = np.ascontiguousarray(values.T)
    elif how == "flatten" and values.ndim == 2:
        values = values.reshape(-1)
    elif how == "lift":
        values = values[None]
    else:
        values = values[:0]
    model.shards[file][name] = np.ascontiguousarray(values)
    model.note(f"resize {name}: {how} to {values.shape}", name, "vocab_size", "padding")
    return None


@_damage
def retype(model: Model, rng: random.Random) -> None:
    """Store a tensor as another dtype."""
    file, name = _tensor(model, rng)
    code = rng.choice(["F16", "F64", "I32", "I8"])
    model.shards[file][name] = model.shards[file][name].astype(DTYPES[code])
    model.note(f"retype {name} to {code}", name, code.lower(), "dtype")


@_damage
def swap(model: Model, rng: random.Random) -> None:
    """Exchange the values of two tensors; with different shapes, both are wrong."""
    (a_file, a), (b_file, b) = _tensor(model, rng), _tensor(model, rng)
    first, second = model.shards[a_file][a], model.shards[b_file][b]
    model.shards[a_file][a], model.shards[b_file][b] = second, first
    model.note(f"swap {a} and {b}", a, b)


@_damage
def truncate(model: Model, rng: random.Random) -> None:
    """Cut a weights file, or append to it."""
    file = rng.choice([*model.shards])
    count = rng.choice([1, 8, 100, 10_000, 10**9, -1, -64])
    model.cut[file] = count
    model.note(f"cut {count} bytes off {file}", file)


@_damage
def spoil_header(model: Model, rng: random.Random) -> None:
    """Replace a weights file with something else."""
    file = rng.choice([*model.shards])
    content = rng.choice(
        [
            b"",
            bytes(64),
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n",
            b"<html><body>404</body></html>",
            struct.pack("<Q", 2) + b"{}",
            struct.pack("<Q", 1 << 40) + b"{}",
            struct.pack("<Q", 8) + b"[1,2,3] ",
        ]
    )
    model.files[file] = content
    model.note(f"replace {file} by {content[:20]!r}", file, *list(model.shards[file])[:1])


@_damage
def lose_file(model: Model, rng: random.Random) -> None:
    """Remove or rename a weights file."""
    file = rng.choice([*model.shards])
    tensors = model.shards.pop(file)
    if rng.random() < 0.5:
        new = rng.choice(["weights.safetensors", "model-00009-of-00009.safetensors", file + ".bak"])
        model.shards[new] = tensors
        model.note(f"rename file {file} to {new}", file, new, *list(tensors)[:1], "of-00009")
    else:
        model.note(f"lose file {file}", file, "weights", next(iter(tensors), file))


@_damage
def leave_file(model: Model, rng: random.Random) -> None:
    """Leave a weights file of another checkpoint next to the model's own."""
    name = rng.choice(["model.safetensors", "model-00001-of-00009.safetensors", "adapter_model.safetensors"])
    if name in model.shards:
        name = "model-00001-of-00001.safetensors"
    values = {item: noise(v.shape, "old" + item) for t in model.shards.values() for item, v in t.items()}
    if rng.random() < 0.5:
        values = dict(list(values.items())[:3])
    model.shards[name] = values
    model.note(f"leave {name} with {len(values)} tensors", name, *list(values)[:1], "of-00009")


@_damage
def spoil_index(model: Model, rng: random.Random) -> None:
    """Make the index wrong."""
    if model.index is None:
        listed = dict.fromkeys(model.names, "model-00001-of-00001.safetensors")
        model.index = {"metadata": {}, "weight_map": listed}
        model.note("add an index of a file that does not exist", "index", "model-00001-of-00001.safetensors")
        return
    listed = model.index["weight_map"]
    how = rng.choice(["entry", "swap", "absent", "extra", "size", "cut", "none", "map", "other"])
    name = rng.choice([*listed]) if listed else ""
    words = ["index", name]
    if how == "entry":
        listed.pop(name, None)
    elif how == "swap":
        others = [shard for shard in model.shards if shard != listed.get(name)] or ["gone.safetensors"]
        listed[name] = rng.choice(others)
    elif how == "absent":
        listed[name] = "model-00007-of-00007.safetensors"
        words.append(listed[name])
    elif how == "extra":
        extra = "model.layers.5.mlp.extra.weight"
        listed[extra] = next(iter(model.shards), "gone.safetensors")
        words.append(extra)
    elif how == "size":
        model.index["metadata"]["total_size"] = rng.choice([1, 10**12])
    elif how == "cut":
        model.files["model.safetensors.index.json"] = json.dumps(model.index).encode()[:-20]
    elif how == "none":
        model.index = None
    elif how == "map":
        del model.index["weight_map"]
        model.files["model.safetensors.index.json"] = json.dumps(model.index).encode()
        model.index["weight_map"] = listed
    else:
        model.index["weight_map"] = dict.fromkeys(listed, "pytorch_model-00001-of-00002.bin")
        words.append("pytorch_model")
    model.note(f"spoil the index: {how} {name}", *words)


_NUMBERS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "num_local_experts",
    "num_experts_per_tok",
)


@_damage
def change_number(model: Model, rng: random.Random) -> None:
    """Change or remove an integer in the configuration."""
    name = rng.choice([number for number in _NUMBERS if number in model.config] or ["vocab_size"])
    old = model.config.get(name, 4)
    new = rng.choice([old - 1, old + 1, old * 2, max(1, old // 2), 0, None, str(old)])
    if new is None:
        model.config.pop(name, None)
    else:
        model.config[name] = new
    model.note(f"{name}: {old} -> {new!r}", name, "the arrays do not match config.json")


@_damage
def change_config(model: Model, rng: random.Random) -> None:
    """Make another part of the configuration wrong."""
    how = rng.choice(
        ["tie", "type", "unknown", "architectures", "gone", "cut", "list", "layer_types", "quantized", "lfs"]
    )
    words = ["config.json"]
    if how == "tie":
        model.config["tie_word_embeddings"] = not model.config.get("tie_word_embeddings")
        words += ["tie_word_embeddings", "lm_head"]
    elif how == "type":
        model.config["model_type"] = rng.choice(["llama", "qwen2", "qwen3", "mistral", "gemma2", "mixtral"])
        words += ["model_type", "model.layers"]
    elif how == "unknown":
        model.config["model_type"] = "nosuchmodel"
        words += ["model_type", "nosuchmodel"]
    elif how == "architectures":
        model.config["architectures"] = rng.choice([[], ["NoSuchModel"], ["LlamaModel"]])
        words += ["architectures"]
    elif how == "gone":
        model.config = {}
    elif how == "cut":
        model.files["config.json"] = json.dumps(model.config).encode()[:-30]
    elif how == "list":
        model.files["config.json"] = b"[]"
    elif how == "layer_types":
        types = model.config.get("layer_types") or ["full_attention"] * model.config.get(
            "num_hidden_layers", 3
        )
        model.config["layer_types"] = rng.choice([types[:-1], [*types, types[0]], ["dense"] * len(types)])
        words += ["layer_types"]
    elif how == "quantized":
        method = rng.choice(["fp8", "gptq", "nosuchmethod"])
        model.config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 8}
        words += ["quant"]
    else:
        model.files["config.json"] = b"version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 1\n"
    model.note(f"config: {how}", *words)


@_damage
def spoil_sidecar(model: Model, rng: random.Random) -> None:
    """Damage a file of the tokenizer or the generation settings."""
    name = rng.choice(["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    content = model.files.get(name, b"{}")
    new = rng.choice(
        [
            content[: len(content) // 2],
            b"",
            b"[]",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"b" * 64 + b"\nsize 999\n",
            b"<html>",
        ]
    )
    model.files[name] = new
    model.note(f"replace {name} by {new[:20]!r}", name)


BASES = [
    ("llama", 1),
    ("llama", 2),
    ("llama-tied", 1),
    ("llama-tied", 3),
    ("qwen3", 1),
    ("qwen3", 3),
    ("gemma3", 1),
    ("gemma3", 2),
    ("mixtral", 1),
    ("mixtral", 2),
]


def damaged(seed: int) -> Model:
    """Return a model with one to three damages, the same for the same seed.

    Each of the first seeds has one damage, so that a finding has one cause.
    """
    rng = random.Random(seed)
    model = base(*BASES[seed % len(BASES)])
    first = _DAMAGE[seed // len(BASES) % len(_DAMAGE)]
    for function in [first, *rng.choices(_DAMAGE, k=rng.choice([0, 0, 0, 1, 2]))]:
        if model.names:
            function(model, rng)
    return model
