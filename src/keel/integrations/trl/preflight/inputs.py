"""Check the training inputs: prompts, rows, judged texts and masks against the sampled tokens, and the rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor
from trl.data_utils import is_conversational

from keel.doctor.evidence import SAME, chance_of_all_but, level
from keel.doctor.findings import Finding, finding
from keel.doctor.measure import Outcome
from keel.doctor.probes.collection import NONE_OF_GROUPS
from keel.doctor.rendering import own_template, survives, turn_marks, word_by_word
from keel.integrations.trl.preflight.subject import TrlSubject, signs
from keel.integrations.trl.scoring import action_mask


def measure_texts(subject: TrlSubject) -> Outcome:
    """Prompts contain their text, and scored rows and judged texts are the sampled ones."""
    findings = [*_rows(subject), *_questions(subject), *_judged_texts(subject)]
    unchecked = ("output/text: completions contain tokens of tools",) if subject.tools else ()
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
            f"{prompts} of {count} completions are scored with a prompt that they were not sampled from",
            "prompt_ids or prompt_mask was truncated, changed or reordered after sampling",
            "leave prompt_ids and prompt_mask as _generate returns them",
        )
    if answers:
        yield finding(
            "sampler/swapped",
            f"in {answers} of {count} rows, completion_ids differ from the sampled tokens",
            "completions were reordered or changed after sampling",
            "reorder all tensors of a batch together, or none of them",
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
            f"{len(lost)} of {len(subject.groups)} prompts lack their text after decoding, such as {lost[0][-80:]!r}",
            "the prompt is truncated, the chat template drops a message, or the tokenizer lacks some characters",
            "compare tokenizer.decode(prompt_ids[0]) with the prompt, and fix the template or the tokenizer",
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
            f"{len(differing)} of {len(decoded)} completions reached the reward functions with another text than that "
            f"of their tokens: {given[:60]!r} for {own[:60]!r}",
            "the rewards belong to other texts than the trained ones",
            "pass the decoded completion_ids to the reward functions, in the same order",
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
            f"a reward function raised {subject.error} on the trainer's first batch",
            "often the function does not accept TRL's arguments: prompts, completions, completion_ids, data columns",
            "fix the function: TRL calls it with keyword arguments, and it must return one number per completion",
        )
        return Outcome("collection", (failed,), unchecked=("reward/*: a reward function raised an error",))
    broken, size = tuple(_not_numbers(subject)), int(subject.trainer.num_generations)
    totals = (subject.rewards * subject.trainer.reward_weights.to(subject.rewards)).nansum(1).tolist()
    if any(not math.isfinite(total) for total in totals):
        return Outcome("collection", broken, unchecked=("reward/constant: some rewards are not finite",))
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
        f"in {100 * flat:.0f} % of {len(groups)} groups all completions have the same reward (values: "
        f"{sorted({round(total, 6) for total in totals})[:4]}; the probability of this is {chance:.1g} if one in "
        f"{1 / rare:.0f} completions has another reward)",
        "equal rewards within a group give advantages of 0 and no policy gradient",
        "choose prompts that the model solves sometimes, reward partial success, or raise num_generations",
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
            f"{infinite} of {len(rewards)} completions have an infinite reward",
            "TRL sets the advantages of such a group to 0 or to the largest float",
            "return finite numbers from the reward function",
        )
    if nothing:
        yield finding(
            "reward/non-finite",
            f"for {nothing} of {len(rewards)} completions every reward function returns NaN or None",
            "TRL leaves such a completion out of its group's mean and gives it no advantage",
            "return a number for every completion from at least one reward function",
            severity="error" if nothing == len(rewards) else "warning",
        )


# ------------------------------------------------------------------------ masks


def measure_masks(subject: TrlSubject) -> Outcome:
    """Check masks and end tokens, and that ∂loss/∂logp is zero exactly at tokens that were not sampled."""
    sampled, trained = subject.of_batch_width(subject.sampled), action_mask(subject.batch)
    expected = sampled
    if subject.trainer.mask_truncated_completions:
        whole = [c.tokens[-1:] in {(i,) for i in _ids_of_ends(subject)} for g in subject.groups for c in g.completions]
        expected = sampled & torch.tensor(whole, device=sampled.device)[:, None]
    figures = {
        "completion_tokens": float(sampled.sum()),
        "trained_tokens": float(trained.sum()),
        "left_out_of_turns": float((expected & ~trained).sum()),
    }
    findings = [*_mask_tensor(expected, trained), *([] if subject.tools else _ends(subject))]
    if not bool(expected.any()):
        findings.append(
            finding(
                "output/truncated",
                f"all {len(expected)} completions are truncated at max_completion_length="
                f"{subject.trainer.max_completion_length}, and mask_truncated_completions masks all of them",
                "no token of the batch is trained",
                "raise max_completion_length, or first train the model to end its completions",
            )
        )
    unchecked: list[str] = []
    if why := subject.lacks("loss"):
        unchecked.append(f"loss/*: {why}")
    else:
        findings += _gradient(subject, expected, unchecked, had=bool(findings))
    lines = (f"masks: {int(trained.sum())} of {int(sampled.sum())} sampled tokens are trained",)
    return Outcome("masks", tuple(findings), figures, lines, tuple(unchecked))


def _ids_of_ends(subject: TrlSubject) -> set[int]:
    return {*subject.policy.eos_ids, subject.policy.pad_id}


def _mask_tensor(expected: Tensor, trained: Tensor) -> Iterator[Finding]:
    foreign, missing = int((trained & ~expected).sum()), int((expected & ~trained).sum())
    if foreign or missing:
        empty = int((expected.any(1) & ~trained.any(1)).sum())
        whole = f"; {empty} completions have no trained token" if empty else ""
        yield finding(
            "mask/not-actions",
            f"{foreign} of {int(trained.sum())} trained tokens were not sampled, and {missing} of "
            f"{int(expected.sum())} sampled tokens are not trained{whole}",
            "the mask of the loss is not the mask of the sampled tokens",
            "leave completion_mask (and tool_mask) as GRPOTrainer makes them, or fix the method that changes them: "
            "they must be 1 on sampled tokens, including the end token, and 0 elsewhere",
        )


def _ends(subject: TrlSubject) -> Iterator[Finding]:
    """Find text after an end token, and a template whose end token ends no completion.

    With tools, every turn has its own end token.
    """
    trainer, texts = subject.trainer, [c.tokens for group in subject.groups for c in group.completions]
    named = getattr(trainer.model.generation_config, "eos_token_id", None)
    declared = {*(named if isinstance(named, list) else [named]), trainer._tokenizer.eos_token_id} - {None}
    ends = declared | set(subject.policy.eos_ids)
    after = [len(t) - 1 - next(i for i, token in enumerate(t) if token in ends) for t in texts if ends & {*t[:-1]}]
    if after:
        yield finding(
            "mask/end",
            f"{len(after)} of {len(texts)} completions continue after an end token, with {sum(after)} tokens in total",
            "generation does not stop at the end token, or completions are not truncated there",
            "list every end token in eos_token_ids and generation_kwargs, and truncate completions at the first one",
        )
    token = template_end(subject)
    if token is not None and token not in subject.policy.eos_ids:
        yield finding(
            "model/end-token",
            f"the chat template ends the assistant's turn with {trainer._tokenizer.convert_ids_to_tokens(token)!r} (id "
            f"{token}), which does not end a completion (eos_token_ids={trainer.eos_token_ids}); "
            f"{sum(token in tokens[:-1] for tokens in texts)} of {len(texts)} completions continue after it",
            "the tokenizer's eos_token and the model's generation_config name another end token than the template",
            f"set model.generation_config.eos_token_id to a list with {token} before the trainer is built",
        )


def template_end(subject: TrlSubject) -> int | None:
    """The first special token after an assistant's text in the chat template, if prompts are conversations."""
    tokenizer = subject.policy.tokenizer
    chat = is_conversational({"prompt": subject.prompts[0]})
    marks = turn_marks(tokenizer, own_template(tokenizer)) if chat else None
    ids = tokenizer(marks.end, add_special_tokens=False)["input_ids"] if marks else []
    return next((int(token) for token in ids if token in tokenizer.all_special_ids), None)


