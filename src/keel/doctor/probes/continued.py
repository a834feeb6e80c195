"""Which prompts an engine continues: those that are scored, changed ones, or those of other problems.

An engine is a black box. Two things tell: what it reports must be the policy's log-probability after that prompt, and
what it draws must be likely after it. With p₀ after the scored prompts and p₁ … pₙ after others, the mean of pᵢ/p₀ of
all drawn tokens has expectation 1 if the scored ones were continued, so that odds of e^x have a chance of e^−x at most
(Markov). A hypothesis is named only where it fits what was drawn by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from keel.base.types import Completion, Group
from keel.doctor.draws import (
    Draws,
    batch_draws,
    best_temperature,
    filters,
    tail_masses,
    unfiltered,
    uniform_p_value,
)
from keel.doctor.evidence import log_mean_exp
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import (
    ROUNDING,
    average,
    closed,
    in_float32,
    in_half_precision,
    largest,
    rounding_explains,
)
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.alternatives import alternatives
from keel.doctor.probes.context import added_text
from keel.doctor.probes.other_prompts import OtherPrompt, cuts, other_prompts
from keel.doctor.thresholds import Thresholds
from keel.doctor.weights import row_logits
from keel.rollout.request import Request

_MAX_ELEMENTS = 25_000_000  # tokens × vocabulary held at once
_TOKENS = 256  # drawn tokens that tell prompts apart
_MORE_STEP = 2_000_003  # noise of its own
_MORE, _MORE_TOKENS = 16, 512  # completions a problem at most, and tokens that are enough


@dataclass(frozen=True)
class Continued:
    """The first turns of some groups: problem of each, its tokens and what was reported of them."""

    groups: Sequence[Group]
    turns: Sequence[Completion]
    group: Sequence[int]  # [n]: number of each turn's group

    def draws(self, setup: KeelSubject, prompts: Sequence[tuple[int, ...]]) -> Draws:
        """The turns' tokens with the policy's logits after these prompts, one a turn."""
        width = max(4, _MAX_ELEMENTS // (setup.vocabulary * len(self.turns)))
        texts = [
            ((*prompt, *turn.tokens[:width]), len(prompt) - 1) for prompt, turn in zip(prompts, self.turns, strict=True)
        ]
        distinct = list(dict.fromkeys(texts))
        logits_of = {
            (text, start): logits[start:-1].double()
            for (text, start), logits in zip(
                distinct, row_logits(setup.policy, [text for text, _ in distinct]), strict=True
            )
        }
        parts = [logits_of[text] for text in texts]
        acted = [torch.tensor(turn.action[:width], device=setup.policy.device) for turn in self.turns]
        tokens, reported = (
            torch.cat(
                [
                    torch.tensor(row[:width], device=setup.policy.device)[keep]
                    for row, keep in zip(rows, acted, strict=True)
                ]
            )
            for rows in ([turn.tokens for turn in self.turns], [turn.sample_logp for turn in self.turns])
        )
        row = torch.cat([torch.full((int(keep.sum()),), i, device=keep.device) for i, keep in enumerate(acted)])
        logits = torch.cat([part[keep] for part, keep in zip(parts, acted, strict=True)])
        return Draws(logits, tokens.long(), reported.double(), row)

    def prompts(self, other: OtherPrompt | None = None) -> list[tuple[int, ...]]:
        """The prompt of each turn: the scored one, or another."""
        own = [group.prompt_tokens for group in self.groups]
        changed = own if other is None else [other.change(tokens, i) for i, tokens in enumerate(own)]
        return [changed[i] for i in self.group]


@dataclass(frozen=True)
class ContinuationFit:
    """How well prompts explain the turns: odds against the scored ones in nats, how far off the reports are."""

    label: str
    gain: float
    residual: float  # mean |difference|; infinite where nothing was reported
    chance: float  # of the draws under it


def continued_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Nothing where the scored prompts explain what was drawn; else the prompts that do, if any."""
    turns = _first_turns(setup)
    few = sum(len(turn.tokens) for turn in turns.turns) < _TOKENS
    turns = _more_turns(setup, turns) if few else turns
    if not turns.turns:
        return
    scored = turns.draws(setup, turns.prompts()) if few else None
    doubt = doubt_of(setup, batch_draws(setup) if scored is None else scored, thresholds)
    if not doubt:
        return
    scored = turns.draws(setup, turns.prompts()) if scored is None else scored
    if doubt == "small" and not rounded(setup, turns, scored, thresholds):
        doubt = "large"
    named = _swapped(setup, turns, scored, thresholds) if doubt == "large" else None
    named = named or other_prompt(setup, turns, scored, thresholds, brief=doubt == "small")
    if named is None and doubt == "large":
        named = added(setup, turns, scored, thresholds)
    setup.shared["first turns off"] = doubt == "large"
    setup.shared["other prompt"] = named is not None
    if named is not None:
        yield named


