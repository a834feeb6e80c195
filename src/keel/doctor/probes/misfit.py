"""A policy that does not fit the gold answers: random weights, an unknown format, or another kind of answers.

`figures` come from the collection probe: `gold_share` and `entropy_share` relative to uniform guessing, and
`parse_rate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from keel.base.types import Group
from keel.doctor.decide import by_mean
from keel.doctor.evidence import level, more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.episodes import unfinished
from keel.doctor.probes.model import gold_or_none
from keel.doctor.thresholds import Thresholds
from keel.envs.answers import last_number, plain_number

NUMBERS = 0.05  # least share of completions with their own gold answer's number, minus that with another's
LARGE = 64  # least vocabulary size; in smaller ones most tokens may be answers


def random_findings(figures: Mapping[str, float], vocabulary: int, thresholds: Thresholds) -> Iterator[Finding]:
    """Find weights that hardly beat uniform guessing on gold answers: random, or damaged if completions do not parse.

    A trained model with high entropy still assigns gold answers a far higher probability.
    """

    def blind(name: str) -> bool:  # False for NaN
        return figures["gold_share"] > thresholds[name] and figures["entropy_share"] > thresholds[name]

    unread = figures["parse_rate"] < thresholds["parse_rate_misfit"] and vocabulary >= LARGE
    random = blind("entropy_uniform_share")
    if random or (unread and blind("entropy_damaged_share")):
        yield finding(
            "output/random-weights",
            _read(figures),
            "the weights are random or were not loaded: the model writes noise"
            if random
            else "the weights are damaged (merged, quantized or converted badly), or were hardly trained",
            "load a trained checkpoint in model.name, or give the run a warmstart",
            severity=None if random else "warning",
        )


def misfit_findings(setup: KeelSubject, figures: Mapping[str, float]) -> Iterator[Finding]:
    """A confident model whose completions cannot be parsed and that does not beat uniform guessing on gold answers.

    Excluded: episodes that had not reached an answer, turns cut by a stop text, and completions that call tools as the
    prompt asks, which show that the model understands the prompt.
    """
    if not _sure_and_blind(figures, setup.thresholds) or figures["parse_rate"] >= setup.thresholds["parse_rate_misfit"]:
        return
    open_ended = [fmean(ended) for group in setup.groups if (ended := unfinished(setup, group))] or [0.0]
    called = fmean(float(c.counts.get("tool/calls", 0.0) > 0) for group in setup.groups for c in group.completions)
    if max(fmean(open_ended), called) > setup.thresholds["truncated_completions"]:
        return
    if "another template" in setup.shared or parsed_without_stop(setup) is not None:
        return  # both are reported by other findings
    yield finding(
        "prompt/format",
        _read(figures),
        "the prompt's format or the tokenizer does not fit the model: trailing spaces, a missing or repeated chat "
        "template, or token ids of another vocabulary",
        "render the prompts as the model was trained on them (data.chat_template, data.system_prompt, the task's "
        "prompt), and load the tokenizer that belongs to model.name",
    )


def foreign_findings(setup: KeelSubject, figures: Mapping[str, float], paid: Sequence[float]) -> Iterator[Finding]:
    """A confident model whose completions can be parsed, while gold answers are no more likely than random tokens.

    `paid` are the rewards of gold answers. If the model only lacks skill, right answers are still more likely than
    random tokens. If only its format differs, some completions earn a reward. Tasks without a data file are skipped:
    their answers cannot come from a wrong column.
    """
    if setup.config.data.path is None or setup.failures or setup.run.task.multi_turn or not paid:
        return
    if "another template" in setup.shared or not _sure_and_blind(figures, setup.thresholds):
        return
    best = max(reward.total for group in setup.groups for reward in group.rewards)
    if figures["parse_rate"] < setup.thresholds["parse_rate_misfit"] or not best < min(paid) / 2:
        return  # see `misfit_findings`
    examples = ", ".join(repr(str(group.problem.answer)[:20]) for group in setup.groups[:3])
    yield finding(
        "data/misaligned",
        f"{_read(figures)}; gold answers are {examples}, …; the best completion earns {best:.3g}, and a gold answer "
        f"{min(paid):.3g}",
        "the answers are read from a wrong place, such as another column of the data, or the model was trained on "
        "another task",
        "read some rows with question and answer; check data.columns",
    )


def unpaid_findings(setup: KeelSubject, paid: Sequence[float]) -> Iterator[Finding]:
    """Find completions that have their gold answer's number beyond chance but earn less than half of its reward."""
    if setup.failures or setup.run.task.multi_turn or not paid:
        return

    def best(groups: Sequence[Group]) -> float:
        return max(reward.total for group in groups for reward in group.rewards)

    def unpaid(groups: Sequence[Group]) -> list[float]:
        """The `_gains`; empty if a completion earns at least half of a gold answer's reward."""
        return _gains(setup, groups) if best(groups) < min(paid) / 2 else []

    def by_chance(gains: Sequence[float]) -> bool:
        return len(gains) < 2 or fmean(gains) <= NUMBERS or by_mean(gains) > level(setup.thresholds)

    def undecided(groups: Sequence[Group]) -> bool:
        return fmean(gains := unpaid(groups) or [0.0]) > NUMBERS and by_chance(gains)

    groups = more_groups(setup, "reward/gold", undecided)
    if by_chance(gains := unpaid(groups)):
        return
    yield finding(
        "reward/gold",
        f"on {len(gains)} problems, completions have their own gold answer's number {100 * fmean(gains):.0f} "
        f"percentage points more often than another problem's (p-value {by_mean(gains):.1g}); the best completion "
        f"earns {best(groups):.3g}, and a gold answer {min(paid):.3g}",
        "the reward compares texts, and gold answers have another format than completions",
        "write the answers of the data in the format of completions, compare values (task.answer, or your own "
        "reward), or request the format of the data in the prompt (data.system_prompt)",
    )


