"""Plot a drift by position, estimator and token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.lab.compare.measure import EXACT, Direction, Drift, PositionDrift, TokenDrift
from keel.lab.plots.picture import picture

FORWARD, REVERSE, GREY = "#12756f", "#7a4ea3", "#a3a8b0"
MORE, LESS = "#d9731a", "#2b6cb0"  # colours of tokens that are more or less likely under the policy
TOKENS = 12


def plot_drift(drift: Drift, path: Path) -> None:
    """Draw the measurement to a file: .png, .svg or .pdf."""
    with picture(path) as plt:
        figure, axes = plt.subplots(2, 2, figsize=(12.5, 8.4), layout="constrained")
        _positions(axes[0, 0], drift)
        _estimators(axes[0, 1], drift)
        for axis, draw in ((axes[1, 0], _tokens), (axes[1, 1], _likely)):
            draw(axis, drift.policy_ref) if drift.policy_ref.moved else _nothing(axis)
        for axis in axes.flat:
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(
            f"{drift.policy} against {drift.reference}\n{drift.prompts} prompts × {drift.samples} completions, "
            f"temperature {drift.temperature:g}; ± one standard error over {drift.clustered_by}s",
            fontsize=11,
        )


def _positions(axis: Any, drift: Drift) -> None:
    """Exact KL by position with a band of one standard error, as far as a tenth of the completions reach."""
    sides = [("KL(policy‖reference), samples from the policy", drift.policy_ref, FORWARD)]
    if drift.ref_policy is not None:
        sides.append(("KL(reference‖policy), samples from the reference", drift.ref_policy, REVERSE))
    for label, direction, colour in sides:
        reached = direction.common_positions()
        where = [p.first for p in reached]
        axis.plot(where, [p.exact.mean for p in reached], color=colour, linewidth=1.8, label=label, **_dots(reached))
        low, high = ([max(0.0, p.exact.mean + sign * (p.exact.se or 0.0)) for p in reached] for sign in (-1, 1))
        axis.fill_between(where, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.set(
        title="Exact KL by position",
        xlabel="position in the completion, as far as a tenth of them reach",
        ylabel="nats per token",
    )
    axis.set_ylim(bottom=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)


def _dots(reached: list[PositionDrift]) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4} if len(reached) <= 40 else {}


def _estimators(axis: Any, drift: Drift) -> None:
    """Every estimator of KL(policy‖reference) per token, with a line at the exact value."""
    estimates = drift.policy_ref.per_token
    names = list(estimates)
    colours = [FORWARD if name == EXACT else GREY for name in names]
    errors = [e.se or 0.0 for e in estimates.values()]
    axis.bar(names, [e.mean for e in estimates.values()], yerr=errors, capsize=5, color=colours, width=0.6)
    axis.axhline(estimates[EXACT].mean, color=FORWARD, linewidth=1, linestyle="--")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(title="KL(policy‖reference) by estimator (abs is no KL)", ylabel="nats per token")
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)


def _tokens(axis: Any, direction: Direction) -> None:
    """The tokens with the largest share of the KL."""
    top = direction.tokens[:TOKENS][::-1]
    rows = range(len(top))
    axis.barh(rows, [100 * token.share for token in top], color=_ways(top), height=0.65)
    axis.set_yticks(rows, [_label(token.text) for token in top], family="monospace")
    axis.set(title="Tokens with the largest KL", xlabel="share of KL (k3), %")
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)


def _likely(axis: Any, direction: Direction) -> None:
    """For the same tokens, whether they are more or less likely under the policy than under the reference."""
    top = direction.tokens[:TOKENS][::-1]
    rows = range(len(top))
    axis.barh(rows, [token.log_ratio for token in top], color=_ways(top), height=0.65)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(rows, [f"{_label(token.text)} ×{token.count}" for token in top], family="monospace")
    axis.set(
        title="More (orange) or less (blue) likely under the policy", xlabel="mean log π − log p where sampled, nats"
    )
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)


def _nothing(axis: Any) -> None:
    """A placeholder for an empty chart."""
    axis.text(0.5, 0.5, "no difference", ha="center", va="center", fontsize=14, transform=axis.transAxes)
    axis.set(title="Tokens with the largest KL", xticks=[], yticks=[])


def _ways(tokens: Sequence[TokenDrift]) -> list[str]:
    return [MORE if token.log_ratio > 0 else LESS for token in tokens]


def _label(token: str) -> str:
    """A token as a label, with visible spaces and without matplotlib's mathematics."""
    return repr(token).replace("$", r"\$")[:24]
