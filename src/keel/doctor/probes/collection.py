"""Check that the task can parse the sampled completions, and that their rewards differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev

from keel.base.types import Completion, Group, Reward, RewardFailure
from keel.doctor.advice import either, times
from keel.doctor.evidence import (
    SAME,
    at_least,
    between,
    chance_of_all_but,
    level,
    more_groups,
    share_over,
)
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.pairing import alignment_findings
from keel.doctor.probes.episodes import episode_findings, rejudged_findings
from keel.doctor.probes.exploits import exploit_findings, idle_findings
from keel.doctor.probes.gold_rewards import (
    JudgedGold,
    gold_findings,
    judged_golds,
    reward_scale,
    solved_at,
    unpaid_golds,
)
from keel.doctor.probes.misfit import (
    foreign_findings,
    misfit_findings,
    parsed_without_stop,
    random_findings,
    unpaid_findings,
)
from keel.doctor.probes.model import golds, read_golds

_NOT_FINITE = re.compile(r"(?:\bis|^returned) -?(?:nan|inf)\b")  # the value in a cause of `as_reward`
# If no more can be sampled, no parsed one of this many completions, or no spread in this many groups, is a warning.
_NONE_OF_COMPLETIONS, NONE_OF_GROUPS = 32, 8


def probe_collection(setup: KeelSubject) -> Outcome:
    """Measure parse rate, end rate, entropy relative to uniform, spread and cliffs of the rewards, on one batch."""
    rewards = [reward for group in setup.groups for reward in group.rewards]
    totals = [reward.total for reward in rewards]
    ended = [completion.stop_reason != "length" for completion in setup.batch.completions]
    spreads = [pstdev(reward.total for reward in group.rewards) for group in setup.groups]
    entropy, gold = _entropy(setup), fmean(read_golds(setup).logp) if golds(setup) else 0.0
    uniform = math.log(setup.vocabulary)
    figures = {
        "parse_rate": fmean(reward.parsed for reward in rewards),
        "end_rate": fmean(ended),
        "entropy_share": entropy / uniform,
        "gold_share": -gold / uniform,
        "reward_mean": fmean(totals),
        "within_group_std": fmean(spreads),
        "zero_variance": fmean(spread <= SAME for spread in spreads),
    }
    judged = judged_golds(setup)
    earned = [row.gold for row in judged] if setup.config.reward.aggregate == "sum" else []
    setup.shared["gold size"] = max(map(abs, earned), default=0.0) or 1.0
    alignment, lacking = [*alignment_findings(setup)], unpaid_golds(judged, setup.thresholds)
    of_gold = [*(gold_findings(setup, judged, lacking) if lacking else exploit_findings(setup, judged))]
    unpaid = [*unpaid_findings(setup, earned)]  # judgements are limited, so gold answers come first
    findings = [
        *_failed(setup),
        *random_findings(figures, setup.vocabulary, setup.thresholds),
        *misfit_findings(setup, figures),
        *unpaid,
        *alignment,
        *(() if alignment or unpaid else foreign_findings(setup, figures, earned)),
        *of_gold,
        *([*_cliff(setup, earned)] or empty_cliff_findings(setup, judged)),
        *_truncated(setup),
        *episode_findings(setup),
        *(() if any(found.code == "reward/exploit" for found in of_gold) else idle_findings(setup)),
        *_unparseable(setup),
        *_spread(setup, reward_scale(setup, judged), solved_at(setup, judged)),
        *rejudged_findings(setup),
    ]
    lines = (
        f"collection: {len(rewards)} completions, {100 * figures['parse_rate']:.0f} % parse, "
        f"{100 * figures['end_rate']:.0f} % end before the length limit, reward {figures['reward_mean']:.3g} ± "
        f"{figures['within_group_std']:.3g} within groups, entropy {100 * figures['entropy_share']:.0f} % of uniform",
        *(f"  {completion.text!r} → {reward.total:g}" for completion, reward in _examples(setup.groups)),
    )
    return Outcome("collection", tuple(findings), figures, lines)


def _examples(groups: Sequence[Group]) -> list[tuple[Completion, Reward]]:
    return [(group.completions[0], group.rewards[0]) for group in groups[:2]]


def _entropy(setup: KeelSubject) -> float:
    """Mean entropy in nats per token at temperature 1, so that a high temperature does not look like random weights."""
    total, count = 0.0, 0
    for _, logits in setup.each_logits():
        logp = logits.log_softmax(-1)
        total, count = total - float((logp.exp() * logp).sum()), count + len(logp)
    return total / max(count, 1)


def _failed(setup: KeelSubject) -> Iterator[Finding]:
    """Reward calls that failed, on completions or on gold answers of other problems."""
    golds: list[RewardFailure] = setup.shared.get("failed golds", [])
    if not setup.failures and not golds:
        return
    first = (*setup.failures, *golds)[0]
    count = f"{len(setup.failures)} of {len(setup.batch.completions)} completions"
    if not setup.failures:
        count = f"gold answers of {len(golds)} problems"
    if first.kind == "invalid" and _NOT_FINITE.search(first.cause):
        yield finding(
            "reward/non-finite",
            f"{count} got no finite reward; the first: {first}",
            "the reward divides by zero, takes the logarithm of 0, or returns a NaN that it computed",
            "fix the reward function; reward.on_error would only hide it",
        )
        return
    yield finding(
        "reward/failed",
        f"{count} could not be judged; the first: {first}",
        f"the reward {first.function} raises an error, returns a value that is not a number, or does not return",
        "fix the reward function, or raise reward.timeout_s if it is slow",
    )


_LESS = (
    "give malformed output a reward only slightly below that of a wrong answer, such as −0.3 or 0, and partial credit "
    "for a partly correct format"
)


def _cliff(setup: KeelSubject, gold: Sequence[float]) -> Iterator[Finding]:
    """A reward cliff: most completions get a penalty as large as a right answer's reward, or some a far larger one."""
    totals = [reward.total for group in setup.groups for reward in group.rewards]
    lowest, best = min(totals), max([*gold, *totals, 0.0])
    scale = best if best > 0 else abs(lowest)
    # no cliff if a right answer earns no more
    if (
        lowest >= 0
        or (gold and max(gold) <= lowest + SAME)
        or -lowest < setup.thresholds["reward_cliff_penalty"] * scale
    ):
        return
    deep = -lowest >= setup.thresholds["reward_cliff_depth"] * scale

    def at_the_bottom(group: Group) -> float:
        return fmean(reward.total <= lowest + SAME for reward in group.rewards)

    steep = best > 0 and -lowest >= setup.thresholds["reward_cliff_steep"] * best and _drops(lowest, [*gold, *totals])
    mostly = "reward_cliff_share", "cliff_parsed"
    alarm, usual = (setup.thresholds[name] for name in (("healthy_solved",) * 2 if steep else mostly))
    enough = 1.0 if deep else level(setup.thresholds)  # one completion is enough for a very large penalty
    sampled = share_over(setup, "reward/cliff", at_the_bottom, alarm - SAME, usual, enough)
    if not deep and not sampled.sure:
        return
    fails = fmean(not r.parsed for group in sampled.groups for r in group.rewards if r.total <= lowest + SAME)
    yield finding(
        "reward/cliff",
        f"{between(sampled.shares)} of the completions of {len(sampled.groups)} groups earn {lowest:g} "
        f"({100 * fails:.0f} % of those do not parse), and a correct answer earns {best:g}",
        "the penalty for failure is far larger than the reward for success: the policy learns to avoid failure, and "
        "differences among the other rewards are lost in rounding"
        if deep
        else f"the penalty for failure is {-lowest / best:.2g} times the reward for success, so an attempt pays only "
        "if most attempts succeed"
        if steep
        else (
            "the penalty for failure is about as large as the reward for success, so one correct completion dominates "
            "the update of its group"
        ),
        f"{_LESS}; reward.warmup_steps increases the weight of rewards gradually",
        severity=None if deep or sampled.mean >= setup.thresholds["reward_cliff_share"] else "warning",
    )


