"""Which weights drew these tokens? A test of candidates on the tokens alone, without the sampler's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.base.errors import KeelError

LEVEL = 1e-4  # probability of a false alarm, divided by the number of candidates
MIN_GAP = 1e-9  # nats: a smaller gap cannot separate candidates
MAX_GAP = 1e4  # nats of one completion: what a candidate cannot have drawn has a log-probability of −∞


@dataclass(frozen=True)
class Candidate:
    """Weights that may have drawn the tokens, against the policy that should have.

    `mean` is the mean over completions of log p_candidate − log p_expected, `z` that over its standard error.
    """

    name: str
    mean: float
    z: float


@dataclass(frozen=True)
class DrawnReport:
    """`likeliest` explains the tokens best; `stale` says that it is not what should have drawn them, beyond chance.

    `sound` says that all others are as unlikely; where neither holds, more completions are needed.
    """

    expected: str
    likeliest: str
    stale: bool
    sound: bool
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        rows = ", ".join(f"{c.name} {c.mean:+.3g} nats a completion (z {c.z:+.1f})" for c in self.candidates)
        if self.stale:
            return (
                f"sampler/stale: the tokens were drawn by {self.likeliest} rather than by {self.expected}: {rows}. "
                "Sync the sampler after every update, adapters included"
            )
        return f"no earlier weights explain the tokens better than {self.expected}: {rows}"


def check_drawn(logp: Mapping[str, Sequence[float]], expected: str, level: float = LEVEL) -> DrawnReport:
    """Test which of several weights drew the completions; `logp` are each one's log-probability of each completion.

    If the expected weights drew them, a likelihood ratio L = Π p_c/p_e has a mean of 1: by Markov's inequality it is
    above 1/α with probability α at most (Ville), whatever the policies are. It needs every completion that was drawn:
    a choice among them, such as leaving out truncated ones, breaks the bound. Sampler filters change what is drawn:
    take them into `logp`. A completion that a candidate scores as NaN is no evidence.
    """
    if expected not in logp or len(logp) < 2:
        raise KeelError(f"name the expected weights ({expected}) and at least one other: {', '.join(logp) or 'none'}")
    counts = {name: len(values) for name, values in logp.items()}
    if len(set(counts.values())) > 1 or not counts[expected]:
        raise KeelError(f"every candidate needs a log-probability for each completion, but there are {counts}")
    found, limit = [], math.log((len(logp) - 1) / level)
    total: dict[str, float] = {expected: 0.0}
    for name, values in logp.items():
        if name == expected:
            continue
        gaps = [_gap(own, right) for own, right in zip(values, logp[expected], strict=True)]
        total[name], mean = math.fsum(gaps), math.fsum(gaps) / len(gaps)
        spread = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / max(1, len(gaps) - 1) / len(gaps))
        found.append(Candidate(name, mean, mean / max(spread, MIN_GAP)))
    likeliest = max(total, key=lambda name: total[name])
    sound = all(value < -limit for name, value in total.items() if name != expected)
    return DrawnReport(expected, likeliest, total[likeliest] > limit, sound, tuple(found))


def _gap(own: float, expected: float) -> float:
    gap = own - expected
    return 0.0 if math.isnan(gap) else max(-MAX_GAP, min(MAX_GAP, gap))
