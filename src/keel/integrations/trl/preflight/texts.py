"""Compare prompts, scored rows and judged texts with the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keel.doctor.findings import Finding, finding
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.batch import Subject


def probe_texts(subject: Subject, thresholds: Thresholds) -> Outcome:
    """Check that prompts contain their text, and that scored rows and judged texts are the sampled ones."""
    findings = [*_rows(subject), *_questions(subject, thresholds), *_judged_texts(subject)]
    unchecked = ("output/text: completions hold tokens of tools",) if subject.tools else ()
    return Outcome("travel", tuple(findings), {"rows": float(len(subject.texts))}, unchecked=unchecked)


def _rows(subject: Subject) -> Iterator[Finding]:
    """Compare the batch's ids with the result of `_generate`, row by row."""
    batch, texts = subject.batch, subject.texts
    scored = [
        tuple(ids[mask.bool()].tolist()) for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]
    completions = [tuple(ids[: len(t)].tolist()) for ids, (_, t) in zip(batch["completion_ids"], texts, strict=True)]
    prompts = sum(own != given for own, (given, _) in zip(scored, texts, strict=True))
    answers = sum(own != given for own, (_, given) in zip(completions, texts, strict=True))
    if prompts or answers:
        subject.shared["rows differ"] = True
    if prompts:
        yield finding(
            "sampler/other-prompt",
            f"{prompts} of {len(texts)} completions are scored after another prompt than they were sampled from",
            "prompt_ids or prompt_mask was cut, changed or put into another order after sampling",
            "leave prompt_ids and prompt_mask as _generate gives them",
        )
    if answers:
        yield finding(
            "sampler/swapped",
            f"{answers} of {len(texts)} rows hold other completion_ids than were sampled for them",
            "completions were put into another order, or changed after sampling",
            "change the order of all of a batch's tensors together, or of none",
        )


def _questions(subject: Subject, thresholds: Thresholds) -> Iterator[Finding]:
    """Search a prompt's text (of a conversation the last message) in its decoded tokens."""
    tokenizer = subject.trainer._tokenizer
    lost: list[str] = []
    count = 0
    for prompt, (ids, _) in zip(subject.prompts, subject.texts, strict=True):
        text = prompt if isinstance(prompt, str) else prompt[-1].get("content")
        if not isinstance(text, str) or not text.split():
            continue
        count += 1
        decoded = "".join(tokenizer.decode(list(ids)).split()).casefold()
        missing = [word for word in text.split() if word.casefold() not in decoded]
        if len(missing) > thresholds["lost_words"] * len(text.split()):
            lost.append(missing[0])
    if lost:
        yield finding(
            "prompt/no-question",
            f"in {len(lost)} of {count} prompts words are missing from the tokens, such as {lost[0][:40]!r}",
            "the prompt is cut, the chat template leaves a message out, or the tokenizer does not know its signs",
            "look at tokenizer.decode(prompt_ids[0]), and mend the template or the tokenizer",
        )


def _judged_texts(subject: Subject) -> Iterator[Finding]:
    """Compare the texts that the rewards got with the trained tokens."""
    if subject.tools or subject.judged.error is not None:
        return
    kept = [
        ids[:length].tolist()
        for ids, length in zip(subject.batch["completion_ids"], subject.sampled.sum(1).tolist(), strict=True)
    ]
    decoded = subject.trainer.processing_class.batch_decode(kept, skip_special_tokens=True)
    judged = [_content(completion) for completion in subject.judged.completions]
    differing = [(own, given) for own, given in zip(decoded, judged, strict=True) if given is not None and own != given]
    if differing:
        own, given = differing[0]
        yield finding(
            "output/text",
            f"{len(differing)} of {len(decoded)} completions were judged by another text than their tokens: "
            f"{given[:60]!r} for {own[:60]!r}",
            "rewards are paid for something else than what is trained",
            "give the rewards the decoded completion_ids, in the same order",
        )


def _content(completion: Any) -> str | None:
    """A completion's text; None if it was parsed into something else."""
    if isinstance(completion, str):
        return completion
    only = completion[0] if len(completion) == 1 else {}
    content = only.get("content")
    return content if isinstance(content, str) and set(only) <= {"role", "content"} else None


__all__ = ["probe_texts"]
