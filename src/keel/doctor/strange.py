"""Texts that no problem of the run has: what an engine does with any tokens, and not only with prompts it is used to.

A policy that was taught its task is certain after its own prompts: it writes the same whatever became of them, and two
draws are alike without being copies. After random tokens nothing is certain, and every token before counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.doctor.keel_subject import KeelSubject
from keel.rollout.request import Request

Tokens = tuple[int, ...]

STRANGE_STEPS = 4_000_037, 4_000_039  # noise of its own, twice
_SHORT = (3, 6)  # tokens: where each of them counts for much; others are as long as the run's prompts
_TEXTS, _SAMPLES, _LENGTH = 2, 8, 8  # texts of a length, completions of each, tokens of those
_TRIES = 8


def ordinary_tokens(setup: KeelSubject) -> list[int]:
    """The tokens that text is made of."""
    tokenizer = setup.policy.tokenizer
    special = {*tokenizer.all_special_ids, *setup.policy.eos_ids}
    return [token for token in range(min(setup.vocabulary, len(tokenizer))) if token not in special]


def strange_turns(setup: KeelSubject, step: int, texts: int = 0, samples: int = _SAMPLES) -> list[Group]:
    """What the engine writes after the strange texts of a number with the noise of a step; each is asked for once.

    Nothing where it can write nothing after them.
    """
    known: dict[tuple[int, int, int], list[Group]] = setup.shared.setdefault("strange turns", {})
    key = step, texts, samples
    if key not in known:
        requests = [
            Request(f"strange {texts} {i}", prompt, max_new=_LENGTH)
            for i, prompt in enumerate(strange_prompts(setup, texts))
        ]
        sampling = replace(setup.sampling, num_generations=samples, stop=())
        answers: list[list[Completion]] = []
        with suppress(KeelError):  # an engine may refuse what it made of a text of three tokens
            answers = setup.run.engine.generate(requests, sampling, seed=setup.config.run.seed, attempt=0, step=step)
            setup.run.engine.release()
        decode = setup.policy.tokenizer.decode
        known[key] = [
            Group(Problem(request.key, str(decode(list(request.tokens)))), request.tokens, tuple(group))
            for request, group in zip(requests, answers, strict=False)
        ]
    return known[key]


def strange_prompts(setup: KeelSubject, texts: int = 0) -> list[Tokens]:
    """Random texts of a few tokens and as long as the run's prompts, behind the BOS that those begin with."""
    prompts = [group.prompt_tokens for group in setup.groups]
    bos = setup.policy.tokenizer.bos_token_id
    head = (bos,) if bos is not None and all(prompt[0] == bos for prompt in prompts) else ()
    return [(*head, *text) for length in (*_SHORT, max(map(len, prompts))) for text in _texts(setup, length, texts)]


def _texts(setup: KeelSubject, length: int, number: int) -> Iterator[Tokens]:
    """Texts of about `length` tokens, white space and capitals among them, that come back when encoded again.

    An engine that takes text gets the same tokens then: only one that changes it does not.
    """
    tokenizer, ordinary = setup.policy.tokenizer, ordinary_tokens(setup)
    draw = Random(f"{setup.config.run.seed} {length} {number}")

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
