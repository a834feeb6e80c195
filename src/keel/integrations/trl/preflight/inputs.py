"""Check the training inputs: prompts, scored rows and judged texts against the sampled tokens, and the rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, pstdev
from typing import Any

from keel.doctor.evidence import SAME, chance_of_all_but, level
from keel.doctor.findings import Finding, finding
from keel.doctor.probes.collection import NONE_OF_GROUPS
from keel.doctor.rendering import survives, word_by_word
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.subject import TrlSubject


def measure_texts(subject: TrlSubject) -> Outcome:
    """Prompts contain their text, and scored rows and judged texts are the sampled ones."""
    findings = [*_rows(subject), *_questions(subject), *_judged_texts(subject)]
    unchecked = ("output/text: completions hold tokens of tools",) if subject.tools else ()
    return Outcome("travel", tuple(findings), {"rows": float(len(subject.groups))}, unchecked=unchecked)


def _rows(subject: TrlSubject) -> Iterator[Finding]:
    """Compare the batch's token ids with the output of `_generate`, row by row."""
    b, count = subject.batch, len(subject.groups)
    prompts = answers = 0
    for row, group in enumerate(subject.groups):
        tokens = group.completions[0].tokens
        prompts += tuple(b["prompt_ids"][row][b["prompt_mask"][row].bool()].tolist()) != group.prompt_tokens
        answers += tuple(b["completion_ids"][row][: len(tokens)].tolist()) != tokens
    if prompts:
        yield finding(
            "sampler/other-prompt",
            f"{prompts} of {count} completions are scored after another prompt than they were sampled from",
            "prompt_ids or prompt_mask was cut, changed or put into another order after sampling",
            "leave prompt_ids and prompt_mask as _generate gives them",
        )
    if answers:
        yield finding(
            "sampler/swapped",
            f"{answers} of {count} rows hold other completion_ids than were sampled for them",
            "completions were put into another order, or changed after sampling",
            "change the order of all of a batch's tensors together, or of none",
        )


def _questions(subject: TrlSubject) -> Iterator[Finding]:
    """Check that the decoded tokens contain the prompt's text, or the last message of a conversation."""
    lost, tokenizer = list[str](), subject.policy.tokenizer
    for prompt, group in zip(subject.prompts, subject.groups, strict=True):
        text = prompt if isinstance(prompt, str) else prompt[-1].get("content")
        decoded = str(tokenizer.decode(list(group.prompt_tokens)))
        if isinstance(text, str) and not any(survives(t, decoded) for t in (text, word_by_word(tokenizer, text))):
            lost.append(text)
    if lost:
        yield finding(
            "prompt/no-question",
            f"{len(lost)} of {len(subject.groups)} prompts do not hold their text, such as {lost[0][-80:]!r}",
            "the prompt is cut, the chat template leaves a message out, or the tokenizer does not know its signs",
            "look at tokenizer.decode(prompt_ids[0]), and fix the template or the tokenizer",
        )


def _judged_texts(subject: TrlSubject) -> Iterator[Finding]:
    """Compare the texts that reward functions received with the trained tokens."""
    if subject.tools or subject.error is not None:
        return
    lengths = (len(group.completions[0].tokens) for group in subject.groups)
    kept = [ids[:n].tolist() for ids, n in zip(subject.batch["completion_ids"], lengths, strict=True)]
    decoded = subject.trainer.processing_class.batch_decode(kept, skip_special_tokens=True)
    judged = map(_content, subject.to_rewards)
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
    """A completion's text; None if it was parsed into several messages or other fields."""
    message = {"content": completion} if isinstance(completion, str) else completion[0] if len(completion) == 1 else {}
    content = message.get("content")
    return content if isinstance(content, str) and set(message) <= {"role", "content"} else None


def measure_rewards(subject: TrlSubject) -> Outcome:
    """Every reward is a number, and rewards within groups differ, as advantages require."""
    if subject.error is not None:
        failed = finding(
            "reward/failed",
            f"on the trainer's first batch a reward raised {subject.error}",
            "the reward does not take what TRL gives it: prompts, completions, completion_ids and the data's columns",
            "fix the reward; it is called with keyword arguments and returns a number for each completion",
        )
        return Outcome("collection", (failed,), unchecked=("reward/*: a reward raised",))
    broken, size = tuple(_not_numbers(subject)), int(subject.trainer.num_generations)
    totals = (subject.rewards * subject.trainer.reward_weights.to(subject.rewards)).nansum(1).tolist()
    if any(not math.isfinite(total) for total in totals):
        return Outcome("collection", broken, unchecked=("reward/constant: rewards are no numbers",))
    groups = [totals[start : start + size] for start in range(0, len(totals), size)]
    spreads = [pstdev(group) for group in groups]
    differing, rare = sum(spread > SAME for spread in spreads), subject.thresholds["healthy_solved"]
    flat = 1 - differing / len(groups)
    figures = {"within_group_std": fmean(spreads), "groups": float(len(groups)), "groups_differing": float(differing)}
    lines = (f"rewards: {differing} of {len(groups)} groups differ, mean standard deviation {fmean(spreads):.3g}",)
    if flat <= subject.thresholds["zero_variance_groups"]:
        return Outcome("collection", broken, figures, lines)
    chance = chance_of_all_but(differing, [(1 - rare) ** size + rare**size] * len(groups))
    sure = chance <= level(subject.thresholds)
    if not sure and (differing or len(groups) < NONE_OF_GROUPS):
        left = f"reward/constant: undecided after {len(totals)} completions of {len(groups)} prompts"
        return Outcome("collection", broken, figures, lines, undecided=(left,))
    constant = finding(
        "reward/constant",
        f"in {100 * flat:.0f} % of {len(groups)} groups all completions earn the same (seen: "
        f"{sorted({round(total, 6) for total in totals})[:4]}; a chance of {chance:.1g} where one in {1 / rare:.0f} "
        "completions earns otherwise)",
        "without a spread there is no advantage and no policy gradient",
        "choose prompts that the model solves now and then, reward partial success, or raise num_generations",
        severity=None if sure else "warning",
        share=flat,
    )
    return Outcome("collection", (*broken, constant), figures, lines)


def _not_numbers(subject: TrlSubject) -> Iterator[Finding]:
    rewards = subject.rewards
    infinite, nothing = int(rewards.isinf().any(1).sum()), int(rewards.isnan().all(1).sum())
    if infinite:
        yield finding(
            "reward/non-finite",
            f"{infinite} of {len(rewards)} completions earn an infinite reward",
            "TRL makes the advantages of such a group 0 or as large as a float goes",
            "let the reward return a bounded number",
        )
    if nothing:
        yield finding(
            "reward/non-finite",
            f"{nothing} of {len(rewards)} completions earn NaN or None of every reward",
            "TRL leaves such a completion out of its group's mean and gives it no advantage",
            "let one reward at least return a number for every completion",
            severity="error" if nothing == len(rewards) else "warning",
        )


__all__ = ["measure_rewards", "measure_texts"]
