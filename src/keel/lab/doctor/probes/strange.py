"""Texts that no problem of the run has: what an engine does with any tokens, and not only with prompts it is used to.

A policy that was taught its task is certain after its own prompts: it writes the same whatever became of them, and two
draws are alike without being copies. After random tokens nothing is certain, and every token before counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from keel.base.types import Completion, Group, Problem
from keel.lab.doctor.setup import ProbeSetup
from keel.rollout.request import Request

Tokens = tuple[int, ...]

STRANGE_STEPS = 4_000_037, 4_000_039  # noise of its own, twice
_SHORT = (3, 6)  # tokens: where each of them counts for much; others are as long as the run's prompts
_TEXTS, _SAMPLES, _LENGTH = 2, 8, 8  # texts of a length, completions of each, tokens of those
_TRIES = 8


def ordinary_tokens(setup: ProbeSetup) -> list[int]:
    """The tokens that text is made of."""
    tokenizer = setup.policy.tokenizer
    special = {*tokenizer.all_special_ids, *setup.policy.eos_ids}
    return [token for token in range(min(setup.vocabulary, len(tokenizer))) if token not in special]


def strange_turns(setup: ProbeSetup, step: int) -> list[Group]:
    """What the engine writes after strange texts with the noise of a step; each is asked for once."""
    known: dict[int, list[Group]] = setup.shared.setdefault("strange turns", {})
    if step not in known:
        prompts = strange_prompts(setup)
        requests = [Request(f"strange {i}", prompt, max_new=_LENGTH) for i, prompt in enumerate(prompts)]
        sampling = replace(setup.sampling, num_generations=_SAMPLES, stop=())
        answers: list[list[Completion]] = []
        if requests:
            answers = setup.run.engine.generate(requests, sampling, seed=setup.config.run.seed, attempt=0, step=step)
            setup.run.engine.release()
        problems = [Problem(r.key, str(setup.policy.tokenizer.decode(list(r.tokens)))) for r in requests]
        known[step] = [
            Group(problem, prompt, tuple(group))
            for problem, prompt, group in zip(problems, prompts, answers, strict=True)
        ]
    return known[step]


def strange_prompts(setup: ProbeSetup) -> list[Tokens]:
    """Random texts of a few tokens and as long as the run's prompts, behind the BOS that those begin with."""
    prompts = [group.prompt_tokens for group in setup.groups]
    bos = setup.policy.tokenizer.bos_token_id
    head = (bos,) if bos is not None and all(prompt[0] == bos for prompt in prompts) else ()
    return [(*head, *text) for length in (*_SHORT, max(map(len, prompts))) for text in _texts(setup, length)]


def _texts(setup: ProbeSetup, length: int) -> Iterator[Tokens]:
    """Texts of about `length` tokens, white space and capitals among them, that come back when encoded again.

    An engine that takes text gets the same tokens then: only one that changes it does not.
    """
    tokenizer, ordinary = setup.policy.tokenizer, ordinary_tokens(setup)
    draw = Random(f"{setup.config.run.seed} {length}")

    def encoded(text: str) -> Tokens:
        return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))

    spaces = encoded(" ") or encoded("\n")
    texts: list[Tokens] = []
    for _ in range(_TRIES):
        tokens = [draw.choice(ordinary) for _ in range(length)]
        tokens[length // 2 : length // 2 + 1] = spaces
        text = str(tokenizer.decode(tokens))
        tokens_again = encoded(text)[:length]
        same = tokens_again and encoded(str(tokenizer.decode(list(tokens_again)))) == tokens_again
        if same and max(tokens_again) < setup.vocabulary and tokens_again not in texts:
            texts.append(tokens_again)
        if len(texts) == _TEXTS:
            break
    yield from texts
