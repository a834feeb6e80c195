"""Print a drift: the estimates, tokens and positions with the largest KL, and the completion with the largest KL."""

from __future__ import annotations

from math import floor, log10

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keel.lab.compare.measure import EXACT, Direction, Drift, DriftEstimate, MeasuredCompletion

NOTES = {
    "k1": "unbiased; either sign",
    "k2": "biased",
    "k3": "unbiased; never negative",
    "abs": "not a KL: mean |log-ratio|",
    EXACT: "its sum is the Rao-Blackwell estimate",
}
UNITS = {"prompt": "prompts", "completion": "completions", "token": "tokens, assumed independent"}
TOKENS = 10
_FULL = 0.05  # nats: the full colour is for this log-ratio or a larger one


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
    console.print(_tokens(forward))
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


def _tokens(direction: Direction) -> Table:
    table = Table(title="Tokens with the largest KL", title_justify="left", title_style="bold")
    for column in ("token", "sampled", "mean log-ratio", "share of KL (k3)"):
        table.add_column(column, justify="left" if column == "token" else "right")
    for token in direction.tokens[:TOKENS]:
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
    """`mean ± se`, both to the error's second digit."""
    mean, se = estimate.mean, estimate.se
    if not se:
        return f"{mean:.4g}" if se is None else f"{mean:.4g} ± 0"
    decimals = max(0, 1 - floor(log10(se)))
    return f"{mean:.{decimals}f} ± {se:.{decimals}f}" if decimals <= 7 else f"{mean:.3g} ± {se:.2g}"
