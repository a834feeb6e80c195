"""Reduce the batch for a large model, so that a preflight takes minutes: fewer and shorter completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import pstdev

from keel.base.types import Completion, Group
from keel.doctor.keel_subject import KeelSubject

PASS_FLOP = 1.1e11  # FLOP of one forward over the batch: some seconds on one CPU core; a preflight needs about fifty
QUICK_SHARE = 1 / 4
GPU_TIMES = 1000
LEAST_GROUPS, LEAST_TOKENS = 2, 16


def within_budget(setup: KeelSubject, *, quick: bool = False) -> KeelSubject:
    """Return the setup unchanged if a forward over its batch is cheap, else one with fewer and shorter completions.

    Rewards and stop reasons of the full completions are kept. Groups whose rewards differ most are preferred, because
    an update needs advantages. Comparing two passes needs few tokens.
    """
    limit = token_budget(setup, quick)
    groups = sorted(setup.groups, key=lambda group: -pstdev(reward.total for reward in group.rewards))
    while len(groups) > LEAST_GROUPS and _tokens(groups) > limit:
        groups.pop()
    rows = sum(len(group.completions) for group in groups)
    prompts = sum(len(group.prompt_tokens) * len(group.completions) for group in groups)
    length = max(LEAST_TOKENS, int(limit - prompts) // rows)
    longest = max(len(c.tokens) for group in groups for c in group.completions)
    if len(groups) == len(setup.groups) and longest <= length:
        return setup
    shorter = [
        replace(group, completions=tuple(_cut(setup, completion, length) for completion in group.completions))
        for group in groups
    ]
    sampling = setup.built.sampling
    if longest > length:
        sampling = replace(sampling, max_completion_length=min(sampling.max_completion_length, length))
    return replace(
        setup,
        built=replace(setup.built, collector=replace(setup.built.collector, sampling=sampling)),
        batch=setup.pack(shorter),
        cut_from=setup,
        of_batch={},
    )


def token_budget(setup: KeelSubject, quick: bool) -> float:
    """Number of tokens that a forward can afford, by the size of the model and its device."""
    size = sum(parameter.numel() for parameter in setup.policy.model.parameters())
    times = (QUICK_SHARE if quick else 1.0) * (1 if setup.policy.device.type == "cpu" else GPU_TIMES)
    return times * PASS_FLOP / (2 * size)


def budget_note(setup: KeelSubject, whole: KeelSubject) -> str:
    """One line that says what was left out."""
    rows, length = len(setup.batch.completions), max(len(c.tokens) for c in setup.batch.completions)
    return (
        f"passes over the model were tried on {rows} of {len(whole.batch.completions)} completions, up to {length} "
        "tokens of each: it is large for this device"
    )


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(group.prompt_tokens) + len(c.tokens) for group in groups for c in group.completions)


def _cut(setup: KeelSubject, completion: Completion, length: int) -> Completion:
    """The first tokens of a completion, also a sample of the policy, with the full completion's stop reason."""
    if len(completion.tokens) <= length:
        return completion
    tokens = completion.tokens[:length]
    return replace(
        completion,
        tokens=tokens,
        action=completion.action[:length],
        sample_logp=completion.sample_logp[:length],
        filtered_logp=completion.filtered_logp[:length],
        text=setup.policy.tokenizer.decode(tokens, skip_special_tokens=True),
    )
