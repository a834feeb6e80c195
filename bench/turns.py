"""Tool turns with a common prefix: Keel reusing what earlier turns have read, against Keel reading it again.

    python bench/turns.py                      # 1 prompt of 2,300 tokens × 8 episodes × 4 turns of 32, answers of 64
    python bench/turns.py --prompt 600 --turns 6

Episodes of one group: after each turn a tool answers with `--answer` tokens, and the next request carries the whole
context. Two ways take turns: `kept` (keys and values held over the turns, the prompt once a group), `again` (each turn
reads every context anew). The same tokens must come out of both. Times are medians of `--repeats` after a warm-up on a
random Llama of 19M parameters; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

WORDS = ("a", "b")


def episodes(engine: Any, options: argparse.Namespace, prompt: tuple[int, ...], step: int) -> tuple[Any, list[float]]:
    """All turns of one group; the tokens of every turn, and the seconds of each."""
    from keel.rollout import Request, SamplingParams

    sampling = SamplingParams(max_completion_length=options.new, num_generations=options.group, ignore_eos=True)
    said, seconds = [], []
    live = [Request("group", prompt, samples=(i,)) for i in range(options.group)]
    requests = [Request("group", prompt)]
    for turn in range(options.turns):
        started = time.perf_counter()
        found = engine.generate(requests, sampling, step=step)
        seconds.append(time.perf_counter() - started)
        answers = [completion for group in found for completion in group]
        said.append([answer.tokens for answer in answers])
        told = tuple(range(100 + turn, 100 + turn + options.answer))  # what the tool says
        live = [
            replace(
                request,
                tokens=(*request.tokens, *answer.tokens, *told),
                start=request.start + options.new + options.answer,
            )
            for request, answer in zip(live, answers, strict=True)
        ]
        requests = live
    return said, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2300)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new", type=int, default=32, help="tokens that the model says in a turn")
    parser.add_argument("--answer", type=int, default=64, help="tokens that the tool says after it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from keel.rollout import NativeEngine
    from random_model import save_random_llama

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as place:
        save_random_llama(Path(place), WORDS)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place)
    engines = {"kept": NativeEngine(model, tokenizer, kept_bytes=2**30), "again": NativeEngine(model, tokenizer)}
    prompt = tuple(torch.randint(8, 16384, (options.prompt,), generator=torch.Generator().manual_seed(0)).tolist())
    times: dict[str, list[list[float]]] = {side: [] for side in engines}
    for repeat in range(options.repeats + 1):
        said = {}
        for side in engines if repeat % 2 == 0 else reversed(engines):
            said[side], seconds = episodes(engines[side], options, prompt, repeat)
            if repeat:
                times[side].append(seconds)
        if said["kept"] != said["again"]:
            raise SystemExit("bench/turns.py: the two ways drew other tokens")
    show(options, times, engines["kept"].kept.bytes)


def show(options: argparse.Namespace, times: dict[str, list[list[float]]], held: int) -> None:
    """Seconds by turn for a person, then one line of JSON."""
    print(f"prompt {options.prompt}, {options.group} episodes, {options.new} + {options.answer} tokens a turn")
    print(f"{'':>6} " + " ".join(f"{f'turn {turn + 1}':>9}" for turn in range(options.turns)) + f" {'all':>9}")
    line: dict[str, Any] = {"prompt": options.prompt, "turns": options.turns, "kept_mib": round(held / 2**20, 1)}
    for side, taken in times.items():
        turns = [statistics.median(column) for column in zip(*taken, strict=True)]
        line[f"{side}_s"] = round(statistics.median(map(sum, taken)), 3)
        print(f"{side:>6} " + " ".join(f"{second:8.2f}s" for second in turns) + f" {line[f'{side}_s']:8.2f}s")
    pairs = zip(times["again"], times["kept"], strict=True)
    line["ratio"] = round(statistics.median(sum(again) / sum(kept) for again, kept in pairs), 3)
    later = zip(times["again"], times["kept"], strict=True)
    line["ratio_after_first"] = round(statistics.median(sum(a[1:]) / sum(k[1:]) for a, k in later), 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
