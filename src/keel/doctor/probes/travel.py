"""Check which prompts the engine continues, and which text is judged.

An engine is a black box. Its reported log-probabilities and its samples show which prompts it continues: the scored
ones, changed ones, or those of other problems. Reports must equal the policy's log-probability after that prompt, and
samples must be likely after it. Let p₀ be the samples' probability after the scored prompts and p₁ … pₙ that after
others. If the scored prompts were continued, the mean of pᵢ/p₀ over i has expectation 1. Its logarithm is a log
evidence ratio (see evidence.py). A hypothesis is reported only if it fits the samples by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keel.base.types import Completion, Group
from keel.doctor.draws import (
    STRANGE_STEPS,
    Draws,
    best_temperature,
    chance_of,
    draws,
    filters,
    most_tokens,
    strange_turns,
    tail_masses,
    unfiltered,
    uniform_p_value,
)
from keel.doctor.evidence import SAME, log_mean_exp
from keel.doctor.findings import Finding, Severity, finding
from keel.doctor.gap import ROUNDING, average, closed, in_half_precision, largest, rounding_explains
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.alternatives import alternatives
from keel.doctor.probes.other_prompts import OtherPrompt, cuts, other_prompts
from keel.doctor.probes.reported import Reports
from keel.doctor.thresholds import Thresholds
from keel.rollout.request import Request, StopStrings, Turn
from keel.rollout.sampling import SamplingParams

_TOKENS = 256  # drawn tokens that suffice to tell prompts apart
_MORE_STEP = 2_000_003  # a step that no run reaches, for independent noise
_MORE, _MORE_TOKENS = 16, 512  # most completions per problem, and number of tokens to sample
_LATER = 32  # most turns that are examined
_REPEATED_STEP = 3_000_017
_SAID, _TIMES, _SAMPLES = 12, 9, 16  # tokens that are repeated, how often, and completions of each
_MOVED = 10.0  # factor over the difference of the policy's own log-probabilities


def probe_travel(setup: KeelSubject) -> Outcome:
    """Compare each turn's text with its tokens, and each completion with the prompt that it is scored after."""
    return Outcome("travel", (*text_findings(setup.whole), *_continued(setup)))


def _continued(setup: KeelSubject) -> Iterator[Finding]:
    """Report other prompts that explain the completions if the scored ones do not.

    Log-probabilities that are right for first turns and far off for later ones are a finding even without such prompts.
    """
    first_off = False
    for where, given in (("", _first_turns), ("turns after the first", _later_turns), ("random texts", _strange)):
        groups = [] if where == "random texts" and first_off else _written(setup, given(setup))
        if not groups:
            continue
        scored = draws(setup, groups)
        reported = ~scored.sample_logp.isnan()
        reports = Reports(setup, groups, scored.where(reported), reported)
        doubt = _doubt(reports, scored, setup.thresholds)
        if not doubt:
            continue
        named = (_swapped(setup, groups, scored) if not where and doubt == "large" else None) or (
            _other_prompt(setup, groups, scored) or _added_text(setup, reports)
        )
        only_later = where == "turns after the first" and not first_off
        if named is None and only_later and reports.size > setup.thresholds["foreign_gap"]:
            named = (
                f"log-probabilities are off by {reports.size:.3g} nats on average, while those of first turns are "
                "correct"
            )
        if named is not None:
            setup.shared["other prompt"] = True
            evidence = f"in {where}: {named}" if where else named
            yield named if isinstance(named, Finding) else other_prompt_finding(str(evidence))
            return
        first_off = first_off or (not where and doubt == "large")


