"""The sizes of MaxText's models from configs/models/*.yml, which are the same in both versions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_COLUMNS = (
    "base_emb_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "head_dim",
    "base_mlp_dim",
    "base_num_decoder_layers",
    "vocab_size",
    "num_experts",
    "scan_layers",
)
# A dash marks a default that the model does not change.
_TABLE = """
deepseek-custom             1024   16   16    -   2048    6  129280   16   -
deepseek2-16b               2048   16   16    -  10944   27  102400   64   -
deepseek2-236b              5120  128  128    -  12288   60  102400  160   -
deepseek3-671b-2dfsdp       7168  128  128    -  18432   61  129280  256   -
deepseek3-671b-batchsplit   7168  128  128    -  18432   61  129280  256   -
deepseek3-671b              7168  128  128    -  18432   61  129280  256   -
deepseek3-test               512  128  128    -  18432   61  129280  256   -
deepseek3-tiny                64    4    4    -     64   61  129280   16   -
deepseek3.2-671b            7168  128  128    -  18432   61  129280  256   -
deepseek4-284b              4096   64    1  512   2048   43  129280  256   -
deepseek4-tiny                64    4    1   32     64   43  129280   16   -
envy-switch-base            1536   12   12    -   6144   12   32768  128   -
envy-switch-large           2048   16   16    -   8192   24   32768  128   -
envy-switch-xxl             8192   64    8    -  20480   24   32768   64   -
envy-test                      8    4    2    -     16    4      32    8   -
gemma-2b                    2048    8    1  256  16384   18  256128    -   -
gemma-7b                    3072   16   16  256  24576   28  256128    -   -
gemma2-27b                  4608   32   16  128  36864   23  256128    -   -
gemma2-2b                   2304    8    4  256   9216   13  256128    -   -
gemma2-9b                   3584   16    8  256  14336   21  256128    -   -
gemma3-12b                  3840   16    8  256  15360   48  262144    -   -
gemma3-27b                  5376   32   16  128  21504   62  262144    -   -
gemma3-4b                   2560    8    4  256  10240   34  262144    -   -
gemma4-26b                  2816   16    8  256   2112   30  262144  128   -
gemma4-31b                  5376   32   16  256  21504   60  262144    -   -
gemma4-e2b                  1536    8    1  256   6144   35  262144    -   -
gemma4-e4b                  2560    8    2  256  10240   42  262144    -   -
gpt-oss-120b                2880   64    8   64   2880   36  201088  128   -
gpt-oss-20b                 2880   64    8   64   2880   24  201088   32   -
gpt3-175b                  12288   96   96  128  49152   96   50304    -   -
gpt3-22b                    6144   24   24  256  24576   48   32768    -   -
gpt3-52k                      16    2    2    8     64    1    1024    -   -
gpt3-6b                     3072   12   12  256  12288   48   32768    -   -
kimi-k2-1t                  7168   64   64    -  18432   61  163840  384   -
llama2-13b                  5120   40   40  128  13824   40   32000    -   -
llama2-70b                  8192   64    8  128  28672   80   32000    -   -
llama2-7b                   4096   32   32  128  11008   32   32000    -   -
llama3-70b                  8192   64    8  128  28672   80  128256    -   -
llama3-8b                   4096   32    8  128  14336   32  128256    -   -
llama3.1-405b              16384  128    8  128  53248  126  128256    -   -
llama3.1-70b                8192   64    8  128  28672   80  128256    -   -
llama3.1-8b                 4096   32    8  128  14336   32  128256    -   -
llama3.3-70b                8192   64    8  128  28672   80  128256    -   -
llama4-17b-128e             5120   40    8    -  16384   48  202048  128   -
llama4-17b-16e              5120   40    8    -   8192   48  202048   16   -
mistral-7b                  4096   32    8  128  14336   32   32000    -   -
mixtral-8x22b               6144   48    8  128  16384   56   32768    8   -
mixtral-8x7b                4096   32    8  128  14336   32   32000    8   -
olmo3-32b                   5120   40    8  128  27648   64  100278    -   -
olmo3-7b-pt                 4096   32   32  128  11008   32  100278    -   -
olmo3-7b                    4096   32   32  128  11008   32  100278    -   -
qwen2.5-1.5b                1536   12    2  128   8960   28  151936    -   -
qwen2.5-14b                 5120   40    8  128  13824   48  152064    -   -
qwen2.5-7b                  3584   28    4  128  18944   28  152064    -   -
qwen3-0.6b                  1024   16    8  128   3072   28  151936    -   -
qwen3-1.7b-base             2048   16    8  128   6144   28  151936    -   -
qwen3-1.7b                  2048   16    8  128   6144   28  151936    -   -
qwen3-14b-base              5120   40    8  128  17408   40  151936    -   -
qwen3-14b                   5120   40    8  128  17408   40  151936    -   -
qwen3-235b-a22b             4096   64    4  128   1536   94  151936  128   -
qwen3-30b-a3b-base          2048   32    4  128    768   48  151936  128   -
qwen3-30b-a3b               2048   32    4  128    768   48  151936  128   -
qwen3-32b                   5120   64    8  128  25600   64  151936    -   -
qwen3-480b-a35b             6144   96    8  128   2560   62  151936  160   -
qwen3-4b-base               2560   32    8  128   9728   36  151936    -   -
qwen3-4b-thinking-2507      2560   32    8  128   9728   36  151936    -   -
qwen3-4b                    2560   32    8  128   9728   36  151936    -   -
qwen3-8b-base               4096   32    8  128  12288   36  151936    -   -
qwen3-8b                    4096   32    8  128  12288   36  151936    -   -
qwen3-custom-30b-a3b        2048   16    2  256   2048   48  151936  128   -
qwen3-next-80b-a3b          2048   16    2  256    512   48  151936  512   -
qwen3-omni-30b-a3b          2048   32    4  128    768   48  152064  128  no
qwen3-vl-2b                 2048   16    8  128   6144   28  151936    -   -
qwen3-vl-30b-a3b            2048   32    4  128    768   48  151936  128  no
qwen3-vl-4b                 2560   32    8  128   9728   36  151936    -   -
qwen3.5-35b-a3b-fp8         2048   16    2  256    512   40  248320  256   -
qwen3.5-35b-a3b             2048   16    2  256    512   40  248320  256   -
qwen3.5-397b-a17b-fp8       4096   32    2  256   1024   60  248320  512   -
qwen3.5-397b-a17b           4096   32    2  256   1024   60  248320  512   -
weaver-max                  5120   64    8  128  25600   64  151936    -   -
weaver-mini                 4096   32    8  128  12288   36  151936    -   -
"""
_INSTRUCT = "-Instruct"
# Other model names that MaxText accepts, some of them without their own sizes.
_OTHERS = (
    "deepseek3-671b-lineage",
    "default",
    "llama3.1-70b-Instruct",
    "llama3.1-8b-Instruct",
    "maxtext-omni-gemma3-qwen3",
    "qwen3.5-35b-fp8",
)


def _row(line: str) -> tuple[str, Mapping[str, int | bool]]:
    name, *cells = line.split()
    declared = {column: cell for column, cell in zip(_COLUMNS, cells, strict=True) if cell != "-"}
    return name, {column: False if cell == "no" else int(cell) for column, cell in declared.items()}


MODELS: Mapping[str, Mapping[str, int | bool]] = MappingProxyType(
    dict(map(_row, _TABLE.strip().splitlines()))
)
"""Maps the name of a model to its settings."""
KNOWN_NAMES = frozenset({*MODELS, *_OTHERS})


def architecture(model_name: str) -> str:
    """Return the name under which MaxText looks up a model's sizes."""
    return model_name.replace(_INSTRUCT, "")
