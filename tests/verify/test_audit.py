"""The audit's verdicts: the formulas that users wrote, and random ones against an independent enumeration."""

import json
import math
import random

import numpy as np
import pytest
import torch

from keel.errors import KeelError
from keel.verify import audit, load_callable, parse_formula
from keel.verify.oracle import random_bandits

KL, REVERSE = "policy||ref", "ref||policy"
# formula: value, in loss, in reward, off-policy in loss, off-policy in reward
VERDICTS = {
    "exp(ref - logp) - (ref - logp) - 1": (KL, REVERSE, "none", "none", "none"),
    "logp - ref": (KL, "zero", KL, "none", KL),
    "exp(logp - ref) * (logp - ref)": ("none", "none", "none", "none", "none"),
    "exp(logp - ref) - (logp - ref) - 1": ("none", "none", "none", "none", "none"),
    "(logp - ref)**2 / 2": ("none", KL, "none", "none", "none"),
    "exp(logp - old) * (exp(ref - logp) - 1 - (ref - logp))": (KL, KL, "none", KL, "none"),
    "exp(logp - old) * (logp - ref)": (KL, KL, KL, KL, "none"),
    "detach(exp(logp - old)) * (logp - ref)**2 / 2": ("none", KL, "none", KL, "none"),
    "detach(exp(logp - old)) * (logp - ref)": (KL, "zero", KL, "zero", "none"),
    "detach(exp(logp - old)) * (exp(ref - logp) - 1 - (ref - logp))": (KL, REVERSE, "none", REVERSE, "none"),
    "exp(logp - old) * (logp - ref)**2 / 2": ("none", "none", "none", "none", "none"),
    "exp(ref - logp) * (ref - logp)": (REVERSE, "none", "none", "none", "none"),
    "detach(logp - ref)": (KL, "zero", KL, "zero", KL),
    "2 * (logp - ref)": ("none", "zero", "none", "none", "none"),
    "clamp(logp - ref, -1, 1)": ("none", "none", "none", "none", "none"),
    "logp - old": ("none", "zero", "zero", "none", "none"),
    "0": ("none", "zero", "zero", "zero", "zero"),
    "7": ("none", "zero", "zero", "zero", "zero"),
}


@pytest.mark.parametrize(("formula", "expected"), VERDICTS.items())
def test_verdict_on_known_formulas(formula, expected):
    report = audit(parse_formula(formula), formula)
    off = report["off_policy"]
    got = (
        report["value"]["estimates"],
        report["in_loss"]["gradient"],
        report["in_reward"]["gradient"],
        off["in_loss"]["gradient"],
        off["in_reward"]["gradient"],
    )
    assert got == expected
    json.dumps(report, allow_nan=False)


def test_report_has_the_promised_form():
    report = audit(parse_formula("logp - ref"), "logp - ref")
    assert set(report) >= {"formula", "value", "in_loss", "in_reward", "off_policy", "overflows_at", "advice"}
    assert set(report["value"]) >= {"estimates", "bias", "std", "nonnegative"}
    for entry in (report["in_loss"], report["in_reward"], *report["off_policy"].values()):
        assert set(entry) >= {"gradient", "relative_error"}


def test_sign_overflow_and_name():
    k3 = audit(parse_formula("exp(ref - logp) - (ref - logp) - 1"), "k3")
    assert k3["value"]["nonnegative"] is True
    assert k3["known_as"] == "k3"
    assert k3["overflows_at"] == pytest.approx(math.log(torch.finfo(torch.float32).max), abs=0.02)
    k1 = audit(parse_formula("logp - ref"), "k1")
    assert k1["value"]["nonnegative"] is False
    assert k1["overflows_at"] is None
    assert "regularises nothing" in k1["advice"]
    # u·e^u = max of fp32 has its root at 84.28
    assert audit(parse_formula("exp(logp-ref)*(logp-ref)"), "x")["overflows_at"] == pytest.approx(84.28, abs=0.02)