def _first_turns(setup: KeelSubject) -> list[Group]:
    """Completions of the batch's prompts. If they are too short, the same prompts are continued more often."""
    written: dict[str, list[Completion]] = {group.problem.key: [] for group in setup.groups}
    for turn in setup.turns:
        if turn.request.start == 0 and turn.request.key in written:
            written[turn.request.key].append(turn.completion)
    turns = [completion for row in written.values() for completion in row]
    tokens = sum(len(completion.tokens) for completion in turns)
    if tokens >= _TOKENS:
        return [replace(group, completions=tuple(written[group.problem.key]), rewards=()) for group in setup.groups]
    count = math.ceil(_MORE_TOKENS / max(1.0, tokens / max(1, len(turns)) * len(setup.groups)))
    limit = setup.config.rollout.max_turn_length
    requests = [Request(group.problem.key, group.prompt_tokens, max_new=limit) for group in setup.groups]
    sampling = replace(setup.sampling, num_generations=min(_MORE, max(2, count)))
    more = setup.run.engine.generate(requests, sampling, seed=setup.config.run.seed, attempt=0, step=_MORE_STEP)
    setup.run.engine.release()
    return [replace(g, completions=tuple(row), rewards=()) for g, row in zip(setup.groups, more, strict=True)]


def _later_turns(setup: KeelSubject) -> list[Group]:
    """Turns after the first, each after its own context, which includes the environment's replies."""
    problems = {group.problem.key: group.problem for group in setup.groups}
    later = [turn for turn in setup.turns if turn.request.start > 0 and turn.request.key in problems][:_LATER]
    return [Group(problems[t.request.key], t.request.tokens, (t.completion,)) for t in later]


def _strange(setup: KeelSubject) -> list[Group]:
    """Completions of random texts, tested if those of the run's own prompts are correct."""
    return strange_turns(setup, STRANGE_STEPS[0])


