"""Where the time of a preflight goes, by experiment: the default's tiny model, and random weights in SmolLM2's shape.

    python bench/preflight.py                     (both, on the device that Keel picks)
    python bench/preflight.py --job 135m --device cpu --threads 2 --quick
    python bench/preflight.py --job 135m --model FOLDER      (real weights in place of random ones)

Seconds by the clock, and of the processor where others use the machine too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from keel.config import load_config
from keel.doctor.measure import Outcome
from keel.doctor.preflight import preflight
from random_model import save_random_llama

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
WORDS = ("What", "is", "plus", "?", "=", *"0123456789")
JOBS = ("tiny", "135m")


def measure(job: str, device: str, quick: bool, model: Path | None) -> dict[str, Any]:
    """Seconds (clock, processor) of the parts' building and of every experiment."""
    with tempfile.TemporaryDirectory() as scratch:
        if job == "tiny":
            config = load_config(ROOT / "configs" / "default.yaml", ["warmstart=null", f"model.device={device}"])
        else:
            folder = model or Path(scratch)
            if model is None:
                save_random_llama(folder, WORDS, SMOLLM2)
            overrides = [f"model.name={folder}", f"model.device={device}", "optim.precision=float32"]
            config = load_config(ROOT / "configs" / "smollm2_addition.yaml", overrides)
        seconds: dict[str, tuple[float, float]] = {}
        start = _now()
        marks = [start]

        def on_probe(outcome: Outcome, took: float) -> None:
            marks.append(_now())
            clock, processor = (now - before for now, before in zip(marks[-1], marks[-2], strict=True))
            name = f"building, {outcome.name}" if len(marks) == 2 else outcome.name  # the parts are built before it
            seconds[name] = clock, processor
            print(f"  {name:22} {clock:7.1f} s {processor:7.1f} s of processor time", flush=True)

        diagnosis = preflight(config, on_probe=on_probe, quick=quick)
    seconds["total"] = tuple(now - before for now, before in zip(_now(), start, strict=True))
    return {"job": job, "device": device, "seconds": seconds, "findings": [f.code for f in diagnosis.findings]}


def _now() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


def main() -> None:
    """Print a table for each job, and the figures as JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, action="append", help="what to try (default: both)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (default)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--quick", action="store_true", help="as `keel doctor --quick`")
    parser.add_argument("--model", type=Path, help="a model's folder for 135m")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    results = []
    for job in options.job or JOBS:
        print(f"{job} on {options.device}, {torch.get_num_threads()} threads")
        result = measure(job, options.device, options.quick, options.model)
        results.append(result)
        clock, processor = result["seconds"]["total"]
        print(f"  {'total':22} {clock:7.1f} s {processor:7.1f} s: {', '.join(result['findings']) or 'healthy'}")
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
