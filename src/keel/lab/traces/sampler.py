"""Checks of the sampler on completions of any trainer: KL(sampler‖policy) by depth, and stale weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from keel.base.errors import KeelError
from keel.doctor.checks.sampler import growing
from keel.doctor.findings import Finding
from keel.doctor.thresholds import Thresholds, load_thresholds
from keel.kl import k3, log_ratio
from keel.kl.measure import mean_by_depth, occupied_bins, positions
from keel.lab.traces.tokens import Trace

LEVEL = 1e-4  # probability of a false alarm over all candidates
MIN_GAP = 1e-9  # nats: a smaller gap cannot separate candidates
MAX_GAP = 1e4  # nats per completion: limits the −∞ of a candidate that cannot sample the completion


@dataclass(frozen=True)
class DepthReport:
    """k3 of the sampler against the policy in each bin of the context: mean and standard error, nats per token."""

    depth_bins: Mapping[int, tuple[float, float]]
    finding: Finding | None

    def __str__(self) -> str:
        rows = "; ".join(f"from token {start}: {mean:.2g} ± {se:.1g}" for start, (mean, se) in self.depth_bins.items())
        if self.finding is None:
            return f"KL(sampler‖policy) does not grow with depth ({rows})"
        return f"{self.finding.code}: {self.finding.evidence}. {self.finding.cause}. Change: {self.finding.advice}"

    def plot(self, path: Path | str) -> None:
        """Plot the KL by depth to a file."""
        from keel.lab.plots.picture import picture

        with picture(Path(path)) as plt:
            figure, axis = plt.subplots(figsize=(6, 3.6))
            means, errors = ([value[i] for value in self.depth_bins.values()] for i in (0, 1))
            axis.errorbar(list(self.depth_bins), means, yerr=errors, marker="o")
            axis.set(
                xlabel="position in the context (tokens)", ylabel="KL(sampler‖policy), nats per token", ylim=(0, None)
            )
            axis.grid(alpha=0.3)
            figure.tight_layout()


def check_depth(traces: Sequence[Trace], thresholds: Thresholds | None = None) -> DepthReport:
    """Estimate KL(sampler‖policy) by depth, with k3 at tokens that have both log-probabilities; test if it grows."""
    rows = [trace for trace in traces if trace.sample_logp is not None and trace.logp is not None]
    if not rows:
        raise KeelError(
            "no completion has both the sampler's and the policy's log-probabilities: record sample_logp and logp "
            "(TRL: use_vllm with vllm_importance_sampling_correction; verl: rollout_log_probs and old_log_probs)"
        )
    width = max(len(trace.completion_ids) for trace in rows)

    def padded(values: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in values], dtype=torch.float64)

    sampler, policy = padded([trace.sample_logp or () for trace in rows]), padded([trace.logp or () for trace in rows])
    mask = padded([trace.action for trace in rows]).bool() & sampler.isfinite() & policy.isfinite()
    where = positions([len(trace.prompt_ids) for trace in rows], width)
    values = k3(log_ratio(sampler.nan_to_num(), policy.nan_to_num(), mask).d)
    found = mean_by_depth(values, mask, where, occupied_bins(where, mask))
    depth_bins = {start: (float(mean), float(se)) for start, (mean, se) in found.items()}
    return DepthReport(depth_bins, growing(depth_bins, thresholds or load_thresholds()))


@dataclass(frozen=True)
class Candidate:
    """Weights that may have sampled the tokens, compared with the expected ones.

    `mean` is the mean over completions of log p_candidate − log p_expected, `z` is the mean over its standard error.
    """

    name: str
    mean: float
    z: float


@dataclass(frozen=True)
class DrawnReport:
    """The result of `check_drawn`. `likeliest` are the weights with the highest likelihood.

    `stale` is whether they are significantly likelier than the expected ones; `sound` is whether all other weights are
    significantly less likely than the expected ones. If neither is true, more completions are needed.
    """

    expected: str
    likeliest: str
    stale: bool
    sound: bool
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        rows = ", ".join(f"{c.name} {c.mean:+.3g} nats per completion (z {c.z:+.1f})" for c in self.candidates)
        if self.stale:
            return (
                f"sampler/stale: the tokens were sampled by the weights of {self.likeliest}, not of {self.expected}: "
                f"{rows}. Sync the sampler after every update, adapters included"
            )
        return f"no earlier weights explain the tokens better than {self.expected}: {rows}"


def check_drawn(logp: Mapping[str, Sequence[float]], expected: str, level: float = LEVEL) -> DrawnReport:
    """Test which weights sampled the completions; `logp` has each candidate's log-probability of each completion.

    If the expected weights sampled them, the likelihood ratio L = Π p_c/p_e has mean 1, so by Markov's inequality
    (Ville's for sequences) it exceeds 1/α with probability at most α, for any policies. The bound needs all sampled
    completions: a selection, such as leaving out truncated ones, breaks it. `logp` must include sampling filters such
    as top-p. A completion that a candidate scores as NaN is ignored.
    """
    if expected not in logp or len(logp) < 2:
        raise KeelError(
            f"logp must have the expected weights ({expected}) and at least one other candidate, but has "
            f"{', '.join(logp) or 'none'}"
        )
    counts = {name: len(values) for name, values in logp.items()}
    if len(set(counts.values())) > 1 or not counts[expected]:
        raise KeelError(f"every candidate needs a log-probability for each completion, but the numbers are {counts}")
    found, limit = [], math.log((len(logp) - 1) / level)
    total: dict[str, float] = {expected: 0.0}
    for name, values in logp.items():
        if name == expected:
            continue
        gaps = [_gap(own, right) for own, right in zip(values, logp[expected], strict=True)]
        total[name], mean = math.fsum(gaps), math.fsum(gaps) / len(gaps)
        error = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / max(1, len(gaps) - 1) / len(gaps))
        found.append(Candidate(name, mean, mean / max(error, MIN_GAP)))
    likeliest = max(total, key=lambda name: total[name])
    sound = all(value < -limit for name, value in total.items() if name != expected)
    return DrawnReport(expected, likeliest, total[likeliest] > limit, sound, tuple(found))


def _gap(own: float, expected: float) -> float:
    gap = own - expected
    return 0.0 if math.isnan(gap) else max(-MAX_GAP, min(MAX_GAP, gap))