def _drops(lowest: float, totals: Sequence[float]) -> bool:
    """Whether the lowest reward is further below the others than they differ among themselves."""
    others = [total for total in totals if total > lowest + SAME]
    return bool(others) and min(others) - lowest > max(others) - min(others)


def empty_cliff_findings(setup: KeelSubject, judged: Sequence[JudgedGold]) -> Iterator[Finding]:
    """No completion is at the cliff, but an empty one would earn a penalty far beyond a right answer's reward."""
    if not judged or setup.config.reward.aggregate != "sum":
        return
    empty, best = max(row.empty for row in judged), max(row.gold for row in judged)
    totals = [reward.total for group in setup.groups for reward in group.rewards]
    span = best - min((total for row in judged for total in row.others), default=best)
    if best <= SAME * abs(empty) or -empty < setup.thresholds["reward_cliff_depth"] * max(best, span):
        return
    if min(totals, default=0.0) > empty:
        yield finding(
            "reward/cliff",
            f"an empty answer earns {empty:g} or less on all of {len(judged)} problems, a correct one earns at most "
            f"{best:g}, and none of {len(totals)} completions earns as little",
            "the first completion that cannot be parsed will dominate the update, and differences among the other "
            "rewards will be lost",
            f"{_LESS}; no change is needed if no completion can be empty",
            severity="warning",
        )


