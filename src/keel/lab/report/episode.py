"""An episode as HTML: its turns, with tokens coloured by their log-ratio to the reference, and what it earned."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from keel.doctor.runs import Record
from keel.lab.report.rollouts import (
    K1_SAMPLE,
    Token,
    Turn,
    cut_note,
    details_of,
    facts,
    fold_title,
    folded,
    message_text,
    messages_of,
    turns_of,
)


def legend(kl_max: float, measured: bool = True) -> str:
    """What the colours mean."""
    if not measured:
        return (
            "<p class='legend kl'><span class='muted'>KL was not measured. Grey: not sampled by the policy, not "
            "trained on.</span></p>"
        )
    return (
        "<p class='legend kl'><span class='ramp'></span>"
        f"<span class='muted'>{K1_SAMPLE}: blue −{kl_max:.2g} · none 0 · orange +{kl_max:.2g} nats per token; "
        "grey: not sampled by the policy, not trained on. "
        "Hover or tap a token for its value.</span></p>"
    )


def prompt(record: Record) -> str:
    """The prompt that the model was given, and how much of it was cut off."""
    messages = messages_of(record)
    lines = [f"{m['role']}: {message_text(m)}" if m.get("role") else message_text(m) for m in messages]
    cut = f"<p class='muted'>{escape(cut_note(record))}</p>" if cut_note(record) else ""
    return f"<pre class='prompt'>{escape(chr(10).join(lines))}</pre>{cut}"


def completion(record: Record, kl_max: float) -> str:
    """One completion with its reward, parts, advantage and why it stopped."""
    caption = escape(" · ".join(facts(record)))
    drawing, seen = picture(record), details_of(record)
    judged = f"<pre class='details'>{escape(seen)}</pre>" if seen else ""
    return f"<div class='completion'>{turns(record, kl_max)}{drawing}{judged}<p class='muted'>{caption}</p></div>"


def picture(record: Record) -> str:
    """The task's own SVG of an answer, as an image: a browser runs no script and loads nothing inside one."""
    svg = record.get("picture")
    if not isinstance(svg, str) or not svg.lstrip().startswith("<svg"):
        return ""
    return f"<img class='picture' alt='' src='data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}'>"


def turns(record: Record, kl_max: float) -> str:
    """The tokens of a completion, those of several turns under their captions, the middle of a long episode folded.

    Plain text where tokens and KL do not match.
    """
    taken = turns_of(record)
    if not taken:
        return f"<pre>{escape(str(record.get('completion', '')))}</pre>"
    if not taken[0].caption:
        return f"<pre>{''.join(_spans(taken[0].tokens, kl_max))}</pre>"
    first, middle, last = ("".join(_turn(turn, kl_max) for turn in part) for part in folded(taken))
    fold = f"<details><summary>{fold_title(folded(taken)[1])}</summary><div>{middle}</div></details>" if middle else ""
    return f"<div class='episode'>{first}{fold}{last}</div>"


def _turn(turn: Turn, kl_max: float) -> str:
    note = f"<pre class='note'>{escape(turn.note)}</pre>" if turn.note else ""
    return (
        f"<div class='turn{'' if turn.sampled else ' heard'}'><p><b>{turn.speaker}</b> {escape(turn.caption)}</p>"
        f"<pre>{''.join(_spans(turn.tokens, kl_max))}</pre>{note}</div>"
    )


def _spans(turn: Sequence[Token], kl_max: float) -> Iterator[str]:
    """One span per token; neighbours without a KL are one span."""
    for measured, stretch in groupby(turn, key=lambda token: token.kl is not None):
        if measured:
            yield from (span(token.text, token.kl, False, kl_max) for token in stretch)
        else:
            unmeasured = list(stretch)
            yield span("".join(token.text for token in unmeasured), None, not unmeasured[0].sampled, kl_max)


def span(token: str, kl: float | None, context: bool, kl_max: float) -> str:
    """One token: its colour is a strength from 0 to 1 that the style sheet turns into light or dark shades."""
    if kl is None:
        return f"<span class='t x'>{escape(token)}</span>" if context else f"<span class='t'>{escape(token)}</span>"
    strength = min(1.0, abs(kl) / kl_max)
    sign = "p" if kl > 0 else "n"
    return f"<span class='t {sign}' style='--a:{strength:.2f}' title='log-ratio {kl:+.4f} nats'>{escape(token)}</span>"