def _written(setup: KeelSubject, groups: Sequence[Group]) -> list[Group]:
    """The first tokens of the completions. If all completions of each prompt are equal, one of each is kept."""
    rows = [[c for c in group.completions if c.tokens] for group in groups]
    if all(len({c.tokens for c in row}) == 1 for row in rows if row):
        rows = [row[:1] for row in rows]
    width = max(4, most_tokens(setup) // max(1, sum(map(len, rows))))
    # the engine reports log-probabilities after filters
    unknown = setup.run.engine.logp_after_filters and setup.sampling.filtered

    def cut(c: Completion) -> Completion:
        reported = (math.nan,) * len(c.tokens) if unknown else c.sample_logp
        first = slice(width)
        return replace(
            c,
            tokens=c.tokens[first],
            action=c.action[first],
            sample_logp=reported[first],
            filtered_logp=c.filtered_logp[first],
        )

    return [
        replace(group, completions=tuple(map(cut, row)), rewards=())
        for group, row in zip(groups, rows, strict=True)
        if row
    ]


def _doubt(reports: Reports, scored: Draws, thresholds: Thresholds) -> str:
    """Whether reports are off or samples unlikely: "large", "small", or "" for rounding."""
    gap, setup = reports.gap, reports.setup
    chance = uniform_p_value(tail_masses(scored, setup.sampling))
    if chance < thresholds["prompt_doubt"] or average(gap) > thresholds["scoring_gap_half"]:
        return "large"
    if largest(gap) <= thresholds["scoring_gap"]:
        return ""
    if setup.policy.dtype != torch.float32:
        return "" if average(gap) <= thresholds["precision_times"] * average(reports.rounding) else "small"
    return "" if rounding_explains(gap, reports.rounding, thresholds) else "small"


@dataclass(frozen=True)
class _Fit:
    """How well changed prompts explain the turns: log evidence ratio in nats, and remaining gap of the reports."""

    other: OtherPrompt
    gain: float
    residual: float  # mean |difference|; infinite without reports
    chance: float  # p-value of the samples under these prompts


def _off(drawn: Draws, params: SamplingParams) -> float:
    reported = ~drawn.sample_logp.isnan()
    return average((drawn.sample_logp - drawn.logp(unfiltered(params)))[reported]) if bool(reported.any()) else math.inf


def _logp(setup: KeelSubject, drawn: Draws) -> Tensor:
    return drawn.logp(setup.sampling).nan_to_num(neginf=-50.0)


def _swapped(setup: KeelSubject, groups: Sequence[Group], scored: Draws) -> Finding | None:
    """Score every turn under every prompt of the batch, to find completions in the wrong order."""
    prompts = list(dict.fromkeys(group.prompt_tokens for group in groups))
    if len(prompts) < 2:
        return None
    under = [draws(setup, [replace(group, prompt_tokens=prompt) for group in groups]) for prompt in prompts]
    own_prompt = [prompts.index(group.prompt_tokens) for group in groups for _ in group.completions]
    rows = int(scored.row.max()) + 1

    def by_row(values: Tensor) -> Tensor:
        return torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, scored.row, values)

    likely = torch.stack([by_row(_logp(setup, drawn)) for drawn in under], dim=1)  # [rows, prompts]
    odds = float((likely.logsumexp(-1) - math.log(len(prompts)) - by_row(_logp(setup, scored))).sum())
    plain = unfiltered(setup.sampling)
    off = torch.stack([by_row((d.sample_logp - d.logp(plain)).abs()) for d in under], dim=1)
    before = float((scored.sample_logp - scored.logp(plain)).abs().mean())
    known = not bool(off.isnan().any())
    by_report = known and before > ROUNDING
    if known and not by_report and float(off.sum()) > ROUNDING * off.numel():
        return None  # the reports fit the own prompts only; those of swapped completions would fit another
    nearest = off.argmin(-1) if by_report else likely.argmax(-1)
    left = float(off.gather(-1, nearest[:, None]).sum() / len(scored)) if by_report else math.inf
    rounding = setup.thresholds["scoring_gap_half" if in_half_precision(setup) else "scoring_gap"]
    # the minimum over many prompts is small by chance, so the limit is strict
    decisive = left <= min(closed(setup, before), rounding)
    chosen = nearest[scored.row]
    logits = scored.logits.clone()
    for number, drawn in enumerate(under):
        logits[chosen == number] = drawn.logits[chosen == number]
    moved = sum(place != own for place, own in zip(nearest.tolist(), own_prompt, strict=False))
    chance = uniform_p_value(tail_masses(replace(scored, logits=logits), setup.sampling))
    fits = chance > setup.thresholds["sampler_explained"] and odds > _enough(setup, scored)
    if not moved or not (decisive or (fits and not by_report)):  # otherwise the reports would fit another prompt
        return None
    evidence = f"{moved} of {rows} completions continue another problem's prompt of the batch: " + (
        f"the engine's log-probabilities are off by {before:.3g} nats under the completions' own prompts and by "
        f"{left:.2g} under the prompts that fit them best"
        if decisive
        else f"odds e^{odds:.3g} against their own prompts (p-value of the draws under those prompts {chance:.2g})"
    )
    if len(set(nearest.tolist())) == 1:
        return other_prompt_finding(f"{evidence}; all of them continue the same prompt")
    return finding(
        "sampler/swapped",
        evidence,
        "the engine returns completions in another order than their requests, so each completion is judged by, and "
        "trained for, another problem",
        "return completions in the order of the requests, each request's samples together",
    )


def _other_prompt(setup: KeelSubject, groups: Sequence[Group], scored: Draws) -> str | None:
    """Evidence for the changed prompt that closes the gap of the reports, else for the most likely one."""
    own, residual = _logp(setup, scored), _off(scored, setup.sampling)

    def fit(other: OtherPrompt) -> _Fit:
        changed = [replace(g, prompt_tokens=other.change(g.prompt_tokens, i)) for i, g in enumerate(groups)]
        drawn = draws(setup, changed)
        gain = float((_logp(setup, drawn) - own).sum())
        chance = uniform_p_value(tail_masses(drawn, setup.sampling))
        return _Fit(other, gain, _off(drawn, setup.sampling), chance)

    fits = [fit(other) for other in other_prompts(setup, groups)]
    fits += _refined(groups, fits, fit)
    # reports near 0, as of end tokens, fit every prompt after which the token is certain
    size = min(residual, average(scored.sample_logp[~scored.sample_logp.isnan()]))
    best = min(fits, key=lambda entry: entry.residual, default=None)
    if best is not None and ROUNDING < residual < math.inf and best.residual <= closed(setup, size):
        return (
            f"the engine's log-probabilities are off by {residual:.3g} nats on average under the scored prompts and "
            f"by {best.residual:.2g} under {best.other.label}"
        )
    if best is None or setup.thresholds["scoring_gap_half"] < residual < math.inf:
        return None  # reports that are off would fit the prompt that was continued
    best = max(fits, key=lambda entry: entry.gain)
    odds = log_mean_exp([entry.gain for entry in fits])
    if odds <= _enough(setup, scored) or best.chance <= setup.thresholds["sampler_explained"]:
        return None
    return (
        f"{len(scored)} drawn tokens are more likely under {best.other.label} by odds of e^{odds:.3g} (p-value of the "
        f"draws under these prompts {best.chance:.2g})"
    )


