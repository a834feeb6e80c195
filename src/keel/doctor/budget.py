"""A batch that a large model can be tried on within minutes: fewer and shorter completions of those sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import pstdev

from keel.base.types import Completion, Group
from keel.doctor.keel_subject import KeelSubject

PASS_FLOP = 1.1e11  # one forward over the batch: some seconds on a core, and a preflight takes some fifty
QUICK_SHARE = 1 / 4
GPU_TIMES = 1000
LEAST_GROUPS, LEAST_TOKENS = 2, 16


def within_budget(setup: KeelSubject, *, quick: bool = False) -> KeelSubject:
    """The setup as it is where a pass over its batch is cheap; else one of fewer completions, cut where they are long.

    Rewards and ends stay those of the whole completions, and the groups whose rewards differ most are preferred: what
    is compared pass against pass needs few tokens, and an update needs advantages.
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
    """Tokens of a batch whose forward is within reach, by the size of the model and the device it is on."""
    size = sum(parameter.numel() for parameter in setup.policy.model.parameters())
    times = (QUICK_SHARE if quick else 1.0) * (1 if setup.policy.device.type == "cpu" else GPU_TIMES)
    return times * PASS_FLOP / (2 * size)


def budget_note(setup: KeelSubject, whole: KeelSubject) -> str:
    """What was left out, as a line."""
    rows, length = len(setup.batch.completions), max(len(c.tokens) for c in setup.batch.completions)
    return (
        f"passes over the model were tried on {rows} of {len(whole.batch.completions)} completions, up to {length} "
        "tokens of each: it is large for this device"
    )


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(group.prompt_tokens) + len(c.tokens) for group in groups for c in group.completions)


def _cut(setup: KeelSubject, completion: Completion, length: int) -> Completion:
    """The beginning of a completion, which the policy has sampled as well; how the whole one ended stays."""
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
