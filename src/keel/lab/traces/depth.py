"""KL(sampler‖policy) by depth of the context, of the completions of any trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from keel.base.errors import KeelError
from keel.doctor.checks.sampler import growing
from keel.doctor.findings import Finding
from keel.doctor.thresholds import Thresholds, load_thresholds
from keel.kl import k3, log_ratio
from keel.kl.depth import mean_by_depth, occupied_bins, positions
from keel.lab.traces.records import Trace


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
        """Save a plot."""
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
    """k3 on the sampler's own tokens, which estimates KL(sampler‖policy), where both sides know the token."""
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
