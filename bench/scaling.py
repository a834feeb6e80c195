"""How a step's time and peak memory grow with prompt length, group size and completion length.

    python bench/scaling.py --out docs/scaling.png

Scoring and updating (reference pass, forward, backward) of one batch on a random Llama of 28M parameters, with one row
a group (the prompt once) and with one row a completion. Each point is a fresh process, so that its peak is its own:
the largest resident memory over what stood before the first step. Times are medians after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

BASE = {"prompt": 256, "group": 8, "completion": 32}
SWEEPS = {"prompt": (32, 256, 512, 1024), "group": (2, 8, 16), "completion": (16, 32, 64)}
PROMPTS = 2


def measure_here(prompt: int, group: int, completion: int, shared: bool, repeats: int) -> dict[str, float]:
    """One point in this process: seconds a step and peak memory above the model's own."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from keel.base.types import Batch, Completion, Group, Problem
    from keel.kl import KLOptions
    from keel.losses import LossOptions, objective
    from keel.models.logprobs import score_tokens
    from keel.models.pack import pack

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32768,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 32768, (count,), generator=generator).tolist())

    def answer() -> Completion:
        zeros = (0.0,) * completion
        return Completion(tokens(completion), (True,) * completion, zeros, zeros, "", "length")

    groups = [Group(Problem(str(i), ""), tokens(prompt), tuple(answer() for _ in range(group))) for i in range(PROMPTS)]
    packed = pack(groups, 0, shared_prefix=shared)
    advantage = torch.randn(PROMPTS * group, generator=generator)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        with torch.no_grad():
            ref_logp = score_tokens(model, packed).logp
        model.zero_grad()
        batch = Batch(packed.action_mask, advantage, ref_logp=ref_logp - 0.01)
        objective(score_tokens(model, packed), batch, LossOptions(), KLOptions(), 0.04).loss.backward()
        times.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": statistics.median(times[1:]), "peak_mib": peak / 1024}


def measure_apart(point: dict[str, int], shared: bool, repeats: int, threads: int) -> dict[str, float]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--point", json.dumps({**point, "shared": shared})]
    command += ["--repeats", str(repeats), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench/scaling.py: {point} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def draw(rows: list[dict[str, float | str | bool]], out: Path) -> None:
    """Time above, memory below; a column a sweep."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(SWEEPS), figsize=(12, 6.4), squeeze=False)
    for column, name in enumerate(SWEEPS):
        for shared, label, style in ((True, "one row a group", "o-"), (False, "one row a completion", "s--")):
            points = [row for row in rows if row["sweep"] == name and row["shared"] is shared]
            for axis, what in ((axes[0][column], "seconds"), (axes[1][column], "peak_mib")):
                axis.plot([row[name] for row in points], [row[what] for row in points], style, label=label)
        fixed = ", ".join(f"{other} {value}" for other, value in BASE.items() if other != name)
        axes[0][column].set(title=f"{name} ({fixed})", ylabel="seconds a step" if column == 0 else "")
        axes[1][column].set(xlabel=f"{name} (tokens)" if name != "group" else "completions a prompt")
        axes[1][column].set(ylabel="peak MiB above the model" if column == 0 else "")
        for axis in (axes[0][column], axes[1][column]):
            axis.grid(alpha=0.3)
            axis.set_ylim(bottom=0)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("scaling.png"), help="the picture to write")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        import torch

        torch.set_num_threads(options.threads)
        print(json.dumps(measure_here(**json.loads(options.point), repeats=options.repeats)))
        return
    rows: list[dict[str, float | str | bool]] = []
    for name, values in SWEEPS.items():
        for value in values:
            for shared in (True, False):
                point = {**BASE, name: value}
                result = measure_apart(point, shared, options.repeats, options.threads)
                rows.append({"sweep": name, "shared": shared, **point, **result})
                how = "one row a group" if shared else "one row a completion"
                print(
                    f"prompt {point['prompt']:5} group {point['group']:3} completion {point['completion']:4} "
                    f"{how:>22} {result['seconds']:7.2f} s {result['peak_mib']:8.0f} MiB",
                    flush=True,
                )
    draw(rows, options.out)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
