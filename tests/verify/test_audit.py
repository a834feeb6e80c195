"""The audit's verdicts: the formulas that users wrote, and random ones against an independent enumeration."""

import json
import math
import random

import numpy as np
import pytest
import torch

from keel.base.errors import KeelError
from keel.verify import audit, load_callable, parse_formula
from keel.verify.oracle import random_bandits

KL, REVERSE = "policy||ref", "ref||policy"
NEAR = f"near {KL}"
# formula: value; on-policy in loss, advantage, reward; off-policy in loss, advantage, reward
VERDICTS = {
    "exp(ref - logp) - (ref - logp) - 1": (KL, REVERSE, "none", "none", f"near {REVERSE}", "none", "none"),
    "logp - ref": (KL, "zero", KL, KL, "away", KL, NEAR),
    "logp - ref + 0.1": ("none", "zero", KL, "none", "away", KL, "none"),
    "abs(logp - ref)": ("none", "total-variation", "none", "none", "near total-variation", "none", "none"),
    "exp(logp - ref) * (logp - ref)": ("none",) * 7,
    "exp(logp - ref) - (logp - ref) - 1": ("none",) * 7,
    "(logp - ref)**2 / 2": ("none", KL, "none", "none", NEAR, "none", "none"),
    "exp(logp - old) * (exp(ref - logp) - 1 - (ref - logp))": (KL, KL, "none", "none", KL, "none", "none"),
    "exp(logp - old) * (logp - ref)": (KL, KL, KL, KL, KL, NEAR, NEAR),
    "detach(exp(logp - old)) * (logp - ref)**2 / 2": ("none", KL, "none", "none", KL, "none", "none"),
    "detach(exp(logp - old)) * (logp - ref)": (KL, "zero", KL, KL, "zero", NEAR, NEAR),
    "detach(exp(logp - old)) * (exp(ref - logp) - 1 - (ref - logp))": (
        *(KL, REVERSE, "none", "none"),
        *(REVERSE, "none", "none"),
    ),
    "exp(logp - old) * (logp - ref)**2 / 2": ("none",) * 7,
    "exp(ref - logp) * (ref - logp)": (REVERSE, *("none",) * 6),
    "detach(logp - ref)": (KL, "zero", KL, KL, "zero", KL, NEAR),
    "2 * (logp - ref)": ("none", "zero", "none", "none", "none", "none", "none"),
    "clamp(logp - ref, -1, 1)": ("none",) * 7,
    "logp - old": ("none", "zero", "zero", "zero", "away", "none", "none"),
    "0": ("none", *("zero",) * 6),
    "7": ("none", "zero", "zero", "none", "zero", "zero", "none"),
}


@pytest.mark.parametrize(("formula", "expected"), VERDICTS.items())
def test_verdict_on_known_formulas(formula, expected):
    report = audit(parse_formula(formula), formula)
    places = ("in_loss", "in_advantage", "in_reward")
    verdicts = [results[place]["gradient"] for results in (report, report["off_policy"]) for place in places]
    assert (report["value"]["estimates"], *verdicts) == expected
    json.dumps(report, allow_nan=False)


def test_report_has_the_promised_form():
    report = audit(parse_formula("logp - ref"), "logp - ref")
    assert set(report) >= {"formula", "value", "in_loss", "in_reward", "off_policy", "overflows_at", "advice"}
    assert set(report["value"]) >= {"estimates", "bias", "std", "nonnegative"}
    of_old = [report["off_policy"][place] for place in ("in_loss", "in_advantage", "in_reward")]
    for entry in (report["in_loss"], report["in_advantage"], report["in_reward"], *of_old):
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
        ("exp + 1", "has no arguments"),
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
        ("logp + " * 500 + "ref", "characters"),
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
        "def single(logp, ref):\n    return logp.float() - ref.float()\n"
        "def option(logp, ref, clamp=10.0):\n    return logp - ref + 0 * clamp\n"
        "def named(logp, ref, old_logp=None):\n    return torch.exp(logp - old_logp) * (logp - ref)\n"
        "def whole(logp, ref):\n    return (logp - ref).long()\n"
        "def sparse(logp, ref):\n    return (logp - ref).to_sparse()\n"
        "def exits(logp, ref):\n    raise SystemExit(0)\n"
        "def random(logp, ref):\n    return torch.rand_like(logp)\n"
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


def test_a_callable_in_single_precision_is_judged_to_it(user_module):
    report = audit(load_callable(f"{user_module}:single"), "my_kl:single")
    assert (report["value"]["estimates"], report["in_loss"]["gradient"]) == (KL, "zero")
    assert (report["precision"], report["known_as"]) == ("float32", "k1")
    assert audit(load_callable(f"{user_module}:k3"), "k3")["precision"] == "float64"