def doubt_of(setup: KeelSubject, drawn: Draws, thresholds: Thresholds) -> Literal["", "small", "large"]:
    """Whether what was reported is off, or what was drawn is unlikely; small where rounding may do it, or one token."""
    gap = _gaps(setup, drawn)
    chance = uniform_p_value(tail_masses(drawn, setup.sampling))
    if chance < thresholds["prompt_doubt"] or average(gap) > thresholds["scoring_gap_half"]:
        return "large"
    return "" if largest(gap) <= thresholds["scoring_gap"] else "small"


def _gaps(setup: KeelSubject, drawn: Draws) -> Tensor:
    """How far what was reported is off, token by token."""
    reported = drawn.where(~drawn.sample_logp.isnan())
    return reported.sample_logp - reported.logp(unfiltered(setup.sampling))


def gap_of(setup: KeelSubject, drawn: Draws) -> float:
    """The same on average; 0 where nothing was reported."""
    return average(_gaps(setup, drawn))


def rounded(setup: KeelSubject, turns: Continued, scored: Draws, thresholds: Thresholds) -> bool:
    """Whether the reports are off as 16 bits round: all a little, no token by much more than others.

    Weights of 16 bits are compared with what fp32 makes of them; an engine with the trainer's kernels rounds alike.
    """
    plain, reported = unfiltered(setup.sampling), ~scored.sample_logp.isnan()
    gap = (scored.sample_logp - scored.logp(plain))[reported]
    if setup.policy.dtype != torch.float32:
        with in_float32(setup):
            rounding = turns.draws(setup, turns.prompts()).logp(plain) - scored.logp(plain)
        return average(gap) <= thresholds["precision_times"] * average(rounding[reported])
    with torch.autocast(setup.policy.device.type, dtype=torch.bfloat16):
        rounding = turns.draws(setup, turns.prompts()).logp(plain) - scored.logp(plain)
    return rounding_explains(gap, rounding[reported], thresholds)


def added(setup: KeelSubject, turns: Continued, scored: Draws, thresholds: Thresholds) -> Finding | None:
    """Text that no hypothesis has: told by what an engine does after one token, said once and many times."""
    reported = scored.where(~scored.sample_logp.isnan())
    if not len(reported):
        return None

    def score(pairs: Sequence[tuple[Completion, tuple[int, ...]]]) -> Draws:
        again = Continued(turns.groups, [turn for turn, _ in pairs], [0] * len(pairs))
        return again.draws(setup, [prompt for _, prompt in pairs])

    gap = average(reported.sample_logp - reported.logp(unfiltered(setup.sampling)))
    evidence = added_text(setup, gap, score, thresholds)
    return None if evidence is None else other_prompt_finding(f"{evidence}; none of the prompts that were tried is it")


def _first_turns(setup: KeelSubject) -> Continued:
    """What the engine wrote right after the batch's prompts."""
    numbers = {group.problem.key: i for i, group in enumerate(setup.groups)}
    first = [turn for turn in setup.turns if turn.request.start == 0 and turn.request.key in numbers]
    return continued(setup, setup.groups, [(turn.completion, numbers[turn.request.key]) for turn in first])


def _more_turns(setup: KeelSubject, first: Continued) -> Continued:
    """The same prompts continued more often, where the batch has few tokens: as often as its lengths ask for."""
    length = sum(len(turn.tokens) for turn in first.turns) / max(1, len(first.turns))
    count = min(_MORE, max(2, math.ceil(_MORE_TOKENS / max(1.0, length * len(setup.groups)))))
    limit = setup.config.rollout.max_turn_length
    requests = [Request(group.problem.key, group.prompt_tokens, max_new=limit) for group in setup.groups]
    sampling = replace(setup.sampling, num_generations=count)
    more = setup.run.engine.generate(requests, sampling, seed=setup.config.run.seed, attempt=0, step=_MORE_STEP)
    setup.run.engine.release()
    return continued(setup, setup.groups, [(completion, i) for i, turns in enumerate(more) for completion in turns])


