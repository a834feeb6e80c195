"""Facts on each KL pairing, as data. `keel verify` proves the rows, and option validation reads them.

A row is one combination of estimator, placement, sampling and gradient form. It states the quantity that the value
estimates, and the expected gradient if every token has equal weight. `under_reduction` adds the effect of the loss's
reduction. Exact enumeration checks every row, and penalties under every loss. See docs/kl.md for derivations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.parts import is_import_path

CUSTOM_SPEC = re.compile(r"(?P<path>[^()]+)(?:\((?P<params>.*)\))?", re.DOTALL)  # a user's own estimator
PLACEMENTS = ("loss", "reward", "advantage")
LEVELS = ("token", "sequence")
WEIGHTS = ("rho", "sg_rho")
POLICY_REF, REF_POLICY, JSD, TOPK = "policy||ref", "ref||policy", "jsd", "topk"
NEAR = f"near {POLICY_REF}"
LENGTH_WEIGHTED = "length-weighted "
ALONG = "along "  # prefix for a divergence that is summed over the tokens of the policy's own completions

_GRADIENTS = {
    POLICY_REF: "∇KL(policy‖ref)",
    REF_POLICY: "∇KL(ref‖policy)",
    "total-variation": "∇‖policy − ref‖₁",
    JSD: "∇JSD(policy, ref)",
    TOPK: "∇KL of the policy's top k tokens and one bucket for the rest",
}
_DRIFT = "the drift between the sampler and the policy"
_BY_LENGTH = "the loss's mean over each completion weighs its tokens by 1/length"

# Names of expected gradients and values, with their descriptions.
MEANINGS = {
    POLICY_REF: "∇KL(policy‖ref): the usual KL penalty",
    REF_POLICY: "∇KL(ref‖policy): the gradient of the forward KL",
    "total-variation": "∇‖policy − ref‖₁, twice the total variation",
    JSD: "∇JSD(policy, ref), the generalised Jensen-Shannon divergence",
    TOPK: "∇KL of the policy's top k tokens and one bucket for the rest, a lower bound of KL(policy‖ref)",
    **{f"{ALONG}{name}": f"{_GRADIENTS[name]}, summed along own completions" for name in (REF_POLICY, JSD, TOPK)},
    **{f"near {name}": f"near {gradient}, and biased by {_DRIFT}" for name, gradient in _GRADIENTS.items()},
    **{
        f"{LENGTH_WEIGHTED}{name}": f"near {gradient}: {_BY_LENGTH}, which is exact where lengths are equal"
        for name, gradient in _GRADIENTS.items()
    },
    **{
        f"near {LENGTH_WEIGHTED}{name}": f"near {gradient}: {_BY_LENGTH}, and it is biased by {_DRIFT}"
        for name, gradient in _GRADIENTS.items()
    },
    "zero": "zero: it regularises nothing",
    "away": "−∇KL(sampler‖policy): it pushes the policy away from its own samples",
    "wrong": "no divergence's gradient",
}
REFUSED = ("zero", "away", "wrong")


@dataclass(frozen=True)
class Fact:
    """One row: the pairing, the quantity that its value estimates, and its expected gradient."""

    estimator: str
    placement: str
    sampling: str  # "on": samples from the policy; "off": from an older policy μ
    gradient: str  # a gradient form in the loss; "score" in the reward and the advantage
    value: str
    expected_gradient: str
    level: str = "token"
    bare_score: bool = False  # the gradient contains a multiple of ρ·s, whose expectation is 0 only under equal weights


# For an estimator's own gradient in the loss, per token. estimator: {weight: (expectation on-policy, off-policy)}
_SAMPLED: dict[str, dict[str, tuple[str, str]]] = {
    "k1": {"plain": ("zero", "away"), "rho": (POLICY_REF, POLICY_REF), "sg_rho": ("zero", "zero")},
    "k2": {"plain": (POLICY_REF, NEAR), "rho": ("wrong", "wrong"), "sg_rho": (POLICY_REF, POLICY_REF)},
    "k3": {
        "plain": (REF_POLICY, f"near {REF_POLICY}"),
        "rho": (POLICY_REF, POLICY_REF),
        "sg_rho": (REF_POLICY, REF_POLICY),
    },
    "abs": {
        "plain": ("total-variation", "near total-variation"),
        "rho": ("wrong", "wrong"),
        "sg_rho": ("total-variation", "total-variation"),
    },
}
# Sums over the vocabulary at a given prefix: no token is sampled, so weights do not change the expectation.
_SUMMED = {
    "exact": dict.fromkeys(("plain", "rho", "sg_rho"), (POLICY_REF, POLICY_REF)),
    "exact_reverse": dict.fromkeys(("plain", "rho", "sg_rho"), (REF_POLICY, REF_POLICY)),
    "jsd": dict.fromkeys(("plain", "rho", "sg_rho"), (JSD, JSD)),
    "topk": dict.fromkeys(("plain", "rho", "sg_rho"), (TOPK, TOPK)),
    # The tail is sampled, so the expectation depends on importance weights.
    "topk_unbiased": {"plain": (POLICY_REF, NEAR), "rho": ("wrong", "wrong"), "sg_rho": (POLICY_REF, POLICY_REF)},
}


def is_custom(name: str) -> bool:
    """Whether an estimator is a user's own: `module:attr` with or without parameters."""
    match = CUSTOM_SPEC.fullmatch(name)
    return match is not None and is_import_path(match["path"])


