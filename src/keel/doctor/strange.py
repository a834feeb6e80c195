"""Random prompts, which show what an engine does with any tokens, not only with the run's own prompts.

A trained policy may be certain after its own prompts: it writes the same text even if the prompt was changed, and equal
samples need not be copies. After random tokens it is never certain, and every earlier token matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from keel.base.types import Group
from keel.doctor.keel_subject import KeelSubject

Tokens = tuple[int, ...]

STRANGE_STEPS = 4_000_037, 4_000_039  # two steps with noise of their own
_SHORT = (3, 6)  # short lengths in tokens, at which each token matters; the third length is that of the run's prompts
_TEXTS, _SAMPLES, _LENGTH = 2, 8, 8  # texts per length, completions per text, and their length in tokens
_TRIES = 8


def ordinary_tokens(setup: KeelSubject) -> list[int]:
    """All tokens except special ones."""
    tokenizer = setup.policy.tokenizer
    special = {*tokenizer.all_special_ids, *setup.policy.eos_ids}
    return [token for token in range(min(setup.vocabulary, len(tokenizer))) if token not in special]


def strange_turns(setup: KeelSubject, step: int, texts: int = 0, samples: int = _SAMPLES) -> list[Group]:
    """Completions of random prompts with the noise of a step; sampled once per set of arguments."""
    known: dict[tuple[int, int, int], list[Group]] = setup.shared.setdefault("random prompts", {})
    key = step, texts, samples
    if key not in known:
        known[key] = setup.complete(strange_prompts(setup, texts), samples=samples, length=_LENGTH, step=step)
    return known[key]


def strange_prompts(setup: KeelSubject, texts: int = 0) -> list[Tokens]:
    """Random texts of a few tokens and of the length of the run's prompts, after BOS if those start with it."""
    prompts = [group.prompt_tokens for group in setup.groups]
    bos = setup.policy.tokenizer.bos_token_id
    head = (bos,) if bos is not None and all(prompt[0] == bos for prompt in prompts) else ()
    return [(*head, *text) for length in (*_SHORT, max(map(len, prompts))) for text in _texts(setup, length, texts)]


def _texts(setup: KeelSubject, length: int, number: int) -> Iterator[Tokens]:
    """Texts of about `length` tokens, with spaces and capitals, that survive decoding and encoding.

    An engine that encodes text itself then gets the same tokens, unless it changes the text.
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
