"""Print and plot a drift: the estimates, and the tokens, positions and completion with the largest KL."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keel.lab.compare.measure import (
    EXACT,
    Direction,
    Drift,
    DriftEstimate,
    MeasuredCompletion,
    PositionDrift,
    TokenDrift,
)
from keel.lab.plots.picture import picture

NOTES = {
    "k1": "unbiased; either sign",
    "k2": "biased",
    "k3": "unbiased; never negative",
    "abs": "not a KL: mean |log-ratio|",
    EXACT: "its sum is the Rao-Blackwell estimate",
}
UNITS = {"prompt": "prompts", "completion": "completions", "token": "tokens, assumed independent"}
TOKEN_ROWS = 10
_FULL = 0.05  # nats: the full colour stands for at least this log-ratio


def show_drift(drift: Drift, console: Console) -> None:
    """Print the whole measurement."""
    forward, reverse = drift.policy_ref, drift.ref_policy
    console.print(Text.assemble(("policy     ", "bold"), f"{drift.policy} ({drift.dtype[0]})"))
    console.print(Text.assemble(("reference  ", "bold"), f"{drift.reference} ({drift.dtype[1]})"))
    console.print(
        f"{drift.prompts} prompts × {drift.samples} completions of up to {drift.max_tokens} tokens at temperature "
        f"{drift.temperature:g}, seed {drift.seed}; nats, ± one standard error over {UNITS[drift.clustered_by]}",
        highlight=False,
    )
    forward_kl, reverse_kl = "KL(policy‖reference)", "KL(reference‖policy)"
    console.print(_estimates(f"{forward_kl}, samples from the policy", forward, reverse_kl))
    if reverse is not None:
        console.print(_estimates(f"{reverse_kl}, samples from the reference", reverse, forward_kl))
    if not forward.moved:
        console.print("Both models give every sampled token the same probability.")
        return
    console.print(_token_table(forward))
    console.print(_bands(forward))
    console.print(_largest(forward.largest))


def _estimates(title: str, direction: Direction, reverse_kl: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", caption=_caption(direction))
    table.caption_justify = "left"
    table.add_column("")
    table.add_column("per token", justify="right", no_wrap=True)
    table.add_column("per sequence", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for name, mean in direction.per_token.items():
        style = "bold" if name == EXACT else None
        table.add_row(name, _plus(mean), _plus(direction.per_sequence[name]), NOTES.get(name, ""), style=style)
    table.add_row(reverse_kl, _plus(direction.other_way), "", "exact, on the same states")
    return table


def _caption(direction: Direction) -> str:
    parts = [
        f"{direction.sampled_tokens} tokens in {direction.completions} completions",
        f"entropy {direction.entropy:.3g} per token",
    ]
    if direction.truncated:
        parts.append(f"{100 * direction.truncated:.0f}% truncated")
    if direction.clamped:
        parts.append(f"{direction.clamped} log-ratios clamped at ±20 nats")
    return "; ".join(parts)


def _token_table(direction: Direction) -> Table:
    table = Table(title="Tokens with the largest KL", title_justify="left", title_style="bold")
    for column in ("token", "sampled", "mean log-ratio", "share of KL (k3)"):
        table.add_column(column, justify="left" if column == "token" else "right")
    for token in direction.tokens[:TOKEN_ROWS]:
        table.add_row(Text(repr(token.text)), str(token.count), f"{token.log_ratio:+.4f}", f"{100 * token.share:.1f}%")
    return table


def _bands(direction: Direction) -> Table:
    table = Table(title="Positions", title_justify="left", title_style="bold", caption=_peaks(direction))
    table.caption_justify = "left"
    for column in ("position", "tokens", "exact KL per token", "share of KL"):
        table.add_column(column, justify="right")
    for band in direction.bands:
        where = str(band.first) if band.first == band.last else f"{band.first}–{band.last}"
        table.add_row(where, str(band.count), _plus(band.exact), f"{100 * band.share:.1f}%")
    return table


def _peaks(direction: Direction) -> str:
    """The single positions with the largest KL."""
    positive = [p for p in direction.common_positions() if p.exact.mean > 0]
    largest = sorted(positive, key=lambda p: -p.exact.mean)[:3]
    return "largest at " + ", ".join(f"{p.first} ({p.exact.mean:.3g})" for p in largest) if largest else ""


def _largest(sample: MeasuredCompletion) -> Text:
    """The completion coloured by log-ratio: orange where the policy makes a token more likely, blue where less."""
    top = max([_FULL, *(abs(x) for x in sample.log_ratio)])
    text = Text.assemble(
        ("The completion with the largest KL", "bold"),
        f" ({sum(sample.exact):.4g} nats; ",
        ("more likely", _colour(1.0)),
        " or ",
        ("less likely", _colour(-1.0)),
        f" under the policy, full colour at {top:.2g} nats)\n",
        (sample.prompt, "dim"),
    )
    for token, ratio in zip(sample.tokens, sample.log_ratio, strict=True):
        text.append(token, style=_colour(ratio / top))
    return text


def _colour(share: float) -> str:
    """Grey at 0, orange at +1, blue at −1; legible on dark and on light."""
    target, weight = ((230, 120, 20) if share > 0 else (40, 120, 240)), min(1.0, abs(share)) ** 0.5
    red, green, blue = (round(140 + weight * (channel - 140)) for channel in target)
    return f"rgb({red},{green},{blue})" + (" bold" if weight > 0.7 else "")


def _plus(estimate: DriftEstimate) -> str:
    """`mean ± se`, both rounded to the second digit of the error."""
    mean, se = estimate.mean, estimate.se
    if not se:
        return f"{mean:.4g}" if se is None else f"{mean:.4g} ± 0"
    decimals = max(0, 1 - floor(log10(se)))
    return f"{mean:.{decimals}f} ± {se:.{decimals}f}" if decimals <= 7 else f"{mean:.3g} ± {se:.2g}"


FORWARD, REVERSE, GREY = "#12756f", "#7a4ea3", "#a3a8b0"
MORE, LESS = "#d9731a", "#2b6cb0"  # colours of tokens that are more or less likely under the policy
TOKEN_BARS = 12


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
    """Exact KL with a band of one standard error, at positions that a tenth of the completions reach."""
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
        xlabel="position in the completion\n(positions that at least a tenth of the completions reach)",
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
    axis.set(title="KL(policy‖reference) by estimator (abs is not a KL)", ylabel="nats per token")
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)


def _tokens(axis: Any, direction: Direction) -> None:
    """The tokens with the largest share of the KL."""
    top = direction.tokens[:TOKEN_BARS][::-1]
    rows = range(len(top))
    axis.barh(rows, [100 * token.share for token in top], color=_ways(top), height=0.65)
    axis.set_yticks(rows, [_label(token.text) for token in top], family="monospace")
    axis.set(title="Tokens with the largest KL", xlabel="share of KL (k3), %")
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)


def _likely(axis: Any, direction: Direction) -> None:
    """For the same tokens, whether they are more or less likely under the policy than under the reference."""
    top = direction.tokens[:TOKEN_BARS][::-1]
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
    """A token as a label, with visible spaces and without matplotlib's math mode."""
    return repr(token).replace("$", r"\$")[:24]