def test_a_formula_that_overflows_even_fp64_is_no_kl():
    report = audit(parse_formula("exp(exp((logp - ref)**2))"), "x")
    assert report["value"]["estimates"] == "none"
    assert report["value"]["bias"] is None
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("formula", "says"),
    [
        ("__import__('os').system('true')", "may not be called"),
        ("logp.exp()", "may not be called"),
        ("logp.T", "not allowed"),
        ("eval(logp)", "unknown function"),
        ("foo + 1", "unknown name"),
        ("exp + 1", "function used without arguments"),
        ("logp ** 99", "exponent 99 is too large"),
        ("logp ** -99", "too large"),
        ("2 ** logp", "must be a number"),
        ("9**9**9**9", "must be a number"),
        ("logp[0]", "not allowed"),
        ("[logp for x in ref]", "not allowed"),
        ("lambda: 1", "not allowed"),
        ("logp if ref else old", "not allowed"),
        ("logp @ ref", "not allowed"),
        ("logp < ref", "not allowed"),
        ("exp(logp, ref)", "exp takes 1 argument"),
        ("clamp(logp)", "clamp takes"),
        ("clamp(logp, min=0, max=1)", "clamp takes"),
        ("'a'", "only numbers"),
        ("True", "only numbers"),
        ("1e999", "too large"),
        ("1j", "only numbers"),
        ("logp -", "cannot be parsed"),
        ("", "cannot be parsed"),
        ("(" * 300 + "logp" + ")" * 300, "cannot be parsed"),
        ("-" * 1500 + "logp", ""),
        ("9" * 1900, "too large"),
        ("logp + " * 500 + "ref", "characters long"),
        ("logp+" * 300 + "ref", "more than 400 parts"),
        ("(logp := 3)", "not allowed"),
        ("*logp", "cannot be parsed"),
    ],
)
def test_forbidden_formulas_are_refused_in_one_line(formula, says):
    with pytest.raises(KeelError) as error:
        parse_formula(formula)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_nan_is_named_with_its_place():
    with pytest.raises(KeelError, match=r"is NaN at logp="):
        audit(parse_formula("log(logp - ref)"), "log(logp - ref)")


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_kl.py").write_text(
        "import torch\n"
        "def k3(logp, ref):\n    return torch.exp(ref - logp) - (ref - logp) - 1\n"
        "def weighted(logp, ref, old):\n    return torch.exp(logp - old) * (logp - ref)\n"
        "def mean(logp, ref):\n    return (logp - ref).mean()\n"
        "def nan(logp, ref):\n    return (logp - ref) * float('nan')\n"
        "def mixes(logp, ref):\n    d = logp - ref\n    return d - d.mean()\n"
        "def raises(logp, ref):\n    raise RuntimeError('first\\nsecond')\n"
        "def text(logp, ref):\n    return 'kl'\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_kl"


def test_callables_are_audited(user_module):
    k3 = audit(load_callable(f"{user_module}:k3"), "my_kl:k3")
    assert (k3["value"]["estimates"], k3["in_loss"]["gradient"]) == (KL, REVERSE)
    weighted = audit(load_callable(f"{user_module}:weighted"), "my_kl:weighted")
    assert weighted["off_policy"]["in_loss"]["gradient"] == KL


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mean", "returned shape ()"),
        ("nan", "is NaN at"),
        ("mixes", "mixes tokens"),
        ("raises", "raised RuntimeError: first second"),
        ("text", "returned str"),
        ("number", "has no function 'number'"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_bad_callables_are_named_in_one_line(user_module, name, says):
    with pytest.raises(KeelError) as error:
        audit(load_callable(f"{user_module}:{name}"), name)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["no_such_module:f", "plain", ":f", "m:"])
def test_bad_callable_names(name):
    with pytest.raises(KeelError):
        load_callable(name)


# -- fuzz: an enumeration of our own, in numpy, with gradients by finite differences -------------------------------

NUMPY = {
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "abs": np.abs,
    "clamp": np.clip,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(0, x),
}