def continued(setup: KeelSubject, groups: Sequence[Group], pairs: Sequence[tuple[Completion, int]]) -> Continued:
    """What was written, each with the number of its group."""
    written = [(completion, i) for completion, i in pairs if completion.tokens]
    if setup.run.engine.logp_after_filters and setup.sampling.filtered:  # what it reports is of another distribution
        written = [(replace(c, sample_logp=(math.nan,) * len(c.tokens)), i) for c, i in written]
    if len({(completion.tokens, i) for completion, i in written}) == len({i for _, i in written}):
        written = list({i: (completion, i) for completion, i in written}.values())  # copies are one draw
    return Continued(groups, [completion for completion, _ in written], [i for _, i in written])


def _fit(setup: KeelSubject, label: str, drawn: Draws, scored: Draws) -> ContinuationFit:
    reported = ~drawn.sample_logp.isnan()
    off = (drawn.sample_logp - drawn.logp(unfiltered(setup.sampling)))[reported].abs()
    gain = float((_logp(setup, drawn) - _logp(setup, scored)).sum())
    chance = uniform_p_value(tail_masses(drawn, setup.sampling))
    return ContinuationFit(label, gain, float(off.mean()) if len(off) else math.inf, chance)


def _logp(setup: KeelSubject, drawn: Draws) -> Tensor:
    return drawn.logp(setup.sampling).nan_to_num(neginf=-50.0)


def _swapped(setup: KeelSubject, turns: Continued, scored: Draws, thresholds: Thresholds) -> Finding | None:
    """Every turn under every prompt of the batch: the mixture over prompts against its own, turn by turn."""
    prompts = [group.prompt_tokens for group in turns.groups]
    if len(set(prompts)) < 2:
        return None
    under = [turns.draws(setup, [prompt] * len(turns.turns)) for prompt in prompts]
    rows = len(turns.turns)
    likely = torch.stack([_by_row(_logp(setup, drawn), drawn.row, rows) for drawn in under], dim=1)  # [n, prompts]
    own = _by_row(_logp(setup, scored), scored.row, rows)
    odds = float((likely.logsumexp(-1) - math.log(len(prompts)) - own).sum())
    plain = unfiltered(setup.sampling)
    off = torch.stack([_by_row((d.sample_logp - d.logp(plain)).abs(), d.row, rows) for d in under], dim=1)
    before = (scored.sample_logp - scored.logp(plain)).abs()
    known = not bool(off.isnan().any())
    by_report = known and float(before.mean()) > ROUNDING
    if known and not by_report and float(off.sum()) > ROUNDING * off.numel():
        return None  # what is reported is the own prompt's, and no other one's: a swapped completion brings its own
    nearest = off.argmin(-1) if by_report else likely.argmax(-1)
    counts = torch.bincount(scored.row, minlength=rows)
    left = float(off.gather(-1, nearest[:, None]).sum() / counts.sum()) if by_report else math.inf
    rounding = thresholds["scoring_gap_half" if in_half_precision(setup) else "scoring_gap"]
    decisive = left <= min(closed(setup, float(before.mean())), rounding)  # the nearest of many is near by itself
    chosen = nearest.tolist()
    joined = turns.draws(setup, [prompts[j] for j in chosen])
    moved = sum(prompts[j] != prompts[i] for j, i in zip(chosen, turns.group, strict=True))
    chance = uniform_p_value(tail_masses(joined, setup.sampling))
    fits = chance > thresholds["sampler_explained"] and odds > max(
        -math.log(thresholds["travel_chance"]), _otherwise(setup, scored)
    )
    if not moved or not (decisive or (fits and not by_report)):  # what is reported would agree with another prompt
        return None
    evidence = f"{moved} of {rows} completions continue another problem's prompt of the batch: " + (
        f"the engine's log-probabilities are off by {float(before.mean()):.3g} nats under their own prompts and by "
        f"{left:.2g} under those"
        if decisive
        else f"odds e^{odds:.3g} against their own prompts (chance of the draws under those {chance:.2g})"
    )
    if len({prompts[j] for j in chosen}) == 1:
        return other_prompt_finding(f"{evidence}; it is one and the same for all")
    return finding(
        "sampler/swapped",
        evidence,
        "the engine returns completions in another order than their requests, so that each is judged by, and trained "
        "for, another problem",
        "return completions in the order of the requests, each request's samples together",
    )