def test_an_optional_third_argument_is_not_old_unless_it_says_so(user_module):
    assert audit(load_callable(f"{user_module}:option"), "x")["known_as"] == "k1"
    assert audit(load_callable(f"{user_module}:named"), "x")["off_policy"]["in_loss"]["gradient"] == KL


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("whole", "ordinary floating-point tensor"),
        ("sparse", "ordinary floating-point tensor"),
        ("exits", "raised SystemExit"),
        ("random", "is random"),
        ("mean", "returned shape ()"),
        ("nan", "is NaN at"),
        ("mixes", "mixes tokens"),
        ("raises", "raised RuntimeError: first second"),
        ("text", "returned str"),
        ("number", "it must be a function or a class"),
        ("absent", "has no attribute 'absent'"),
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


# -- fuzz: an enumeration of our own, in numpy, with forward-mode derivatives --------------------------------------


class Dual:
    """A value and its derivative by logp, outcome by outcome."""

    def __init__(self, value, slope=0.0):
        self.value = np.asarray(value, dtype=float)
        self.slope = np.broadcast_to(np.asarray(slope, dtype=float), self.value.shape)

    @staticmethod
    def of(x):
        return x if isinstance(x, Dual) else Dual(x)

    def __add__(self, other):
        other = Dual.of(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other):
        other = Dual.of(other)
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __truediv__(self, other):
        other = Dual.of(other)
        quotient = self.value / other.value
        return Dual(quotient, (self.slope - quotient * other.slope) / other.value)

    def __pow__(self, power):
        return Dual(self.value**power, power * self.value ** (power - 1) * self.slope)

    def __neg__(self):
        return Dual(-self.value, -self.slope)

    def __sub__(self, other):
        return self + -Dual.of(other)

    def __radd__(self, other):
        return self + other

    def __rmul__(self, other):
        return self * other

    def __rsub__(self, other):
        return Dual.of(other) - self

    def __rtruediv__(self, other):
        return Dual.of(other) / self


def smooth(function, derivative):
    return lambda x: Dual(function(Dual.of(x).value), derivative(Dual.of(x).value) * Dual.of(x).slope)


def choose(pick):
    """minimum or maximum; the slope of what was picked, the mean of both at a tie."""

    def apply(a, b):
        a, b = Dual.of(a), Dual.of(b)
        first, tie = pick(a.value, b.value), np.equal(a.value, b.value)
        slope = np.where(tie, (a.slope + b.slope) / 2, np.where(first, a.slope, b.slope))
        return Dual(np.where(first, a.value, b.value), slope)

    return apply


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def clamp(x, low, high):
    x = Dual.of(x)
    return Dual(np.clip(x.value, low, high), x.slope * ((x.value >= low) & (x.value <= high)))


NUMPY = {
    "exp": smooth(np.exp, np.exp),
    "expm1": smooth(np.expm1, np.exp),
    "log": smooth(np.log, lambda x: 1 / x),
    "log1p": smooth(np.log1p, lambda x: 1 / (1 + x)),
    "abs": smooth(np.abs, np.sign),
    "sigmoid": smooth(sigmoid, lambda x: sigmoid(x) * sigmoid(-x)),
    "softplus": smooth(lambda x: np.logaddexp(0, x), sigmoid),
    "detach": lambda x: Dual(Dual.of(x).value),
    "minimum": choose(np.less),
    "maximum": choose(np.greater),
    "clamp": clamp,
}
U = "(logp - ref)"
RIGHT = [U, f"{U}**2 / 2", f"(exp(-{U}) - 1 + {U})", f"exp(-{U}) * -{U}", f"exp(logp - old) * {U}"]
RIGHT += [f"detach(exp(logp - old)) * {U}**2 / 2", f"detach({U})", f"exp(logp - old) * (expm1(-{U}) + {U})"]


def random_formula(rng, depth):
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(["logp", "ref", "old", U, "(ref - logp)", "(logp - old)", "0.5", "1", "2"])
    kind = rng.random()
    if kind < 0.5:
        return f"({random_formula(rng, depth - 1)} {rng.choice('+-*')} {random_formula(rng, depth - 1)})"
    if kind < 0.6:
        return f"({random_formula(rng, depth - 1)} / (1 + abs({random_formula(rng, depth - 1)})))"
    if kind < 0.68:
        return f"({random_formula(rng, depth - 1)})**{rng.choice(['2', '3'])}"
    name = rng.choice([*NUMPY, "detach"])
    inner = random_formula(rng, depth - 1)
    if name == "clamp":
        return f"clamp({inner}, -2, 3)"
    if name in ("minimum", "maximum"):
        return f"{name}({inner}, {random_formula(rng, depth - 1)})"
    if name in ("log", "log1p"):
        return f"{name}(0.5 + abs({inner}))"
    return f"{name}({inner})"


