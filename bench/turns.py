"""Tool turns with a common prefix: what Keel saves by a KV cache between turns, and by letting no episode wait.

    python bench/turns.py                      # 1 prompt of 2,300 tokens × 8 episodes × 4 turns of 32, answers of 64
    python bench/turns.py --prompt 600 --turns 6
    python bench/turns.py --uneven --prompts 4 --prompt 300 --new 96
    python bench/turns.py --device cuda

Episodes of `--prompts` groups: after each turn a tool answers with `--answer` tokens, and the next request carries the
whole context. Three ways take turns: `joined` (as `keel train` does it: the KV cache is kept between turns, the
prompt once a group, and an episode that was answered joins those still sampling), `kept` (the same, but all episodes
wait until the last has finished), `again` (they wait, and each turn prefills every context in full). The same tokens
must come out of all three. With `--uneven` a turn has between an eighth of `--new` tokens and all of them. A tool takes
`--tool-seconds`, however many episodes it answers at a time. Times are medians of `--repeats` after a warm-up on a
random Llama of 19M parameters; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS = ("a", "b")


@dataclass
class Episodes:
    """Conversations under way: what was said, and the next request of each."""

    options: argparse.Namespace
    said: dict[tuple[str, int], list[tuple[int, ...]]] = field(default_factory=dict)

    def limit(self, key: str, sample: int, turn: int) -> int:
        new = self.options.new
        return random.Random(f"{key} {sample} {turn}").randint(max(1, new // 8), new) if self.options.uneven else new

    def first(self, prompts: Sequence[tuple[int, ...]]) -> list[Any]:
        from keel.rollout import Request

        return [
            Request(f"group {number}", prompt, samples=(sample,), max_new=self.limit(f"group {number}", sample, 0))
            for number, prompt in enumerate(prompts)
            for sample in range(self.options.group)
        ]

    def answer(self, turns: Sequence[Any]) -> list[Any]:
        """What a tool says to each, and the request that goes on."""
        from keel.rollout import Request

        time.sleep(self.options.tool_seconds)
        requests = []
        for turn in turns:
            request, tokens = turn.request, turn.completion.tokens
            said = self.said.setdefault((request.key, turn.sample), [])
            said.append(tokens)
            told = tuple(range(100 + len(said), 100 + len(said) + self.options.answer))
            if len(said) < self.options.turns:
                requests.append(
                    Request(
                        request.key,
                        (*request.tokens, *tokens, *told),
                        samples=(turn.sample,),
                        start=request.start + len(tokens) + len(told),
                        max_new=self.limit(request.key, turn.sample, len(said)),
                    )
                )
        return requests


def turn_by_turn(engine: Any, requests: list[Any], sampling: Any, answer: Callable[..., list[Any]], step: int) -> None:
    from keel.rollout import Turn

    while requests:
        found = engine.generate(requests, sampling, step=step)
        requests = answer([Turn(r, r.samples[0], said) for r, (said,) in zip(requests, found, strict=True)])


def joined(engine: Any, requests: list[Any], sampling: Any, answer: Callable[..., list[Any]], step: int) -> None:
    engine.converse(requests, sampling, answer, step=step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=2300, help="tokens of a prompt")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new", type=int, default=32, help="tokens that the model says in a turn")
    parser.add_argument("--answer", type=int, default=64, help="tokens that the tool says after it")
    parser.add_argument("--tool-seconds", type=float, default=0.0, help="time of a tool")
    parser.add_argument("--uneven", action="store_true", help="turns of different lengths")
    parser.add_argument("--sides", default="joined,kept,again", help="which ways, the faster ones first")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from keel.rollout import SamplingParams
    from keel.rollout.native.engine import NativeEngine
    from random_model import save_random_llama

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as place:
        save_random_llama(Path(place), WORDS)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    model = model.eval().to(options.device)
    keeping, reading = NativeEngine(model, tokenizer, kv_cache_bytes=2**33), NativeEngine(model, tokenizer)
    ways = {"joined": (keeping, joined), "kept": (keeping, turn_by_turn), "again": (reading, turn_by_turn)}
    sides = options.sides.split(",")
    if unknown := sorted(set(sides) - set(ways)):
        parser.error(f"--sides: no way is called {unknown[0]!r}, there are {', '.join(ways)}")
    noise = torch.Generator().manual_seed(0)
    prompts = [
        tuple(torch.randint(8, 16384, (options.prompt,), generator=noise).tolist()) for _ in range(options.prompts)
    ]
    sampling = SamplingParams(max_completion_length=options.new, num_generations=options.group, ignore_eos=True)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(options.repeats + 1):
        said = []
        for side in sides if repeat % 2 == 0 else reversed(sides):
            engine, way = ways[side]
            episodes = Episodes(options)
            engine.release()
            started = time.perf_counter()
            way(engine, episodes.first(prompts), sampling, episodes.answer, repeat)
            if repeat:
                times[side].append(time.perf_counter() - started)
            said.append(episodes.said)
        if any(one != said[0] for one in said):
            raise SystemExit("bench/turns.py: the ways drew other tokens")
    show(options, times)


def show(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    """Seconds for a person, then one line of JSON; ratios are medians of the time of a way over the first one's."""
    spoken = f"up to {options.new}" if options.uneven else str(options.new)
    episodes = f"{options.prompts} × {options.group} episodes of {options.turns} turns"
    print(f"prompt {options.prompt}, {episodes}, {spoken} + {options.answer} tokens a turn, {options.device}")
    line: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("device", "prompts", "prompt", "group", "turns", "new", "answer", "uneven", "tool_seconds")
    }
    first = next(iter(times))
    for side, taken in times.items():
        ratio = statistics.median(mine / best for mine, best in zip(taken, times[first], strict=True))
        line |= {f"{side}_s": round(statistics.median(taken), 3), f"{side}_over_{first}": round(ratio, 3)}
        print(f"{side:>8} {line[f'{side}_s']:9.2f} s {ratio:8.2f} × {first}")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