def random_formula(rng, depth):
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(["logp", "ref", "old", "logp - ref", "ref - logp", "logp - old", "0.5", "1", "2"])
    kind = rng.random()
    if kind < 0.55:
        operator = rng.choice(["+", "-", "*"])
        return f"({random_formula(rng, depth - 1)}) {operator} ({random_formula(rng, depth - 1)})"
    if kind < 0.65:
        return f"({random_formula(rng, depth - 1)})**{rng.choice(['2', '3'])}"
    name = rng.choice(["exp", "expm1", "abs", "sigmoid", "softplus", "minimum", "maximum", "clamp"])
    inner = random_formula(rng, depth - 1)
    if name == "clamp":
        return f"clamp({inner}, -2, 3)"
    if name in ("minimum", "maximum"):
        return f"{name}({inner}, {random_formula(rng, depth - 1)})"
    return f"{name}({inner})"


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def enumerate_verdicts(formula, bandits):
    """Value and gradients from the definitions alone: sums over outcomes, central differences in the logits."""

    def values(theta, ref, old):
        names = {"logp": log_softmax(theta), "ref": ref, "old": old, **NUMPY}
        return np.broadcast_to(np.asarray(eval(formula, {"__builtins__": {}}, names), dtype=float), theta.shape)

    def kls(theta, ref):
        logp = log_softmax(theta)
        return {KL: (np.exp(logp) * (logp - ref)).sum(), REVERSE: (np.exp(ref) * (ref - logp)).sum()}

    def difference(function, theta):
        out, h = np.zeros_like(theta), 1e-5
        for i in range(len(theta)):
            step = np.zeros_like(theta)
            step[i] = h
            out[i] = (function(theta + step) - function(theta - step)) / (2 * h)
        return out

    places = ["value", "loss", "reward", "off loss", "off reward"]
    close = {place: {KL: True, REVERSE: True, "zero": True} for place in places}
    for bandit in bandits:
        theta = bandit.policy.numpy()
        ref, sampler = log_softmax(bandit.reference.numpy()), log_softmax(bandit.sampler.numpy())
        here = log_softmax(theta)
        truth = kls(theta, ref)
        targets = {name: difference(lambda t, n=name, r=ref: kls(t, r)[n], theta) for name in (KL, REVERSE)}
        mean = (np.exp(here) * values(theta, ref, here)).sum()
        for name in (KL, REVERSE):
            close["value"][name] &= abs(mean - truth[name]) < 1e-7 * truth[name]
        for prefix, old in (("", here), ("off ", sampler)):
            weight = np.exp(old)
            loss = difference(lambda t, w=weight, o=old, r=ref: (w * values(t, r, o)).sum(), theta)
            fixed = values(theta, ref, old) * np.exp(here - old) * weight
            reward = difference(lambda t, f=fixed: (f * log_softmax(t)).sum(), theta)
            for place, measured in ((prefix + "loss", loss), (prefix + "reward", reward)):
                scale = np.linalg.norm(targets[KL])
                for name in (KL, REVERSE):
                    error = np.linalg.norm(measured - targets[name])
                    close[place][name] &= error < 1e-5 * np.linalg.norm(targets[name])
                close[place]["zero"] &= np.linalg.norm(measured) < 1e-5 * scale
    return [
        next((n for n in (["zero"] if place != "value" else []) + [KL, REVERSE] if close[place][n]), "none")
        for place in places
    ]


FUZZED = ["logp - ref", "exp(ref - logp) * (ref - logp)", "(logp - ref)**2 * 0.5", "expm1(ref - logp) - (ref - logp)"]
FUZZED += ["exp(logp - old) * (logp - ref)", "softplus(logp - ref) - softplus(ref - logp)", "1 - exp(ref - logp)"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fuzzed_formulas_agree_with_an_independent_enumeration():
    rng = random.Random(0)
    formulas = FUZZED + [random_formula(rng, rng.randint(1, 4)) for _ in range(150)]
    bandits = random_bandits(6, seed=11)
    compared = 0
    for formula in formulas:
        report = audit(parse_formula(formula), formula, bandits)
        if report["value"]["bias"] is None or abs(report["value"]["bias"]) > 1e6:
            continue  # finite differences lose their digits there
        off = report["off_policy"]
        got = [
            report["value"]["estimates"],
            report["in_loss"]["gradient"],
            report["in_reward"]["gradient"],
            off["in_loss"]["gradient"],
            off["in_reward"]["gradient"],
        ]
        assert got == enumerate_verdicts(formula, bandits), formula
        compared += 1
    assert compared > 100