CHANGES = (
    "({k})",
    "2 * ({k}) / 2",
    "1.5 * ({k})",
    "({k}) + 0 * old",
    "detach({k})",
    "({k}) + 1 - 1",
    "({k}) + logp - logp",
    "0.5 * ({k}) + 0.5 * ({o})",
    "({k}) + exp(-(logp - ref)) - 1",
    "clamp({k}, -40, 400000)",
    "maximum({k}, {o})",
    "({k}) - ({o}) + ({o})",
    "exp(logp - old) * ({k})",
    "({k}) + log(exp(logp))",
    "({k}) / exp(logp - old)",
)


def near_right(rng):
    """A known formula under a change that may or may not matter."""
    return rng.choice(CHANGES).format(k=rng.choice(RIGHT), o=rng.choice(RIGHT))


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def enumerate_verdicts(formula, bandits):
    """Value, bias and gradients from the definitions alone: sums over outcomes; ∂logp_y/∂θ_i = 1[y=i] − π_i."""
    places = ["value", "loss", "advantage", "off loss", "off advantage"]
    close = {place: {KL: True, REVERSE: True, "zero": True} for place in places}
    biases, lowest = {KL: [], REVERSE: []}, np.inf
    for bandit in bandits:
        here, ref, sampler = (log_softmax(x.numpy()) for x in (bandit.policy, bandit.reference, bandit.sampler))
        pi, p = np.exp(here), np.exp(ref)
        jacobian = np.eye(len(pi)) - pi
        truth = {KL: (pi * (here - ref)).sum(), REVERSE: (p * (ref - here)).sum()}
        targets = {KL: (pi * (here - ref)) @ jacobian, REVERSE: -p @ jacobian}
        for prefix, old in (("", here), ("off ", sampler)):
            names = {"logp": Dual(here, 1.0), "ref": Dual(ref), "old": Dual(old), **NUMPY}
            f = Dual.of(eval(formula, {"__builtins__": {}}, names)) + Dual(np.zeros_like(here))
            gradients = {"loss": (np.exp(old) * f.slope) @ jacobian, "advantage": (pi * f.value) @ jacobian}
            for place, measured in gradients.items():
                for name in (KL, REVERSE):
                    error = np.linalg.norm(measured - targets[name]) / np.linalg.norm(targets[name])
                    close[prefix + place][name] &= error < 1e-8
                close[prefix + place]["zero"] &= np.linalg.norm(measured) < 1e-8 * np.linalg.norm(targets[KL])
            if not prefix:
                lowest = min(lowest, f.value.min())
                for name in (KL, REVERSE):
                    biases[name].append(((pi * f.value).sum() - truth[name]) / truth[name])
                    close["value"][name] &= abs(biases[name][-1]) < 1e-8
    verdicts = [
        next((n for n in (["zero"] if place != "value" else []) + [KL, REVERSE] if close[place][n]), "none")
        for place in places
    ]
    bias = min((max(values, key=abs) for values in biases.values()), key=abs)
    return verdicts, bias, lowest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fuzzed_formulas_agree_with_an_independent_enumeration():
    rng = random.Random(0)
    formulas = RIGHT + [near_right(rng) for _ in range(120)]
    formulas += [random_formula(rng, rng.randint(1, 4)) for _ in range(120)]
    bandits = random_bandits(4, seed=11)  # one of each scale
    seen = dict.fromkeys((KL, REVERSE, "zero", "none"), 0)
    used = "\n".join(formulas)
    assert all(f"{name}(" in used for name in NUMPY)
    for formula in formulas:
        report = audit(parse_formula(formula), formula, bandits)
        if report["value"]["bias"] is None or abs(report["value"]["bias"]) > 1e7:
            continue  # sums of such numbers have no digits left for a verdict
        off = report["off_policy"]
        got = [
            report["value"]["estimates"],
            report["in_loss"]["gradient"],
            report["in_advantage"]["gradient"],
            off["in_loss"]["gradient"],
            off["in_advantage"]["gradient"],
        ]
        got = [verdict if verdict in seen else "none" for verdict in got]  # the enumeration knows only the KLs
        verdicts, bias, lowest = enumerate_verdicts(formula, bandits)
        assert got == verdicts, formula
        assert report["value"]["bias"] == pytest.approx(bias, rel=1e-6, abs=1e-8), formula
        if lowest < -1e-9:
            assert report["value"]["nonnegative"] is False, formula
        for verdict in got:
            seen[verdict] += 1
    assert min(seen.values()) >= 10, seen
