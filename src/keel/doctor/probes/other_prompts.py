"""Prompts that an engine may have continued instead of the right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from keel.base.types import Group, Problem
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.rendering import messages_of, own_template
from keel.rollout.render import Renderer

Tokens = tuple[int, ...]
_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
_CUTS: dict[str, tuple[str, Callable[[Tokens, int], Tokens]]] = {
    "first": ("prompts without their first {} tokens", lambda tokens, n: tokens[n:]),
    "last": ("prompts without their last {} tokens", lambda tokens, n: tokens[:-n]),
    "middle": (
        "prompts without {} tokens in their middle",
        lambda tokens, n: (*tokens[: max(0, len(tokens) - n) // 2], *tokens[max(0, len(tokens) - n) // 2 + n :]),
    ),
    "to end": ("prompts cut to their last {} tokens", lambda tokens, n: tokens[-n:]),
    "to start": ("prompts cut to their first {} tokens", lambda tokens, n: tokens[:n]),
}


@dataclass(frozen=True)
class OtherPrompt:
    """A change of a prompt's tokens; for a cut also its kind and size."""

    label: str
    change: Callable[[Tokens, int], Tokens]  # from the tokens and the index of the group
    kind: str = ""
    size: int | None = None


def cuts(kind: str, sizes: Iterable[int], longest: int) -> Iterator[OtherPrompt]:
    """Cuts of one kind. A prompt keeps at least its last token."""
    label, cut = _CUTS[kind]
    for size in sizes:
        if 0 < size < longest:
            yield OtherPrompt(label.format(size), partial(_at_least_one, cut, size), kind, size)


def _at_least_one(cut: Callable[[Tokens, int], Tokens], size: int, tokens: Tokens, group: int) -> Tokens:
    return cut(tokens, size) or tokens[-1:]


def other_prompts(setup: KeelSubject, groups: Sequence[Group]) -> list[OtherPrompt]:
    """Changes that alter some prompt and fit the context, without duplicates."""
    own = tuple(group.prompt_tokens for group in groups)
    room = (setup.policy.context_length or 1 << 30) - setup.config.rollout.max_completion_length
    seen, distinct = {own}, []
    for other in _hypotheses(setup, groups):
        changed = tuple(other.change(tokens, i) for i, tokens in enumerate(own))
        if changed not in seen and all(0 < len(tokens) <= room for tokens in changed):
            seen.add(changed)
            distinct.append(other)
    return distinct


def _hypotheses(setup: KeelSubject, groups: Sequence[Group]) -> Iterator[OtherPrompt]:
    tokenizer = setup.policy.tokenizer
    longest = max(len(group.prompt_tokens) for group in groups)
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, setup.policy.pad_id
    if bos is not None:
        yield OtherPrompt("prompts with an additional BOS", lambda tokens, _: (bos, *tokens))
        yield OtherPrompt("prompts without BOS", lambda tokens, _: tokens[1:] if tokens[0] == bos else tokens)
    yield OtherPrompt("prompts with EOS at their end", lambda tokens, _: (*tokens, eos))
    yield OtherPrompt("prompts with EOS before them", lambda tokens, _: (eos, *tokens))
    yield OtherPrompt("prompts padded on the left", lambda tokens, _: (*(pad,) * (longest - len(tokens)), *tokens))
    yield OtherPrompt("prompts padded on the right", lambda tokens, _: (*tokens, *(pad,) * (longest - len(tokens))))
    for label, again in _texts(tokenizer).items():
        yield OtherPrompt(label, partial(_encoded, again))
    yield OtherPrompt(
        "prompts whose special tokens are encoded as ordinary text", partial(_encoded, _spelt_out(tokenizer))
    )
    for label, rendered in _renderings(setup, groups):
        yield OtherPrompt(label, partial(_of_group, rendered))
    for kind in _CUTS:
        yield from cuts(kind, _SIZES, longest)


def _texts(tokenizer: Any) -> dict[str, Callable[[Tokens], Tokens]]:
    """Ways to decode and encode prompts that may change them."""

    def again(change: Callable[[str], str], *, special: bool, added: bool = False) -> Callable[[Tokens], Tokens]:
        def encoded(tokens: Tokens) -> Tokens:
            text = change(str(tokenizer.decode(list(tokens), skip_special_tokens=not special)))
            return tuple(int(t) for t in tokenizer.encode(text, add_special_tokens=added))

        return encoded

    return {
        "prompts decoded and encoded again": again(str, special=True),
        "prompts decoded and encoded again, with the tokenizer's special tokens": again(str, special=True, added=True),
        "prompts without special tokens": again(str, special=False),
        "prompts without their special tokens, with those that the tokenizer adds": again(
            str, special=False, added=True
        ),
        "prompts without the spaces at their ends": again(str.strip, special=True),
        "prompts with a space at their end": again(lambda text: f"{text} ", special=True),
        "prompts with a line break at their end": again(lambda text: f"{text}\n", special=True),
        "prompts without their spaces": again(lambda text: text.replace(" ", ""), special=True),
        "prompts with single spaces in place of all white space": again(lambda t: " ".join(t.split()), special=True),
    }


def _spelt_out(tokenizer: Any) -> Callable[[Tokens], Tokens]:
    """Role markers encoded as ordinary text. BOS, EOS, padding and unknown tokens are kept."""
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    spelt: dict[int, Tokens] = {}
    for token in set(tokenizer.all_special_ids) - ends:
        letters = str(tokenizer.convert_ids_to_tokens(token))
        parts = (tokenizer.encode(letter, add_special_tokens=False) for letter in letters)
        spelt[token] = tuple(int(t) for part in parts for t in part)
    return lambda tokens: tuple(t for token in tokens for t in spelt.get(token, (token,)))


def _encoded(again: Callable[[Tokens], Tokens], tokens: Tokens, group: int) -> Tokens:
    return again(tokens)


def _of_group(rendered: Sequence[Tokens], tokens: Tokens, group: int) -> Tokens:
    return rendered[group]


def _renderings(setup: KeelSubject, groups: Sequence[Group]) -> Iterator[tuple[str, list[Tokens]]]:
    """Other renderings of the problems: without the system prompt or the template, in the template, or in it twice."""
    tokenizer, data, problems = setup.policy.tokenizer, setup.config.data, [group.problem for group in groups]
    plain = [Problem(p.key, "\n\n".join(m["content"] for m in messages_of(p))) for p in problems]
    users = [Problem(p.key, messages_of(p)[-1]["content"]) for p in problems]
    ways: list[tuple[str, dict[str, Any], Sequence[Problem]]] = [
        ("prompts without their template", {"chat_template": "none"}, plain),
        ("the last message alone", {"chat_template": "none"}, users),
    ]
    if data.system_prompt is not None:
        ways.append(("prompts without the system prompt", {"chat_template": data.chat_template}, problems))
    if own_template(tokenizer):
        filled = [
            Problem(group.problem.key, str(tokenizer.decode(list(group.prompt_tokens), skip_special_tokens=False)))
            for group in groups
        ]
        ways.append(("prompts in the chat template", {"chat_template": "default"}, plain))
        ways.append(("prompts put into the chat template again", {"chat_template": "default"}, filled))
    for label, options, asked in ways:
        try:
            # other programs do not reject control tokens
            renderer = Renderer(tokenizer, allow_control_tokens=True, **options)
            yield label, [renderer.prompt(problem) for problem in asked]
        except Exception:  # a template may refuse other messages
            continue