def _added_text(setup: KeelSubject, reports: Reports) -> str | None:
    """Evidence that the engine puts unknown text before the prompt.

    In a prompt that repeats one token, all attention values are equal. With rotary positions, the next token's
    distribution then does not depend on the number of repetitions. If it does, other text comes before.
    """
    said = sorted({token for group in setup.groups for token in group.prompt_tokens})[:_SAID]

    def reported(times: int, step: int) -> tuple[dict[tuple[int, int], Tensor], Draws]:
        """Reported and own log-probability by (token, next token) where equal in all draws, and the draws."""
        groups = setup.complete([(token,) * times for token in said], samples=_SAMPLES, length=1, step=step)
        drawn = draws(setup, [group for group in groups if group.completions])
        pairs = torch.stack([drawn.sample_logp, drawn.logp(unfiltered(setup.sampling))], dim=-1)
        rows: dict[tuple[int, int], list[Tensor]] = {}
        for row, token, pair in zip(drawn.row.tolist(), drawn.tokens.tolist(), pairs, strict=True):
            rows.setdefault((drawn.texts[row][0], token), []).append(pair)
        return {key: same[0] for key, same in rows.items() if largest(torch.stack(same) - same[0]) <= limit}, drawn

    limit = setup.thresholds["scoring_gap_half" if in_half_precision(setup) else "scoring_gap"]
    (once, one), (often, many) = reported(1, _REPEATED_STEP), reported(_TIMES, _REPEATED_STEP)
    if not (common := once.keys() & often.keys()):
        return None
    moved, own = (float(x) for x in torch.stack([once[key] - often[key] for key in common]).abs().mean(0))
    rounding = setup.thresholds["precision_times"] * average(reports.rounding)
    again = [reported(times, _REPEATED_STEP + 1)[1] for times in (1, _TIMES)]
    doubts = [min(chance_of(drawn, setup.sampling) for drawn in pair) for pair in ((one, many), again)]
    if not moved > max(limit, _MOVED * own, rounding) or max(doubts) > setup.thresholds["sampler_doubt"]:
        return None  # if the draws are the policy's, only the reports are wrong
    return (
        f"the engine's log-probabilities are off by {reports.size:.3g} nats on average; for the same next token, they "
        f"differ by {moved:.3g} nats between a prompt of one token and a prompt of that token {_TIMES} times, while "
        f"the policy's differ by {own:.1g}: the engine adds unknown text before the prompt"
    )


def _refined(groups: Sequence[Group], fits: Sequence[_Fit], fit: Callable[[OtherPrompt], _Fit]) -> list[_Fit]:
    """Cuts near the best one, found by halving the step size, since a limit may lie between tested sizes."""
    best = max((entry for entry in fits if entry.other.size is not None), key=lambda entry: entry.gain, default=None)
    more: list[_Fit] = []
    longest = max(len(group.prompt_tokens) for group in groups)
    step = (best.other.size or 0) // 2 if best is not None else 0
    while step and best is not None:
        size = best.other.size or 0
        near = [fit(neighbour) for neighbour in cuts(best.other.kind, [size - step, size + step], longest)]
        best, step, more = max([best, *near], key=lambda entry: entry.gain), step // 2, [*more, *near]
    return more