def _gradient(subject: TrlSubject, expected: Tensor, unchecked: list[str], *, had: bool) -> Iterator[Finding]:
    """Check ∂loss/∂logp of the first microbatch, with advantages of both signs and without the KL term."""
    trainer, limits, micro = subject.trainer, subject.thresholds, subject.micro(subject.batch)
    micro |= {"advantages": signs(micro["advantages"])}
    given = expected[: len(micro["completion_ids"])]
    gradient = subject.logp_gradient(micro, beta=0.0)
    leaks = int(((gradient != 0) & ~given).sum())
    if leaks and not had:
        yield finding(
            "mask/not-actions",
            f"the loss has a gradient at {leaks} tokens that were not sampled, although the mask is correct",
            "a term of the loss is not multiplied by the mask",
            "multiply every term in _compute_loss by completion_mask and tool_mask",
        )
    if trainer.top_entropy_quantile < 1.0 or trainer.off_policy_mask_threshold is not None:
        why = "top_entropy_quantile or off_policy_mask_threshold excludes tokens"
        unchecked.append(f"loss/no-gradient, loss/sign: {why}")
        return
    advantage = micro["advantages"] if micro["advantages"].dim() == 2 else micro["advantages"][:, None]
    pushed = (-gradient * advantage)[given & action_mask(micro)]
    dead, wrong = (float(where.double().mean()) if len(pushed) else 0.0 for where in (pushed == 0, pushed < 0))
    if dead > limits["loss_dead_tokens"]:
        yield finding(
            "loss/no-gradient",
            f"at ratio 1 the loss has no gradient at {100 * dead:.0f} % of the trained tokens that have an advantage",
            "the loss or one of its terms is detached",
            "return TRL's loss from _compute_loss, or do not detach the log-probabilities in your own loss",
        )
    elif wrong > limits["loss_wrong_way"]:
        yield finding(
            "loss/sign",
            f"at ratio 1 the loss pushes {100 * wrong:.0f} % of the trained tokens against their advantage",
            "the sign of the loss or of the advantages is reversed",
            "minimize minus the ratio times the advantage",
        )


__all__ = ["measure_masks", "measure_rewards", "measure_texts"]
