"""Prompts against their problems: the question, the system prompt and the assistant's header in, the answer not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.gold_likelihood import blind_surprise, bos_gain
from keel.doctor.probes.leaks import leak_findings, system_leaks
from keel.doctor.probes.repeats import contradiction_findings, eval_leak, repeat_findings
from keel.doctor.probes.verbatim import verbatim_findings
from keel.doctor.probes.written_out import written_out_findings
from keel.doctor.rendering import (
    in_template,
    messages_of,
    own_template,
    rendered,
    survives,
    turn_marks,
    word_by_word,
)
from keel.doctor.replies import squeezed
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.run.build import build_renderer

_MOST = 0.9  # of the prompts that have a form; a text about templates has it here and there
_LOOKED_AT = 32  # problems of the first step whose prompts are read
_GIVEN_ROLES = ("user", "system", "developer")  # templates may shorten what the assistant or a tool has said


@dataclass(frozen=True)
class Prompt:
    """A problem, its tokens, and their text with special tokens written out."""

    problem: Problem
    tokens: tuple[int, ...]
    text: str


def probe_prompts(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """Read prompts back from their tokens; compare them with problems, with each other and with held-out ones."""
    prompts = _prompts(setup)
    lost = [*_lost(setup, prompts)]
    written_out = [*written_out_findings([prompt.problem for prompt in prompts])]
    if any("are encoded" in found.evidence for found in written_out):
        setup.shared["another template"] = "questions that are not plain text"
    findings = [
        *lost,
        *(() if lost else verbatim_findings(setup)),
        *written_out,
        *_headless(setup, prompts),
        *_filled_twice(setup, prompts),
        *_bos(setup, prompts, thresholds),
        *_leaks(setup, prompts, thresholds),
        *repeat_findings(setup, thresholds),
        *contradiction_findings(setup, thresholds),
        *eval_leak(setup, thresholds),
    ]
    figures = {"prompts_read": float(len(prompts))}
    return Outcome("prompts", tuple(findings), figures, (f"prompts: {len(prompts)} read back from their tokens",))


def _leaks(setup: KeelSubject, prompts: Sequence[Prompt], thresholds: Thresholds) -> list[Finding]:
    """In the messages as they are given, since tokens may not give spaces back; else in what a template adds."""
    given = [(prompt.problem, "\n".join(m["content"] for m in messages_of(prompt.problem))) for prompt in prompts]
    read = [(prompt.problem, prompt.text) for prompt in prompts]
    return (
        [*system_leaks(setup, [prompt.problem for prompt in prompts], thresholds)]
        or [*leak_findings(setup, given, thresholds)]
        or [*leak_findings(setup, read, thresholds)]
    )


def _prompts(setup: KeelSubject) -> list[Prompt]:
    """Those of the batch as they are scored, and more of the first step as training renders them."""
    more = setup.run.task.sample(_LOOKED_AT, seed=setup.config.run.seed, step=0)
    scored = {group.problem.key: (group.problem, group.prompt_tokens) for group in setup.groups}
    pairs = [*scored.values()]
    others = [problem for problem in more if problem.key not in scored]
    pairs += zip(others, rendered(setup, others), strict=True)
    decode = partial(setup.policy.tokenizer.decode, skip_special_tokens=False)
    return [Prompt(problem, tokens, str(decode(list(tokens)))) for problem, tokens in pairs]


def _lost(setup: KeelSubject, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """What a problem says must be read in its prompt, and problems that differ must give prompts that differ."""
    tokenizer, system = setup.policy.tokenizer, setup.config.data.system_prompt
    whole = [prompt for prompt in prompts if "prompt_tokens_cut" not in prompt.problem.info]
    lost: list[tuple[Prompt, str, str]] = []
    for prompt in whole:
        messages = messages_of(prompt.problem)
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        for role, content in ((m["role"], m["content"]) for m in messages if m["role"] in _GIVEN_ROLES):
            if not survives(content, prompt.text) and not survives(word_by_word(tokenizer, content), prompt.text):
                lost.append((prompt, role, content))
                break
    if lost:
        yield _lost_finding(whole, lost)
        return
    texts = {str(prompt.problem.prompt) for prompt in whole}
    distinct = {prompt.tokens for prompt in whole}
    if len(texts) > 1 and len(distinct) == 1:
        yield finding(
            "prompt/no-question",
            f"{len(texts)} different problems are rendered to one and the same prompt: {whole[0].text[-80:]!r}",
            "what differs between the problems is lost on the way into tokens",
            "mend the chat template or the tokenizer: every problem's text must be written into its prompt",
        )


def _lost_finding(whole: Sequence[Prompt], lost: Sequence[tuple[Prompt, str, str]]) -> Finding:
    prompt, role, content = lost[0]
    what = "the system prompt" if role == "system" else "the problem's text"
    return finding(
        "prompt/no-question",
        f"{len(lost)} of {len(whole)} prompts do not hold {what}: {content[-60:]!r} became {prompt.text[-80:]!r}",
        f"the chat template loses what the {role}'s message says, or the tokenizer loses or cuts it (truncation)",
        "let the chat template write the content of every message (tokenizer.chat_template, or data.chat_template for "
        "another one)",
    )


def _headless(setup: KeelSubject, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """After the last message stands what opens the assistant's turn, where the template has such a thing.

    A plain text that is written in the marks of the tokenizer's own template is held to them too.
    """
    tokenizer = setup.policy.tokenizer
    renderer = build_renderer(setup.config, tokenizer)
    used, own = turn_marks(tokenizer, renderer.template), turn_marks(tokenizer, own_template(tokenizer))
    missing, spoilt = [], []
    for prompt in prompts:
        filled = in_template(renderer, prompt.problem)
        marks = used if filled else own
        if filled and used is not None and used.fault and squeezed(prompt.text).endswith(squeezed(used.assistant)):
            spoilt.append(prompt)
            continue
        last = messages_of(prompt.problem)[-1]
        if marks is None or not marks.assistant or last["role"] == "assistant":
            continue
        if not filled and not (marks.user and marks.user in prompt.text):
            continue
        # without spaces, which tokenizers drop or add
        text, header = squeezed(prompt.text), squeezed(marks.assistant)
        asked = text.rfind(squeezed(marks.user if not filled else (last["content"].split() or [""])[-1]))
        opened = text.rfind(header)
        if opened < 0 or opened + len(header) <= asked:
            missing.append((prompt, marks.assistant))
    if spoilt and used is not None:
        yield finding(
            "prompt/format" if used.doubled else "prompt/no-header",
            f"{len(spoilt)} of {len(prompts)} prompts end with {used.assistant!r}, but {used.answered!r} stands before "
            f"the assistant's messages in the same template: {spoilt[0].text[-60:]!r}",
            f"the template's generation prompt is not the assistant's header: {used.fault}",
            f"end the template with {{% if add_generation_prompt %}} and {used.answered!r}",
        )
    if not missing:
        return
    prompt, header = missing[0]
    yield finding(
        "prompt/no-header",
        f"{len(missing)} of {len(prompts)} prompts end without {header!r}, which opens the assistant's turn in the "
        f"chat template: {prompt.text[-60:]!r}",
        "the template ignores add_generation_prompt, or the prompt was written without it: the model continues the "
        "user's turn instead of answering",
        f"end the template with {{% if add_generation_prompt %}} and {header!r}, or write that at the prompt's end",
    )


def _filled_twice(setup: KeelSubject, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Messages that hold what opens a turn in the template that they are put into: they were rendered before."""
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    marks = turn_marks(setup.policy.tokenizer, renderer.template)
    if marks is None or not marks.user:
        return
    told = [(p, "".join(str(m["content"] or "") for m in messages_of(p.problem))) for p in prompts]
    twice = [p for p, text in told if in_template(renderer, p.problem) and squeezed(marks.user) in squeezed(text)]
    if len(twice) <= _MOST * len(prompts):
        return
    setup.shared["another template"] = "messages that are rendered"
    yield finding(
        "prompt/format",
        f"the messages of {len(twice)} of {len(prompts)} problems hold {marks.user!r}, which opens a turn in the "
        f"template that they are put into: {twice[0].text[-80:]!r}",
        "the data hold prompts that were rendered already, and the template is applied once more",
        "give messages or plain text in the prompt column; data.chat_template=none and "
        "data.allow_control_tokens=true are for prompts that are rendered",
    )