def over_vocabulary(estimator: str) -> bool:
    """Whether an estimator uses both distributions over the vocabulary instead of only the sampled token."""
    return estimator in _SUMMED


@dataclass(frozen=True)
class GradientForm:
    """The gradient form of a KL value: its importance weight, and its carrier, the estimator whose gradient it has."""

    weight: str | None = None
    carrier: str | None = None

    def __str__(self) -> str:
        return "*".join(part for part in (self.weight, self.carrier) if part) or "plain"


def parse_gradient(text: str) -> GradientForm:
    """Read a form such as `plain`, `k2`, `rho`, `sg_rho*k2`."""
    if text == "plain":
        return GradientForm()
    weight: str | None = None
    carrier: str | None = None
    for part in text.split("*"):
        if part in WEIGHTS and weight is None and carrier is None:
            weight = part
        elif part in _SAMPLED and carrier is None:
            carrier = part
        else:
            raise unknown("gradient form", text, ["plain", *_SAMPLED, *WEIGHTS, "sg_rho*k2", "rho*k3"])
    return GradientForm(weight, carrier)


def _with_carriers(estimator: str, own_forms: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """All gradient forms of an estimator. A form with a carrier has the carrier's gradient under the same weight."""
    carried = {
        carrier if weight == "plain" else f"{weight}*{carrier}": verdicts
        for carrier, forms in _SAMPLED.items()
        if carrier != estimator
        for weight, verdicts in forms.items()
    }
    return {**own_forms, **carried}


_OWN_GRADIENT = ("jsd", "topk", "topk_unbiased")  # used with their own gradient only
_LOSS = {
    name: forms if name in _OWN_GRADIENT else _with_carriers(name, forms)
    for name, forms in (_SAMPLED | _SUMMED).items()
}

# estimator: expected gradient in the reward or the advantage. The value is detached; the policy term has the ratio.
_SCORE = {"k1": POLICY_REF, "k2": "wrong", "k3": "wrong", "abs": "wrong", "exact": "zero", "exact_reverse": "zero"}
_SCORE |= {"jsd": "zero", "topk": "zero", "topk_unbiased": "wrong"}

# estimator: the quantity that E[value] equals, on samples from the policy, or from μ weighted by the ratio.
_VALUE = {"k1": POLICY_REF, "k2": "none", "k3": POLICY_REF, "abs": "none", "exact": POLICY_REF}
_VALUE |= {"exact_reverse": REF_POLICY, "jsd": JSD, "topk": TOPK, "topk_unbiased": POLICY_REF}

# estimator: expected gradient in the loss at sequence level, on samples from the policy, or from μ weighted by the
# sequence's ratio.
_SEQUENCE = {"k1": POLICY_REF, "k2": POLICY_REF, "k3": REF_POLICY, "exact": POLICY_REF, "topk_unbiased": POLICY_REF}
_SEQUENCE |= {"exact_reverse": f"{ALONG}{REF_POLICY}", "jsd": f"{ALONG}{JSD}", "topk": f"{ALONG}{TOPK}"}


def _value_of(estimator: str, form: str, sampling: str) -> str:
    summed = over_vocabulary(estimator) and estimator != "topk_unbiased"
    return _VALUE[estimator] if summed or sampling == "on" or "rho" in form else "none"


def _has_bare_score(estimator: str, form: str) -> bool:
    """Whether k1 gives the gradient: that of ρ·k1 is ρ·(u + 1)·s, and that of k1 alone is s."""
    gradient = parse_gradient(form)
    return (gradient.carrier or estimator) == "k1"


def _rows() -> tuple[Fact, ...]:
    rows = []
    for estimator, forms in _LOSS.items():
        for form, verdicts in forms.items():
            for sampling, verdict in zip(("on", "off"), verdicts, strict=True):
                value, scored = _value_of(estimator, form, sampling), _has_bare_score(estimator, form)
                rows.append(Fact(estimator, "loss", sampling, form, value, verdict, bare_score=scored))
    for placement in ("reward", "advantage"):
        for estimator, verdict in _SCORE.items():
            for sampling in ("on", "off"):
                value = _value_of(estimator, "rho", sampling)
                rows.append(Fact(estimator, placement, sampling, "score", value, verdict))
    for estimator, verdict in _SEQUENCE.items():
        value = verdict if over_vocabulary(estimator) else _VALUE[estimator]
        for sampling in ("on", "off"):
            rows.append(Fact(estimator, "loss", sampling, "sequence", value, verdict, level="sequence"))
    for placement in ("reward", "advantage"):
        for sampling in ("on", "off"):
            # Off-policy, the policy term has the token ratio ρ_t instead of the sequence's ratio.
            verdict = POLICY_REF if sampling == "on" else NEAR
            rows.append(Fact("k1", placement, sampling, "score", POLICY_REF, verdict, level="sequence"))
            for estimator in (name for name in _SCORE if name != "k1"):
                value = _SEQUENCE[estimator] if over_vocabulary(estimator) else _VALUE[estimator]
                rows.append(Fact(estimator, placement, sampling, "score", value, "wrong", level="sequence"))
    return tuple(rows)


FACTS: tuple[Fact, ...] = _rows()


def find_fact(
    estimator: str, placement: str, sampling: str, gradient: str, level: str = "token", facts: Sequence[Fact] = ()
) -> Fact | None:
    """The row of a pairing, or None. `facts` are rows in addition to Keel's own."""
    key = (estimator, placement, sampling, gradient, level)
    for fact in (*FACTS, *facts):
        if (fact.estimator, fact.placement, fact.sampling, fact.gradient, fact.level) == key:
            return fact
    return None


def term_reduction(placement: str, kl_reduction: str, loss_reduction: str) -> str:
    """The reduction of the KL over tokens. In the reward and the advantage, it is the loss's own."""
    return loss_reduction if placement != "loss" or kl_reduction == "loss" else "token_mean"


def under_reduction(verdict: str, reduction: str, *, with_score: bool = False) -> str:
    """A row's expected gradient after the loss's `reduction`.

    A mean over each completion weights its tokens by 1/length, and the length depends on the sampled tokens. A correct
    gradient then becomes approximate, and a zero gradient becomes nonzero. `with_score` means that the gradient
    contains a multiple of ρ·s, such as ρ·(u + 1)·s of ρ·k1. Its expectation is zero under equal weights. Weighted by
    1/length, it favours longer or shorter completions.
    """
    if reduction != "sequence_mean":
        return verdict
    drift = "near " if verdict.startswith("near ") else ""
    weighted = f"{drift}{LENGTH_WEIGHTED}{verdict.removeprefix('near ')}"
    return weighted if weighted in MEANINGS and not with_score else "wrong"


def divergence_of(verdict: str) -> str:
    """The divergence whose gradient a verdict equals or approximates."""
    return verdict.removeprefix("near ").removeprefix(LENGTH_WEIGHTED)


@dataclass(frozen=True)
class Pairing:
    """A checked pairing: the gradient form and a note on its effect. `proven` is false if no row covers it."""

    estimator: str
    placement: str
    level: str
    form: GradientForm
    expected_gradient: str
    note: str
    proven: bool


def _auto(estimator: str) -> str:
    """The gradient form for `auto`: sg(ρ) or sg(ρ)·k2 for sampled estimators; plain for others and a user's own.

    The gradient ρ·u·s of sg(ρ)·k2 is correct on- and off-policy, and grows like d instead of e^d.
    """
    if estimator in ("k2", "topk_unbiased"):
        return "sg_rho"
    return "plain" if over_vocabulary(estimator) or estimator not in _LOSS else "sg_rho*k2"


def _advice(placement: str, level: str, custom: bool) -> str:
    if placement == "loss" and level == "token" and custom:
        return "use estimator=k3 with gradient=auto"  # for a user's own estimator, auto is its own gradient
    if placement == "loss":
        return "use gradient=auto" if level == "token" else "use estimator=exact (Rao-Blackwell) or k1"
    return f"use estimator=k1 in the {placement}, or move the term to placement=loss"


def check_pairing(
    estimator: str,
    placement: str = "loss",
    gradient: str = "auto",
    *,
    level: str = "token",
    off_policy: bool = False,
    allow_biased: bool = False,
    reduction: str = "token_mean",
    facts: Sequence[Fact] = (),
) -> Pairing:
    """Resolve `auto`, and refuse a pairing whose expected gradient is zero or wrong.

    The error suggests the closest correct pairing. `off_policy` means several updates per batch or stale samples.
    `reduction` averages the term over tokens; in the reward and the advantage it is the loss's own. `allow_biased`
    accepts any pairing; the note still states its gradient. `facts` are the rows of a user's own estimator from its
    audit.
    """
    custom = estimator not in _LOSS
    if custom and not is_custom(estimator):
        raise unknown("estimator", estimator, _LOSS)
    if placement not in PLACEMENTS:
        raise unknown("placement", placement, PLACEMENTS)
    if level not in LEVELS:
        raise unknown("level", level, LEVELS)
    if level == "sequence" and placement == "loss" and estimator not in _SEQUENCE:
        raise KeelError(
            f"kl.level=sequence has no form for kl.estimator={estimator}: use kl.level=token, or one of "
            f"{', '.join(_SEQUENCE)}"
        )
    if placement == "reward":
        level = "sequence"  # a reward is one number per completion, so its penalty is the sum over all tokens
    if gradient == "auto":
        has_forms = placement == "loss" and level == "token"
        form = parse_gradient(_auto(estimator)) if has_forms else GradientForm()
    else:
        form = parse_gradient(gradient)
        if form.carrier == estimator:
            form = GradientForm(form.weight)
        if placement != "loss" and gradient != "plain":
            raise KeelError(
                f"kl.gradient={gradient} does not apply to kl.placement={placement}, where the KL is detached: "
                "use gradient=auto, or placement=loss"
            )
        if level == "sequence" and gradient != "plain":
            raise KeelError(
                f"kl.gradient={gradient} does not apply to kl.level=sequence, which has its own gradient: "
                "use gradient=auto, or level=token"
            )
    key = "score" if placement != "loss" else "sequence" if level == "sequence" else str(form)
    sampling = "off" if off_policy else "on"
    fact = find_fact(estimator, placement, sampling, key, level, facts)
    if fact is None and not allow_biased:
        raise KeelError(
            f"kl.estimator={estimator} with gradient={form} and level={level} in the {placement} is not a proven "
            f"pairing: {_advice(placement, level, custom)}, or set kl.allow_biased=true"
        )
    per_sequence = placement == "loss" and level == "sequence"  # every loss averages such a term over sequences
    averaged = "token_mean" if per_sequence else reduction
    verdict = under_reduction(fact.expected_gradient, averaged, with_score=fact.bare_score) if fact else "wrong"
    meaning = MEANINGS[verdict] if fact else "unproven"
    policy = "off-policy" if off_policy else "on-policy"
    how = f"gradient={form}, level={level}" if key == str(form) else f"level={level}"
    what = f"kl.estimator={estimator} in the {placement} ({how}, {policy})"
    if verdict in REFUSED and not allow_biased:
        raise KeelError(
            f"{what} has an expected gradient that is {meaning}: {_advice(placement, level, custom)}, or set "
            "kl.allow_biased=true to run it anyway"
        )
    note = f"{what}: expected gradient is {meaning}"
    return Pairing(estimator, placement, level, form, verdict, note, proven=fact is not None)


@dataclass(frozen=True)
class LossAdvice:
    """A paper's recommendation of β for a loss."""

    loss_type: str
    paper: str
    beta: float | None
    note: str


PAPERS: dict[str, LossAdvice] = {
    "grpo": LossAdvice("grpo", "DeepSeekMath 2402.03300", 0.04, "k3 in the loss"),
    "dr_grpo": LossAdvice("dr_grpo", "Dr. GRPO 2503.20783", 0.0, "no KL with rule-based verifiers"),
    "dapo": LossAdvice("dapo", "DAPO 2503.14476", 0.0, "long chains of thought should be free to leave the reference"),
    "gspo": LossAdvice("gspo", "GSPO 2507.18071", 0.0, "sequence-level clipping limits the policy instead"),
    "cispo": LossAdvice("cispo", "MiniMax-M1 2506.13585", 0.0, ""),
    "gmpo": LossAdvice("gmpo", "GMPO 2507.20673", 0.0, ""),
    "bnpo": LossAdvice("bnpo", "BNPO 2506.02864", None, ""),
    "sapo": LossAdvice("sapo", "SAPO 2511.20347", None, ""),
    "deepseek-r1": LossAdvice(
        "deepseek-r1", "DeepSeek-R1 2501.12948", 0.001, "the reference is replaced every 400 steps"
    ),
    "k1-in-reward": LossAdvice("k1-in-reward", "Comedy of Estimators 2512.21852", 0.05, "best at 0.05 to 0.1"),
}


def advise(loss_type: str, beta: float) -> list[str]:
    """Notes on β for this loss, from its paper."""
    notes = []
    paper = PAPERS.get(loss_type)
    if loss_type == "dr_grpo" and beta > 0:
        notes.append(
            f"kl/unneeded: dr_grpo with a rule-based verifier is meant to run at beta 0 ({PAPERS['dr_grpo'].paper}): "
            f"its reward stays correct at any KL; beta is {beta:g}"
        )
    elif paper is not None and paper.beta is not None and beta > max(10 * paper.beta, 0.1):
        notes.append(f"beta {beta:g} is far above the {paper.beta:g} of {paper.paper}: expect little learning")
    return notes


CORRECT_GRADIENTS = (POLICY_REF, NEAR, f"{LENGTH_WEIGHTED}{POLICY_REF}", f"near {LENGTH_WEIGHTED}{POLICY_REF}")

# Candidates in order: a change of one option, then an estimator with a correct gradient, then the default pairing.
_CANDIDATES: tuple[Mapping[str, str], ...] = (
    {"gradient": "auto"},
    {"estimator": "k3"},
    {"estimator": "exact"},
    {"estimator": "k1"},
    {"gradient": "sg_rho*k2"},
    {"gradient": "auto", "estimator": "k3"},
    {"gradient": "auto", "estimator": "exact"},
    {"gradient": "auto", "estimator": "k1"},
    {"gradient": "auto", "estimator": "k3", "placement": "loss", "level": "token"},
)


def suggest_pairing(estimator: str, placement: str, gradient: str, level: str, **context: Any) -> dict[str, str]:
    """The `kl` options to change for a correct gradient; empty if it is already correct or no candidate is correct.

    `context` are further arguments of `check_pairing`, such as `off_policy`.
    """
    current = {"estimator": estimator, "placement": placement, "gradient": gradient, "level": level}
    exact_first = (
        sorted(_CANDIDATES, key=lambda candidate: candidate.get("estimator", "") == "k3")
        if "exact" in estimator
        else _CANDIDATES
    )
    for candidate in ({}, *exact_first):
        changed = {name: value for name, value in candidate.items() if value != current[name]}
        if (changed or not candidate) and _is_correct({**current, **changed}, context):
            return {f"kl.{name}": value for name, value in changed.items()}
    return {}


def _is_correct(pairing: Mapping[str, str], context: Mapping[str, Any]) -> bool:
    arguments: dict[str, Any] = {**pairing, **context}
    try:
        return check_pairing(**arguments).expected_gradient in CORRECT_GRADIENTS
    except KeelError:
        return False