def _enough(setup: KeelSubject, scored: Draws) -> float:
    """The log evidence ratio, in nats, that another prompt needs: above chance and above any sampling options'."""
    plain = unfiltered(setup.sampling)
    own = float(_logp(setup, scored).sum())

    def cost(params: SamplingParams) -> float:
        return -float(scored.logp(params).nan_to_num(neginf=-50.0).sum())

    warmer = replace(plain, temperature=best_temperature(plain, cost))
    return max(
        -math.log(setup.thresholds["travel_chance"]),
        -own - cost(warmer),
        *(-own - cost(params) for _, params in filters(plain)),
        alternatives(scored, plain, setup.policy.eos_ids)[1],
    )


def other_prompt_finding(evidence: str) -> Finding:
    return finding(
        "sampler/other-prompt",
        evidence,
        "the engine does not continue the tokens that it gets: it truncates, encodes again or changes the prompt, "
        "while the trainer scores completions after the original prompt",
        "pass Request.tokens to the model unchanged: do not encode them again, and do not cut or add tokens",
    )


# ------------------------------------------------------------------------ text of the turns


@dataclass(frozen=True)
class OtherText:
    """A turn whose text differs from its tokens. `convention`: only in special tokens or outer spaces."""

    turn: Turn
    expected: str
    convention: bool


def text_findings(setup: KeelSubject) -> Iterator[Finding]:
    """The text of every turn must equal its tokens as Keel's own engines decode them.

    If only special tokens or outer spaces differ, the rewards of both texts decide.
    """
    others = _others(setup)
    if not others:
        return
    changed = [other for other in others if not other.convention]
    first = (changed or others)[0]
    if changed:
        severity: Severity = "error"
        shown = f"{len(changed)} of {len(setup.turns)} turns have a text that differs from their tokens"
        cause = "the engine's text does not come from its tokens: it was changed, cut, swapped or decoded differently"
    else:
        severity, judged = _worth(setup, others)
        shown = f"{len(others)} of {len(setup.turns)} turns differ from their tokens by special tokens or outer spaces"
        shown += judged
        cause = "the engine decodes differently than Keel, which leaves out special tokens and strips nothing"
    yield finding(
        "output/text",
        f"{shown}: {first.turn.completion.text[:60]!r} is judged, while the tokens decode to {first.expected[:60]!r}",
        cause,
        "set Completion.text to tokenizer.decode(Completion.tokens, skip_special_tokens=True), cut at the stop string "
        "if one ended the completion",
        severity=severity,
    )


def _others(setup: KeelSubject) -> list[OtherText]:
    stops = StopStrings(setup.policy.tokenizer)
    others = []
    for turn in setup.turns:
        text, tokens = turn.completion.text, list(turn.completion.tokens)
        expected = stops.decode(tokens)
        cut = stops.cut(tokens, setup.sampling.stop) if turn.completion.stop_reason == "stop" else None
        expected = expected if cut is None else cut
        if text != expected:
            whole = stops.decode(tokens, special=True)
            alike = {expected.strip(), stops.decode(tokens).strip(), whole.strip()}
            others.append(OtherText(turn, expected, text.strip() in alike))
    return others


def _worth(setup: KeelSubject, others: Sequence[OtherText]) -> tuple[Severity, str]:
    """Severity and evidence: an error if the right texts earn another reward, else a note; a warning if untested."""
    if setup.config.reward.aggregate != "sum" or setup.config.reward.shuffle is not None:
        return "warning", ""
    expected = {id(other.turn): other.expected for other in others}
    problems = {group.problem.key: group.problem for group in setup.groups}
    episodes: dict[tuple[str, int], list[Turn]] = {}
    for turn in setup.turns:
        episodes.setdefault((turn.request.key, turn.sample), []).append(turn)
    differing = 0
    for (key, _), turns in episodes.items():
        given = [turn.completion.text for turn in turns]
        right = [expected.get(id(turn), turn.completion.text) for turn in turns]
        if key in problems and given != right:
            judged = [setup.built.judge.judge(problems[key], [texts]) for texts in (given, right)]
            earned = [rewards[0].total for rewards in judged if rewards]
            differing += len(earned) == 2 and abs(earned[0] - earned[1]) > SAME
    setup.built.judge.drain()
    if not differing:
        return "note", ", and earn the same reward"
    return "error", f", and {differing} of {len(episodes)} completions earn another reward because of it"