def _by_row(values: Tensor, row: Tensor, rows: int) -> Tensor:
    return torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, row, values)


def other_prompt(
    setup: KeelSubject, turns: Continued, scored: Draws, thresholds: Thresholds, *, brief: bool
) -> Finding | None:
    """The first prompt that closes the gap of what was reported; else the likeliest that fits what was drawn."""
    candidates = other_prompts(setup, turns.groups, brief=brief)
    base = _fit(setup, "", scored, scored)

    def fit(other: OtherPrompt) -> ContinuationFit:
        return _fit(setup, other.label, turns.draws(setup, turns.prompts(other)), scored)

    fits = [(other, fit(other)) for other in candidates]
    fits += [] if brief else _refined(turns, fits, fit)
    # a report of near certainty, as of an end, agrees with whatever makes that certain
    size = min(base.residual, average(scored.sample_logp[~scored.sample_logp.isnan()]))
    off = ROUNDING < base.residual < math.inf
    closing = [entry for entry in fits if off and entry[1].residual <= closed(setup, size)]
    if closing:
        _, best = min(closing, key=lambda entry: entry[1].residual)
        return other_prompt_finding(
            f"the engine's log-probabilities are off by {base.residual:.3g} nats on average under the prompts that are "
            f"scored and by {best.residual:.2g} under {best.label}"
        )
    if not fits or thresholds["scoring_gap_half"] < base.residual < math.inf:
        return None  # what is reported would agree with the prompt that is continued
    _, best = max(fits, key=lambda entry: entry[1].gain)
    odds = log_mean_exp([entry.gain for _, entry in fits])
    enough = max(-math.log(thresholds["travel_chance"]), _otherwise(setup, scored))
    if odds <= enough or best.chance <= thresholds["sampler_explained"]:
        return None
    return other_prompt_finding(
        f"{len(scored)} drawn tokens are likelier under {best.label} by odds of e^{odds:.3g} (chance of the draws "
        f"under it {best.chance:.2g}, under the prompts that are scored {base.chance:.1g})"
    )


def _refined(
    turns: Continued, fits: Sequence[tuple[OtherPrompt, ContinuationFit]], fit: Callable[[OtherPrompt], ContinuationFit]
) -> list[tuple[OtherPrompt, ContinuationFit]]:
    """The best cut's neighbours, by halving steps: a limit may lie between those that were tried."""
    tried = [entry for entry in fits if entry[0].size is not None]
    if not tried:
        return []
    best, more = max(tried, key=lambda entry: entry[1].gain), []
    longest = max(len(group.prompt_tokens) for group in turns.groups)
    step = (best[0].size or 0) // 2
    while step:
        size = best[0].size or 0
        for neighbour in cuts(best[0].kind, [size - step, size + step], longest):
            more.append((neighbour, fit(neighbour)))
        best, step = max([best, *more[-2:]], key=lambda entry: entry[1].gain), step // 2
    return more


def _otherwise(setup: KeelSubject, scored: Draws) -> float:
    """Odds in nats of the best explanation by sampling options, under the scored prompts: others must beat it."""
    plain = unfiltered(setup.sampling)
    own = float(_logp(setup, scored).sum())

    def cost(params: object) -> float:
        return -float(scored.logp(params).nan_to_num(neginf=-50.0).sum())  # type: ignore[arg-type]

    warmer = replace(plain, temperature=best_temperature(plain, cost))
    return max(
        -own - cost(warmer),
        *(-own - cost(params) for _, params in filters(plain)),
        alternatives(scored, plain, setup.policy.eos_ids)[1],
    )


def other_prompt_finding(evidence: str) -> Finding:
    return finding(
        "sampler/other-prompt",
        evidence,
        "the engine does not continue the tokens that it is given: it cuts, encodes again or changes the prompt, while "
        "the trainer scores completions after the prompt as it was",
        "give the model Request.tokens as they are: never decoded and encoded again, nothing cut, nothing added",
    )
