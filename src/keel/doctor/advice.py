"""Advice that can be applied: each proposal is computed from a configuration and changes at least one of its options.

`tree` is a configuration as plain data: a run's own, or another trainer's options that have a Keel name. `source` is
the trainer, so that options are named as its users name them.
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
START_BETA = 0.01  # β if there was none
# these react within a few steps; ziegler's horizon is thousands of episodes
FEEDBACK_CONTROLLERS = ("step", "dual", "pid")


def changes(tree: Tree, options: Options) -> Options:
    """The options whose value would change."""
    return {name: value for name, value in options.items() if option_of(tree, name) != value}


def either(*parts: Advice | str, joined: str = ", or ") -> Advice:
    """Join several proposals into one sentence and leave out empty ones."""
    advices = [part if isinstance(part, Advice) else Advice(part) for part in parts if str(part)]
    texts = (part.text if part.proposals else part.text.replace("{", "{{").replace("}", "}}") for part in advices)
    proposals = tuple(proposal for part in advices for proposal in part.proposals)
    text = joined.join(texts)
    return Advice(text if proposals else text.replace("{{", "{").replace("}}", "}"), proposals)


def setting(text: str, options: Options, otherwise: str = "") -> Advice:
    """`text` with the options in place of its `{}`, or `otherwise` if no option would change."""
    return propose(text, options) if options else Advice(otherwise)


def times(tree: Tree, dotted: str, factor: float, how: str, source: str = "keel") -> Advice:
    """An option at `factor` times its value, to two digits, with `how` as text; only `how` if the value is unknown."""
    name, value = option_name(dotted, source), option_of(tree, dotted)
    known = finite(value)
    if known is None or known <= 0:
        return Advice(f"{how} {name}")
    integer = isinstance(value, int)
    scaled = max(1, round(factor * value)) if integer else _two_digits(factor * value)
    return propose(f"{{}} ({how} its current value)", {name: scaled}) if scaled != value else Advice("")


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def stronger(tree: Tree, source: str = "keel") -> Advice:
    """A larger β: ten times the current one, or a first one if there is none."""
    name, beta = option_name("kl.beta", source), option_of(tree, "kl.beta")
    if beta == 0:
        return propose("{}", {name: START_BETA, **(_penalty(tree) if source == "keel" else {})})
    return times(tree, "kl.beta", 10, "ten times", source)


def weaker(tree: Tree, source: str = "keel") -> Advice:
    """A smaller β, if there is one."""
    return Advice("") if option_of(tree, "kl.beta") == 0 else times(tree, "kl.beta", 0.1, "a tenth of", source)


def no_penalty(tree: Tree) -> Options:
    """β = 0 with a fixed controller, since another controller would raise β again."""
    steered = option_of(tree, "kl.controller.name") not in (None, "fixed")
    return {"kl.beta": 0, **({"kl.controller": {"name": "fixed"}} if steered else {})}


def unpenalized(tree: Tree, why: str, source: str = "keel") -> Advice:
    """β = 0, with the reason."""
    return setting(f"{{}} {why}", no_penalty(tree) if source == "keel" else {option_name("kl.beta", source): 0})


def steered(tree: Tree, limit: float) -> Options:
    """A controller with a target KL per token of half of `limit`; {} if the configured one has that target or less.

    The controller is PID. It held a real model's KL within its band at nine of ten steps. The dual controller's β kept
    growing long after the KL had started to fall (docs/results.md).
    """
    now, target = option_of(tree, "kl.controller"), _two_digits(limit / 2)
    now = dict(now) if isinstance(now, Mapping) else {"name": "fixed"}
    per_token = now.get("unit", "per_token") == "per_token"
    if now.get("name") in FEEDBACK_CONTROLLERS and per_token:
        aimed = now.get("target", 0.05)
        return {"kl.controller.target": target} if isinstance(aimed, int | float) and aimed > target else {}
    start = {} if option_of(tree, "kl.beta") else {"kl.beta": START_BETA, **_penalty(tree)}
    if set(now) - {"name", "target"}:  # parameters that the new controller does not accept
        return {"kl.controller": {"name": "pid", "target": target}, **start}
    return {"kl.controller.name": "pid", "kl.controller.target": target, **start}


def _penalty(tree: Tree) -> Options:
    """Options that correct the estimator, placement and gradient, which are not checked at β = 0."""
    kl = option_of(tree, "kl")
    formula = formula_of({**tree, "kl": {**kl, "beta": START_BETA}}) if isinstance(kl, Mapping) else None
    return {} if formula is None or formula.right else formula.change


def reference(tree: Tree, kind: str) -> Options:
    """Another reference kind. The whole section is replaced if it has parameters that the new kind may not accept."""
    now = option_of(tree, "reference")
    if isinstance(now, Mapping) and set(now) - {"kind"}:
        return {"reference": {"kind": kind}}
    return changes(tree, {"reference.kind": kind})


def without_dropout(tree: Tree) -> Options:
    """The options that turn off the dropout that this configuration turns on."""
    options: dict[str, Any] = {}
    if option_of(tree, "model.dropout"):
        options["model.dropout"] = False
    if option_of(tree, "model.lora.dropout"):
        options["model.lora.dropout"] = 0
    return options


def unfiltered(tree: Tree, source: str = "keel") -> Options:
    """Turn off the sampling filters that are on."""
    off = {"rollout.top_p": 1, "rollout.top_k": 0, "rollout.min_p": 0}
    filtering = changes(tree, {name: value for name, value in off.items() if option_of(tree, name) is not None})
    return {option_name(name, source): value for name, value in filtering.items()}


def warmed_up(tree: Tree, steps: int = 10) -> Options:
    """A learning-rate warm-up of `steps`; {} if the configured one is as long, or the run is not twice as long."""
    now, end = option_of(tree, "optim.warmup_steps"), option_of(tree, "run.max_steps")
    short = isinstance(now, int) and now < steps
    return {"optim.warmup_steps": steps} if short and (finite(end) or math.inf) > 2 * steps else {}


def budget(tree: Tree, limit: float) -> Options:
    """A KL budget that rolls the run back, or stops it if rollbacks are not allowed; {} if one is configured."""
    if option_of(tree, "kl.budget") is not None:
        return {}
    action = "stop" if option_of(tree, "guards.max_rollbacks") == 0 else "rollback"
    return {"kl.budget.max": limit, "kl.budget.action": action}
