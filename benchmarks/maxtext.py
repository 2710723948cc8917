"""`ckpt convert` against MaxText's own conversion scripts, as processes, on the shapes of Qwen2.5 1.5B.

    python benchmarks/maxtext.py --maxtext PYTHON [--directory DIR] [--rounds N]

PYTHON is the interpreter of an environment with MaxText, as tests/oracle/setup.sh makes. The model has 3.09
GB. Prints the median of wall seconds, the highest peak memory, and the seconds of a run whose predecessor was
killed (SIGKILL) at half of that time. The last line times `ckpt verify`, which compares every bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pairs import remove

from ckpttools.testing.models import write_model

CKPT = Path(sys.executable).with_name("ckpt")
TOKENIZER = Path(__file__).parents[1] / "fixtures/torch/trainers/hub"
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SETTINGS = ("model_name=qwen2.5-1.5b", "hardware=cpu", "skip_jax_distributed_system=true", "scan_layers=true")


def run(words: Sequence[str | Path], stop_after: float | None = None) -> tuple[float, float]:
    """Run a command; return its wall seconds with a sync, and its peak memory in GiB.

    Args:
        words: The command.
        stop_after: Seconds after which the process is killed; None to let it end.
    """
    os.sync()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as output:
        start = time.monotonic()
        process = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
        if stop_after is not None:
            time.sleep(stop_after)
            process.send_signal(signal.SIGKILL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        os.sync()
        taken = time.monotonic() - start
        if process.returncode and stop_after is None:
            output.seek(0)
            raise SystemExit(output.read().decode()[-4000:])
    return taken, usage.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--maxtext", type=Path, required=True, help="Python of an environment with MaxText")
    parser.add_argument("--directory", type=Path, help="a directory with 16 GB of space")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        model = write_model(directory / "hf", CONFIG).parent
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, model)
        maxtext, own, back = directory / "maxtext", directory / "own", directory / "back"
        script = (arguments.maxtext, "-m")
        to_maxtext = (
            *(*script, "maxtext.checkpoint_conversion.to_maxtext", *SETTINGS),
            *(f"base_output_directory={maxtext}", f"--hf_model_path={model}"),
        )
        to_huggingface = (
            *(*script, "maxtext.checkpoint_conversion.to_huggingface", *SETTINGS, "weight_dtype=bfloat16"),
            *(f"load_parameters_path={maxtext}/0/items", f"base_output_directory={back}"),
            f"--hf_model_path={model}",
        )
        print("Hugging Face to MaxText", flush=True)
        compare("ckpt", (CKPT, "convert", "hf-to-maxtext", model, own), own, arguments.rounds)
        compare("MaxText", to_maxtext, maxtext, arguments.rounds)
        print("MaxText to Hugging Face", flush=True)
        compare("MaxText", to_huggingface, back, arguments.rounds)
        compare("ckpt", (CKPT, "convert", "maxtext-to-hf", own, back), back, arguments.rounds)
        taken = [run((CKPT, "verify", own, "--against", model))[0] for _ in range(arguments.rounds)]
        print(f"ckpt verify, every bit: {statistics.median(taken):.2f} s")


def compare(name: str, words: Sequence[str | Path], output: Path, rounds: int) -> None:
    """Print the seconds and memory of a command, and the seconds of a run after a killed one."""
    results = []
    for _ in range(rounds):
        clear(output)
        results.append(run(words))
    seconds = statistics.median(taken for taken, _ in results)
    peak = max(peak for _, peak in results)
    clear(output)
    run(words, stop_after=seconds / 2)
    again, _ = run(words)
    print(f"  {name}: {seconds:.2f} s, peak {peak:.2f} GiB; after a kill {again:.2f} s", flush=True)


def clear(output: Path) -> None:
    for path in output.parent.glob(f"{output.name}*"):
        remove(path)


if __name__ == "__main__":
    main()
