"""The reference of facts: what each pairing of estimator, placement and gradient is, as `keel verify` proves it."""

from __future__ import annotations

from keel.kl.facts import FACTS, LEVELS, MEANINGS, PLACEMENTS, REFUSED, Fact
from pages.tables import table

HEAD = """# Facts

Every pairing of an estimator, a placement and a gradient form: what its value estimates on the policy's own samples
and off-policy, and what its expected gradient is. `keel verify` proves each row by exact enumeration in float64,
and a configuration is checked against them before a model is loaded: rows in **bold** are refused unless
`kl.allow_biased` is set. What a loss's reduction makes of a row, and the derivations: [What is true of
KL](../kl.md#the-three-placements).

"""
VALUES = {"policy||ref": "KL(policy‖ref)", "ref||policy": "KL(ref‖policy)", "none": "–"}


def facts_page() -> str:
    parts = []
    for level in LEVELS:
        for placement in PLACEMENTS:
            chosen = [fact for fact in FACTS if (fact.level, fact.placement) == (level, placement)]
            if chosen:
                parts.append(f"## In the {placement}, {level} level\n\n{_table(chosen)}")
    meanings = table(("gradient", "in words"), ((_name(name), words) for name, words in MEANINGS.items()))
    return HEAD + "\n\n".join([*parts, f"## What a gradient can be\n\n{meanings}\n"])


def _table(facts: list[Fact]) -> str:
    """One row for both ways of sampling."""
    pairs: dict[tuple[str, str], dict[str, Fact]] = {}
    for fact in facts:
        pairs.setdefault((fact.estimator, fact.gradient), {})[fact.sampling] = fact
    rows = (
        (f"`{estimator}`", f"`{gradient}`", _cell(pair.get("on")), _cell(pair.get("off")))
        for (estimator, gradient), pair in pairs.items()
    )
    return table(("estimator", "gradient form", "on-policy: value; gradient", "off-policy: value; gradient"), rows)


def _cell(fact: Fact | None) -> str:
    if fact is None:
        return ""
    gradient = _name(fact.expected_gradient)
    value = VALUES.get(fact.value, fact.value)
    return f"{value}; {f'**{gradient}**' if fact.expected_gradient in REFUSED else gradient}"


def _name(gradient: str) -> str:
    return gradient.replace("||", "‖")
