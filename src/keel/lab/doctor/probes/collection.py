"""Collection: does the model write anything that the task can read, and do the rewards tell completions apart?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev

import torch

from keel.base.thresholds import Thresholds
from keel.base.types import Completion, Group, Reward
from keel.lab.doctor.advice import either, times
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.result import ProbeResult
from keel.lab.doctor.setup import ProbeSetup

_SAME = 1e-9


def probe_collection(setup: ProbeSetup, thresholds: Thresholds) -> ProbeResult:
    """Parse rate, end rate, entropy against uniform, spread and cliffs of the rewards, on one batch."""
    rewards = [reward for group in setup.groups for reward in group.rewards]
    totals = [reward.total for reward in rewards]
    ended = [completion.stop_reason != "length" for completion in setup.batch.completions]
    spreads = [pstdev(reward.total for reward in group.rewards) for group in setup.groups]
    entropy, gold = _entropy(setup), _gold_logp(setup)
    uniform = math.log(setup.vocabulary)
    figures = {
        "parse_rate": fmean(reward.parsed for reward in rewards),
        "end_rate": fmean(ended),
        "entropy_share": entropy / uniform,
        "gold_share": -gold / uniform,
        "reward_mean": fmean(totals),
        "within_group_std": fmean(spreads),
        "zero_variance": fmean(spread <= _SAME for spread in spreads),
    }
    earned = _gold_rewards(setup)
    findings = [
        *_failed(setup),
        *_random(figures, setup.vocabulary, thresholds),
        *_misfit(figures, thresholds),
        *_cliff(totals, rewards, earned, thresholds),
        *_truncated(figures, setup, thresholds),
        *_unparseable(figures, len(rewards), thresholds),
        *_gold(totals, earned),
        *_constant(setup, figures, thresholds),
        *_fickle(setup),
    ]
    lines = (
        f"collection: {len(rewards)} completions, {100 * figures['parse_rate']:.0f} % parse, "
        f"{100 * figures['end_rate']:.0f} % end by themselves, reward {figures['reward_mean']:.3g} ± "
        f"{figures['within_group_std']:.3g} within groups, entropy {100 * figures['entropy_share']:.0f} % of uniform",
        *(f"  {completion.text!r} → {reward.total:g}" for completion, reward in _examples(setup.groups)),
    )
    return ProbeResult("collection", tuple(findings), figures, lines)


def _examples(groups: Sequence[Group]) -> list[tuple[Completion, Reward]]:
    return [(group.completions[0], group.rewards[0]) for group in groups[:2]]


def _entropy(setup: ProbeSetup) -> float:
    """Mean entropy in nats per token at temperature 1: a high temperature is no sign of random weights."""
    total, count = 0.0, 0
    for _, logits in setup.each_logits():
        logp = logits.log_softmax(-1)
        total, count = total - float((logp.exp() * logp).sum()), count + len(logp)
    return total / max(count, 1)


def _gold_logp(setup: ProbeSetup) -> float:
    """Mean log-probability per token of the gold answers: what any trained model finds likelier than blind guessing."""
    tokenizer = setup.policy.tokenizer
    scores = []
    for group in setup.groups:
        ids = tuple(tokenizer(setup.run.task.gold(group.problem), add_special_tokens=False)["input_ids"])
        if not ids:
            continue
        gold = Completion(ids, (True,) * len(ids), (0.0,) * len(ids), (0.0,) * len(ids), "", "eos")
        single = Group(group.problem, group.prompt_tokens, (gold,))
        scores.append(setup.forward_logp([single], temperature=1.0)[0])
    return float(torch.cat(scores or [torch.zeros(1)]).mean())


def _gold_rewards(setup: ProbeSetup) -> list[float]:
    """What the gold answers earn by the configured rewards; empty where a group has to be compared as a whole."""
    if setup.config.reward.aggregate != "sum" or setup.config.reward.shuffle is not None:
        return []
    earned = []
    for group in setup.groups:
        judged = setup.built.judge.judge(group.problem, [[setup.run.task.gold(group.problem)]])
        if judged:
            earned.append(judged[0].total)
    setup.built.judge.drain()
    return earned


def _failed(setup: ProbeSetup) -> Iterator[Finding]:
    if not setup.failures:
        return
    first = setup.failures[0]
    count = f"{len(setup.failures)} of {len(setup.batch.completions)} completions"
    if first.kind == "invalid" and any(name in first.cause.lower() for name in ("nan", "inf", "finite")):
        yield finding(
            "reward/non-finite",
            f"{count} got no finite reward; the first: {first}",
            "the reward divides by zero, takes the logarithm of 0, or passes a NaN on",
            "mend the reward function; reward.on_error would only hide it",
        )
        return
    yield finding(
        "reward/failed",
        f"{count} could not be judged; the first: {first}",
        f"the reward {first.function} raises, returns something that is no number, or does not return",
        "mend the reward function, or raise reward.timeout_s if it is slow",
    )


def _random(figures: dict[str, float], vocabulary: int, thresholds: Thresholds) -> Iterator[Finding]:
    """Random weights are no better than blind guessing on the gold answers, and write nothing that can be read.

    A trained model of high entropy still finds a gold answer far likelier than guessing does.
    """
    limit = thresholds["entropy_uniform_share"]
    if not (figures["gold_share"] > limit and figures["entropy_share"] > limit):
        return
    yield finding(
        "output/random-weights",
        f"entropy is {100 * figures['entropy_share']:.0f} % of ln({vocabulary}), and gold answers have "
        f"{figures['gold_share']:.2f} times the surprise of blind guessing; {100 * figures['parse_rate']:.0f} % of "
        "the completions parse",
        "the weights are random or were not loaded: the model writes noise",
        "load a trained checkpoint in model.name, or give the run a warmstart",
    )


def _misfit(figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """A model that is sure of what it writes, cannot be read, and finds gold answers no likelier than guessing does."""
    limit = thresholds["entropy_uniform_share"]
    if figures["entropy_share"] > limit or not figures["gold_share"] > limit:
        return
    if figures["parse_rate"] >= thresholds["parse_rate_misfit"]:
        return  # it answers in the right form, only wrongly
    yield finding(
        "prompt/format",
        f"gold answers have {figures['gold_share']:.2f} times the surprise of blind guessing and "
        f"{100 * figures['parse_rate']:.0f} % of the completions parse, although the model is sure of what it "
        f"writes (entropy {100 * figures['entropy_share']:.0f} % of uniform)",
        "the prompt's format or the tokenizer does not fit the model: spaces at its end, a chat template too many "
        "or too few, token ids of another vocabulary",
        "render the prompts as the model was trained on them (data.chat_template, data.system_prompt, the task's "
        "prompt), and load the tokenizer that belongs to model.name",
    )


def _cliff(
    totals: Sequence[float], rewards: Sequence[Reward], gold: Sequence[float], thresholds: Thresholds
) -> Iterator[Finding]:
    """Nearly everything earns one negative value whose size rivals what a right answer earns, or one dwarfs it."""
    lowest = min(totals)
    share = fmean(total <= lowest + _SAME for total in totals)
    best = max([*gold, *totals, 0.0])
    scale = best if best > 0 else abs(lowest)
    fails = fmean(not r.parsed for r in rewards if r.total <= lowest + _SAME)
    deep = -lowest > thresholds["reward_cliff_depth"] * scale
    wide = share >= thresholds["reward_cliff_share"] and -lowest >= thresholds["reward_cliff_penalty"] * scale
    if lowest >= 0 or not (deep or wide):
        return
    yield finding(
        "reward/cliff",
        f"{100 * share:.0f} % of the completions earn {lowest:g} ({100 * fails:.0f} % of those do not parse), "
        f"a right answer {best:g}",
        "failing costs far more than success earns: what is learned is to avoid it, and differences among the rest "
        "are lost in rounding"
        if deep
        else "failing costs about as much as success earns, so that one lucky completion rules the update of its group",
        "pay malformed output little less than a wrong answer (−0.3 or 0), in graded steps; "
        "reward.warmup_steps eases it in",
    )


def _truncated(figures: dict[str, float], setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    share = 1 - figures["end_rate"]
    if share <= thresholds["truncated_completions"]:
        return
    limit, turn = setup.config.rollout.max_completion_length, setup.config.rollout.max_turn_length
    a_turn = "" if turn is None else f", or a turn at max_turn_length={turn}"
    yield finding(
        "output/truncated",
        f"{100 * share:.0f} % of the completions were cut at max_completion_length={limit}{a_turn}"
        f"{_mislabelled(setup)}",
        "the limit is too short for the answers, or the model never writes its end token",
        either(
            times(setup.config.to_dict(), "rollout.max_completion_length", 2, "twice"),
            times(setup.config.to_dict(), "rollout.max_turn_length", 2, "twice") if turn else "",
            "check the end token and rollout.stop",
        ),
        severity="error" if share > thresholds["truncated_completions_error"] else "warning",
    )


def _mislabelled(setup: ProbeSetup) -> str:
    """Completions that the engine calls cut although they end with an end token."""
    ends = set(setup.policy.eos_ids)
    cut = [c for c in setup.batch.completions if c.stop_reason == "length"]
    wrong = sum(bool(c.tokens) and c.tokens[-1] in ends for c in cut)
    return f"; {wrong} of {len(cut)} end with an end token all the same" if wrong else ""


def _unparseable(figures: dict[str, float], count: int, thresholds: Thresholds) -> Iterator[Finding]:
    rate = figures["parse_rate"]
    if rate >= thresholds["parse_rate_warning"]:
        return
    yield finding(
        "output/unparseable",
        f"{100 * rate:.0f} % of {count} completions have a form that the task can read",
        "the model does not know the form that is asked for",
        "ask for the form in the prompt (data.system_prompt), start with a warmstart, or reward the form by itself",
        severity="error" if rate < thresholds["parse_rate"] else "warning",
    )


def _gold(totals: Sequence[float], gold: Sequence[float]) -> Iterator[Finding]:
    """The gold answer must not earn less than what the model writes."""
    if not gold or fmean(gold) >= fmean(totals) - _SAME:
        return
    yield finding(
        "reward/gold",
        f"gold answers earn {fmean(gold):.3g} on average, the model's completions {fmean(totals):.3g}",
        "the reward pays for something else than the answer, or its sign is reversed",
        "check the reward with task.gold(problem); it must earn the most",
        severity="error" if fmean(gold) <= min(totals) + _SAME else "warning",
    )


def _constant(setup: ProbeSetup, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """Groups without spread; where all of the batch's are, further ones are sampled first."""
    groups: Sequence[Group] = setup.groups
    if figures["zero_variance"] > thresholds["zero_variance_groups"] and not setup.failures:
        more = setup.run.task.sample(8, seed=setup.config.run.seed, step=1)
        groups = [*groups, *setup.collect(more, step=1, sampling=setup.built.sampling)]
    spreads = [pstdev(reward.total for reward in group.rewards) for group in groups]
    flat = fmean(spread <= _SAME for spread in spreads)
    if flat > thresholds["zero_variance_groups"]:
        values = sorted({round(reward.total, 6) for group in groups for reward in group.rewards})
        yield finding(
            "reward/constant",
            f"in {100 * flat:.0f} % of {len(groups)} groups all completions earn the same (seen: {values[:4]})",
            "without a spread there is no advantage and no policy gradient",
            either(
                "choose problems that the model solves now and then",
                "reward partial success",
                times(setup.config.to_dict(), "rollout.num_generations", 2, "twice"),
            ),
        )
        return
    if fmean(spreads) < thresholds["reward_spread"]:
        yield finding(
            "reward/weak",
            f"the mean standard deviation within groups is {fmean(spreads):.3g} on {len(groups)} groups",
            "rewards of a problem hardly differ, so that the update is mostly noise",
            either(
                "reward partial success",
                "choose harder or easier problems",
                times(setup.config.to_dict(), "rollout.num_generations", 2, "twice"),
            ),
        )


def _fickle(setup: ProbeSetup) -> Iterator[Finding]:
    """The same completions, judged again and in the other order, must earn the same."""
    if setup.failures or setup.multi_turn or setup.config.reward.shuffle is not None:
        return
    worst = 0.0
    for group in setup.groups:
        turns = [[completion.text] for completion in group.completions]
        first = setup.built.judge.judge(group.problem, turns)
        again = setup.built.judge.judge(group.problem, turns[::-1])
        if first and again:
            worst = max(worst, *(abs(a.total - b.total) for a, b in zip(first, again[::-1], strict=True)))
    setup.built.judge.drain()
    if worst <= _SAME:
        return
    yield finding(
        "reward/fickle",
        f"the same completions, judged twice, earn rewards that differ by up to {worst:.3g}",
        "the reward is random, or depends on the order of completions or on what it judged before",
        "make the reward a function of the problem and the text alone",
    )