def _truncated(setup: KeelSubject) -> Iterator[Finding]:
    def cut(group: Group) -> float:
        return fmean(completion.stop_reason == "length" for completion in group.completions)

    alarm, usual = setup.thresholds["truncated_completions"], setup.thresholds["healthy_truncated"]
    sampled = share_over(setup, "output/truncated", cut, alarm, usual, level(setup.thresholds))
    if not sampled.sure:
        return
    limit, turn = setup.config.rollout.max_completion_length, setup.config.rollout.max_turn_length
    a_turn = "" if turn is None else f", or a turn at max_turn_length={turn}"
    yield finding(
        "output/truncated",
        f"{between(sampled.shares)} of the completions of {len(sampled.shares)} problems were cut at "
        f"max_completion_length={limit}{a_turn}",
        "the limit is too short for the answers, or the model never writes its end token",
        either(
            times(setup.config.to_dict(), "rollout.max_completion_length", 2, "twice"),
            times(setup.config.to_dict(), "rollout.max_turn_length", 2, "twice") if turn else "",
            "check the end token and rollout.stop",
        ),
        severity="error" if sampled.mean > setup.thresholds["truncated_completions_error"] else "warning",
        share=sampled.mean,
    )


def _unparseable(setup: KeelSubject) -> Iterator[Finding]:
    def unread(group: Group) -> float:
        return fmean(not reward.parsed for reward in group.rewards)

    healthy, alarm = setup.thresholds["healthy_parsed"], 1 - setup.thresholds["parse_rate_warning"]
    sampled = share_over(setup, "output/unparseable", unread, alarm, 1 - healthy, level(setup.thresholds))
    groups, completions = sampled.groups, sum(len(group.rewards) for group in sampled.groups)
    if not sampled.sure and not (sampled.mean == 1 and completions >= _NONE_OF_COMPLETIONS):
        return
    unstopped = parsed_without_stop(setup)
    yield finding(
        "output/unparseable",
        f"none of {completions} completions of {len(groups)} problems can be parsed by the task (p-value "
        f"{sampled.chance:.1g} if {100 * healthy:.0f} % can be parsed)"
        if sampled.in_doubt
        else f"{between([1 - share for share in sampled.shares])} of the completions of {len(groups)} problems can be "
        "parsed by the task" + ("" if unstopped is None else f", and {100 * unstopped:.0f} % without rollout.stop"),
        "the model does not know the requested format"
        if unstopped is None
        else f"one of rollout.stop={list(setup.sampling.stop)} occurs inside answers and cuts them off",
        "request the format in the prompt (data.system_prompt), add a warmstart section, or reward the format "
        "separately"
        if unstopped is None
        else propose("set {}, or use stop texts that occur only after an answer or a call", {"rollout.stop": []}),
        severity="error" if 1 - sampled.mean < setup.thresholds["parse_rate"] and sampled.sure else "warning",
        share=sampled.mean,
    )


