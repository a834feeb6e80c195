"""Whether an engine has more before its tokens than the prompt that it is given, whatever that may be.

An experiment without a guess at the text. After one token, said once or many times, attention has the same value to
give whatever its weights, cache and positions are, and so has every layer after it: the next token's distribution is
the same. Who reports another one after the many than after the one has something else before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean

import torch

from keel.base.errors import KeelError
from keel.base.types import Group
from keel.doctor.draws import Draws, chance_of, draws, unfiltered
from keel.doctor.gap import in_half_precision
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.reported import Reports
from keel.doctor.thresholds import Thresholds
from keel.rollout.request import Request

_STEP = 3_000_017  # noise of its own
_TOKENS, _SAMPLES, _TIMES = 12, 16, 9  # tokens that are said, completions a prompt, and how often one is said
_LEAST = 3  # tokens after which the two have a continuation in common
_MOVED = 10.0  # times what the policy's own log-probabilities differ by


def added_text(setup: KeelSubject, reports: Reports, thresholds: Thresholds) -> str | None:
    """Evidence that it has, where what it reports is off; None where something else is."""
    if not len(reports.drawn):
        return None
    limit = thresholds["scoring_gap_half" if in_half_precision(setup) else "scoring_gap"]
    said = sorted({token for group in setup.groups for token in group.prompt_tokens})[:_TOKENS]
    once, alone = _reports(setup, said, 1, limit)
    again, _ = _reports(setup, said[::-1], 1, limit)  # a request's place among others must not matter
    often, many = _reports(setup, said, _TIMES, limit)
    common = once.keys() & often.keys() & again.keys()
    if len({said for said, _ in common}) < _LEAST:
        return None
    moved, own, rounded = (fmean(abs(once[key][i] - often[key][i]) for key in common) for i in range(3))
    repeated = fmean(abs(once[key][0] - again[key][0]) for key in common)
    if not moved > max(limit, _MOVED * own, _MOVED * repeated, thresholds["precision_times"] * rounded):
        return None
    further = [_reports(setup, said, times, limit, step=_STEP + 1)[1] for times in (1, _TIMES)]
    for pair in ((alone, many), further):
        if min(chance_of(drawn, setup.sampling) for drawn in pair) > thresholds["sampler_doubt"]:
            return None  # what is drawn after them is the policy's: only the reports are something else
    return (
        f"the engine's log-probabilities are off by {reports.size:.3g} nats on average; of the same next token they "
        f"differ by {moved:.3g} nats between prompts of one token and of that token {_TIMES} times, and the policy's "
        f"by {own:.1g}: more stands before the tokens than the prompt, and none of the prompts that were tried is it"
    )


def _reports(
    setup: KeelSubject, said: Sequence[int], times: int, limit: float, step: int = _STEP
) -> tuple[dict[tuple[int, int], tuple[float, ...]], Draws]:
    """What is reported of a next token after one that is said so often, and the policy's own, also in bfloat16.

    A token that gets another number each time it is drawn is left out: that is no matter of the prompt.
    """
    requests = [
        Request(f"context {times} {place} {token}", (token,) * times, max_new=1) for place, token in enumerate(said)
    ]
    groups: list[Group] = []
    with suppress(KeelError):  # an engine may refuse what it made of a prompt of one token
        sampling = replace(setup.sampling, num_generations=_SAMPLES)
        turns = setup.run.engine.generate(requests, sampling, seed=setup.config.run.seed, attempt=0, step=step)
        setup.run.engine.release()
        written = [tuple(turn for turn in row if turn.action == (True,)) for row in turns]
        groups = [
            Group(setup.groups[0].problem, r.tokens, row) for r, row in zip(requests, written, strict=False) if row
        ]
    scored = draws(setup, groups)
    with torch.autocast(setup.policy.device.type, dtype=torch.bfloat16):
        narrow = draws(setup, groups)
    own, rounded = (drawn.logp(unfiltered(setup.sampling)).tolist() for drawn in (scored, narrow))
    told: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for row, token, *values in zip(
        scored.row.tolist(), scored.tokens.tolist(), scored.sample_logp.tolist(), own, rounded, strict=True
    ):
        told.setdefault((scored.texts[row][0], token), []).append(tuple(values))
    steady = {key: rows[0] for key, rows in told.items() if all(abs(row[0] - rows[0][0]) <= limit for row in rows)}
    return steady, scored