def _gains(setup: KeelSubject, groups: Sequence[Group]) -> list[float]:
    """For each problem, the share of completions that end with its own gold number, minus that with other problems'."""

    def number(text: str) -> str | None:
        return plain_number(last_number(text) or "")

    golds = [number((gold_or_none(setup.run.task, group.problem) or [""])[-1]) for group in groups]
    gains = []
    for own, group in zip(golds, groups, strict=True):
        pairs = zip(group.completions, group.rewards, strict=True)
        said = [number(completion.text) if reward.parsed else None for completion, reward in pairs]
        others = [fmean(n == gold for n in said) for gold in golds if gold not in (own, None)]
        if own is not None and others:
            gains.append(fmean(n == own for n in said) - fmean(others))
    return gains


def _sure_and_blind(figures: Mapping[str, float], thresholds: Thresholds) -> bool:
    limit = thresholds["entropy_uniform_share"]
    return figures["entropy_share"] <= limit and figures["gold_share"] > limit


def _read(figures: Mapping[str, float]) -> str:
    return (
        f"gold answers have {figures['gold_share']:.2f} times the NLL of uniform guessing, the model's entropy is "
        f"{100 * figures['entropy_share']:.0f} % of uniform, and {100 * figures['parse_rate']:.0f} % of its texts parse"
    )


def parsed_without_stop(setup: KeelSubject) -> float | None:
    """The parse rate of the batch when sampled without `rollout.stop`, if that fixes it.

    None if few completions end at a stop text unparsed, or if the rate stays low without stop texts.
    """
    if "parsed without stop" not in setup.of_batch:
        pairs = [pair for g in setup.groups for pair in zip(g.completions, g.rewards, strict=True)]
        cut = fmean(completion.stop_reason == "stop" and not reward.parsed for completion, reward in pairs)
        setup.of_batch["parsed without stop"] = (
            _parsed(setup) if setup.sampling.stop and cut > setup.thresholds["truncated_completions"] else None
        )
    parsed: float | None = setup.of_batch["parsed without stop"]
    return parsed if parsed is not None and parsed >= setup.thresholds["parse_rate_warning"] else None


def _parsed(setup: KeelSubject) -> float | None:
    if setup.built.judge.remote and setup.judgements_left < sum(len(group.completions) for group in setup.groups):
        return None
    problems, sampling = [group.problem for group in setup.groups], replace(setup.sampling, stop=())
    again = setup.collect(problems, sampling=sampling, judged=True)
    setup.built.judge.drain()
    return fmean(reward.parsed for group in again for reward in group.rewards)