def _spread(setup: KeelSubject, scale: float, gold: float | None) -> Iterator[Finding]:
    """Groups with no or very little spread. Further groups are sampled until chance is excluded.

    The null hypothesis: a completion's reward differs from its group's usual one with probability `healthy_solved`.
    Small groups are often equal by chance, large ones are not.
    """
    rare = setup.thresholds["healthy_solved"]
    smallest = max(setup.thresholds["reward_spread"] * scale, SAME)

    def deviations(groups: Sequence[Group]) -> list[float]:
        return [pstdev(reward.total for reward in group.rewards) for group in groups]

    def chance(groups: Sequence[Group]) -> float:
        differing = sum(deviation >= smallest for deviation in deviations(groups))
        alike = [(1 - rare) ** len(group.rewards) + rare ** len(group.rewards) for group in groups]
        return chance_of_all_but(differing, alike)

    def undecided(groups: Sequence[Group]) -> bool:
        few = fmean(deviation < smallest for deviation in deviations(groups)) > setup.thresholds["zero_variance_groups"]
        return few and chance(groups) > level(setup.thresholds)

    if setup.failures:
        return
    groups = more_groups(setup, "reward/constant", undecided)
    spreads = deviations(groups)
    few = fmean(deviation < smallest for deviation in spreads)
    in_doubt = chance(groups) > level(setup.thresholds)
    none = max(spreads) <= SAME and len(groups) >= NONE_OF_GROUPS
    if few <= setup.thresholds["zero_variance_groups"] or (in_doubt and not none):
        return
    flat = fmean(deviation <= SAME for deviation in spreads)
    more = times(setup.config.to_dict(), "rollout.num_generations", 2, "twice")
    by_chance = f"p-value {chance(groups):.1g} if one in {1 / rare:.0f} completions earns another reward"
    if flat <= setup.thresholds["zero_variance_groups"]:
        yield finding(
            "reward/weak",
            f"the mean standard deviation within groups is {fmean(spreads):.3g} on {len(groups)} groups, and under "
            f"{smallest:.3g} in {100 * few:.0f} % of them ({by_chance})",
            "the rewards of a problem hardly differ, so the update is mostly noise",
            either("reward partial success", "choose harder or easier problems", more),
        )
        return
    totals = [reward.total for group in groups for reward in group.rewards]
    values = sorted({round(total, 6) for total in totals})
    same = (
        f"in {100 * flat:.0f} % of {len(groups)} groups, all completions earn the same reward (seen: {values[:4]}; "
        f"{by_chance})"
    )
    means = (
        [fmean(reward.total >= gold - SAME for reward in group.rewards) for group in groups]
        if gold is not None
        else [0.0]
    )
    if at_least(means, level(setup.thresholds)) > 1 - setup.thresholds["healthy_parsed"] and fmean(means) > 1 - rare:
        yield finding(
            "reward/constant",
            f"{same}: {between(means)} of the completions earn as much as a gold answer",
            "the model already solves these problems, so there is no advantage and nothing left to learn",
            either("choose harder problems", "make the reward stricter"),
            severity="warning",
        )
        return
    yield finding(
        "reward/constant",
        same,
        "if the rewards of a group are equal, there is no advantage and no policy gradient",
        either("choose problems that the model sometimes solves", "reward partial success", more),
        severity="warning" if in_doubt else None,
        share=flat,
    )


# ------------------------------------------------------------------------ length limits


def probe_truncation(setup: KeelSubject) -> Outcome:
    """Shares of the batch at the length limits. The collection probe reports truncated completions."""
    limit, near = setup.config.rollout.max_completion_length, setup.thresholds["near_limit_from"]
    completions = [c for group in setup.groups for c in group.completions]
    lengths = [len(c.tokens) for c in completions]
    prompts = [len(group.prompt_tokens) for group in setup.groups]
    longest_prompt = _prompt_limit(setup)
    figures = {
        "completions_cut": fmean(c.stop_reason == "length" for c in completions),
        "completions_near_limit": fmean(length >= near * limit for length in lengths),
        "prompts_cut": fmean("prompt_tokens_cut" in group.problem.info for group in setup.groups),
        "prompts_near_limit": fmean(longest_prompt is not None and n >= near * longest_prompt for n in prompts),
        "longest_prompt": float(max(prompts)),
        "longest_completion": float(max(lengths)),
    }
    lines = (
        f"completions: {figures['completions_cut']:.0%} cut at {limit} tokens, longest {max(lengths)}; prompts: "
        f"{figures['prompts_cut']:.0%} cut, longest {max(prompts)}"
        + (f" of {longest_prompt}" if longest_prompt is not None else ""),
    )
    return Outcome("truncation", tuple(_cut_prompts(figures, setup)), figures, lines)


def _prompt_limit(setup: KeelSubject) -> int | None:
    """The largest prompt length: the option, or the context length minus a completion."""
    if setup.config.data.max_prompt_length is not None:
        return setup.config.data.max_prompt_length
    context = setup.policy.context_length
    return None if context is None else context - setup.config.rollout.max_completion_length


def _cut_prompts(figures: dict[str, float], setup: KeelSubject) -> Iterator[Finding]:
    share = figures["prompts_cut"]
    if share <= setup.thresholds["truncated_prompts"]:
        return
    yield finding(
        "prompt/truncated",
        f"{share:.0%} of the prompts are cut to data.max_prompt_length={setup.config.data.max_prompt_length}",
        f"prompts are longer than the limit and data.truncation={setup.config.data.truncation} cuts them",
        either(
            times(setup.config.to_dict(), "data.max_prompt_length", 2, "twice"),
            "filter long problems out of the data",
        ),
        severity="error" if share > setup.thresholds["truncated_prompts_error"] else "warning",
    )