def _bos(setup: KeelSubject, prompts: Sequence[Prompt], thresholds: Thresholds) -> Iterator[Finding]:
    """BOS once at the head of a prompt, or not at all where the model does not miss it."""
    tokenizer = setup.policy.tokenizer
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return
    heads = [_head(setup, prompt.tokens) for prompt in prompts]
    doubled = sum(head[:2] == (bos, bos) for head in heads)
    if doubled:
        yield finding(
            "prompt/double-bos",
            f"{doubled} of {len(prompts)} prompts begin with the BOS token twice",
            "the chat template writes BOS and the tokenizer or the task adds another",
            "take BOS out of the task's prompt or out of the chat template (data.chat_template)",
        )
    elif not any(bos in head[:1] for head in heads):
        gain, surprise = bos_gain(setup, bos)
        known = surprise < blind_surprise(setup, thresholds)
        if fmean(gain or [0.0]) > thresholds["bos_gain"] and min(gain) > 0 and known:
            yield finding(
                "prompt/no-bos",
                f"gold answers are {fmean(gain):.2g} nats a token likelier after prompts that begin with "
                f"{tokenizer.bos_token!r}, in all of {len(gain)} problems; none of the prompts does",
                "the model was trained on texts that begin with BOS, and the tokenizer or the template leaves it out",
                "let the tokenizer add BOS (add_bos_token), or write it at the head of the chat template",
            )


def _head(setup: KeelSubject, tokens: Sequence[int]) -> tuple[int, ...]:
    """The first tokens that are neither padding nor blank."""
    tokenizer = setup.policy.tokenizer
    head, padding = tokens[:8], {tokenizer.pad_token_id} - {tokenizer.bos_token_id}
    blank = [not str(tokenizer.decode([token], skip_special_tokens=False)).strip() for token in head]
    return tuple(t for t, empty in zip(head, blank, strict=True) if not empty and t not in padding)
