"""Proposals that can be followed: computed from the configuration that they are for, so that none is what it has.

`tree` is a configuration as plain data, a run's own or as much of a peer's as has a Keel name; `source` says whose, so
that an option is called what its user calls it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from keel.doctor.findings import Advice, Options, propose
from keel.doctor.formula import formula_of
from keel.doctor.history import finite
from keel.doctor.names import option_name
from keel.doctor.runs import option_of

Tree = Mapping[str, Any]
START_BETA = 0.01  # β where there was none
FEEDBACK_CONTROLLERS = ("step", "dual", "pid")  # they answer within some steps; ziegler counts thousands of episodes


def changes(tree: Tree, options: Options) -> Options:
    """Those of the options that are not so already."""
    return {name: value for name, value in options.items() if option_of(tree, name) != value}


def either(*parts: Advice | str, joined: str = ", or ") -> Advice:
    """Several proposals in one sentence; empty ones are left out."""
    advices = [part if isinstance(part, Advice) else Advice(part) for part in parts if str(part)]
    texts = (part.text if part.proposals else part.text.replace("{", "{{").replace("}", "}}") for part in advices)
    proposals = tuple(proposal for part in advices for proposal in part.proposals)
    text = joined.join(texts)
    return Advice(text if proposals else text.replace("{{", "{").replace("}}", "}"), proposals)


def setting(text: str, options: Options, otherwise: str = "") -> Advice:
    """`text` with the options in place of its `{}`; `otherwise` where there is nothing to set."""
    return propose(text, options) if options else Advice(otherwise)


def times(tree: Tree, dotted: str, factor: float, how: str, source: str = "keel") -> Advice:
    """An option at `factor` times what it is, to two digits, and `how` as text; the text alone where it is unknown."""
    name, value = option_name(dotted, source), option_of(tree, dotted)
    known = finite(value)
    if known is None or known <= 0:
        return Advice(f"{how} {name}")
    integer = isinstance(value, int)
    scaled = max(1, round(factor * value)) if integer else _two_digits(factor * value)
    return propose(f"{{}} ({how} what it is)", {name: scaled}) if scaled != value else Advice("")


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def stronger(tree: Tree, source: str = "keel") -> Advice:
    """A larger β: ten times what it is, or one at all."""
    name, beta = option_name("kl.beta", source), option_of(tree, "kl.beta")
    if beta == 0:
        return propose("{}", {name: START_BETA, **(_penalty(tree) if source == "keel" else {})})
    return times(tree, "kl.beta", 10, "ten times", source)


def weaker(tree: Tree, source: str = "keel") -> Advice:
    """A smaller β, where there is one."""
    return Advice("") if option_of(tree, "kl.beta") == 0 else times(tree, "kl.beta", 0.1, "a tenth of", source)


def no_penalty(tree: Tree) -> Options:
    """β = 0 for good: a controller would take it up again."""
    steered = option_of(tree, "kl.controller.name") not in (None, "fixed")
    return {"kl.beta": 0, **({"kl.controller": {"name": "fixed"}} if steered else {})}


def unpenalized(tree: Tree, why: str, source: str = "keel") -> Advice:
    """β = 0, and why."""
    return setting(f"{{}} {why}", no_penalty(tree) if source == "keel" else {option_name("kl.beta", source): 0})


def steered(tree: Tree, limit: float) -> Options:
    """A controller that holds the KL per token at half of `limit`, its unit that of the limit; {} where one does.

    PID answers to the KL of now: it held that of a real model within its band at nine steps of ten, where the dual's
    β grew until long after the KL had turned (docs/results.md).
    """
    now, target = option_of(tree, "kl.controller"), _two_digits(limit / 2)
    now = dict(now) if isinstance(now, Mapping) else {"name": "fixed"}
    per_token = now.get("unit", "per_token") == "per_token"
    if now.get("name") in FEEDBACK_CONTROLLERS and per_token:
        aimed = now.get("target", 0.05)
        return {"kl.controller.target": target} if isinstance(aimed, int | float) and aimed > target else {}
    start = {} if option_of(tree, "kl.beta") else {"kl.beta": START_BETA, **_penalty(tree)}
    if set(now) - {"name", "target"}:  # parameters that the new one does not take
        return {"kl.controller": {"name": "pid", "target": target}, **start}
    return {"kl.controller.name": "pid", "kl.controller.target": target, **start}


def _penalty(tree: Tree) -> Options:
    """What a pairing needs that nobody looked at while β was 0."""
    kl = option_of(tree, "kl")
    formula = formula_of({**tree, "kl": {**kl, "beta": START_BETA}}) if isinstance(kl, Mapping) else None
    return {} if formula is None or formula.right else formula.change


def reference(tree: Tree, kind: str) -> Options:
    """Another reference: the section is replaced where it has parameters that the new kind may not take."""
    now = option_of(tree, "reference")
    if isinstance(now, Mapping) and set(now) - {"kind"}:
        return {"reference": {"kind": kind}}
    return changes(tree, {"reference.kind": kind})


def without_dropout(tree: Tree) -> Options:
    """Dropout off where this configuration turns it on; an adapter that is not there is not asked for."""
    options: dict[str, Any] = {}
    if option_of(tree, "model.dropout"):
        options["model.dropout"] = False
    if option_of(tree, "model.lora.dropout"):
        options["model.lora.dropout"] = 0
    return options


def unfiltered(tree: Tree, source: str = "keel") -> Options:
    """Sampling from the whole distribution: those filters off that are on."""
    off = {"rollout.top_p": 1, "rollout.top_k": 0, "rollout.min_p": 0}
    filtering = changes(tree, {name: value for name, value in off.items() if option_of(tree, name) is not None})
    return {option_name(name, source): value for name, value in filtering.items()}


def warmed_up(tree: Tree, steps: int = 10) -> Options:
    """A warm-up of the learning rate that is over before the run is."""
    now, end = option_of(tree, "optim.warmup_steps"), option_of(tree, "run.max_steps")
    short = isinstance(now, int) and now < steps
    return {"optim.warmup_steps": steps} if short and (finite(end) or math.inf) > 2 * steps else {}


def budget(tree: Tree, limit: float) -> Options:
    """A budget that takes the run back, or stops it where rollbacks are not allowed; {} where there is one."""
    if option_of(tree, "kl.budget") is not None:
        return {}
    action = "stop" if option_of(tree, "guards.max_rollbacks") == 0 else "rollback"
    return {"kl.budget.max": limit, "kl.budget.action": action}
