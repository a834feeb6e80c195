"""A loss of one's own: what it is given, which options it declares, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from pydantic import Field

from keel.base.errors import KeelError
from keel.base.options import Float, NonNegativeFloat, Options, PositiveFloat
from keel.config import load_config
from keel.config.show import show_config
from keel.losses import LossInputs, LossOptions, PolicyTerm, Recipe, get_loss, policy_term

HERE = __name__
RATIO, ADVANTAGE = 1.5, 2.0


class Own(Options):
    slope: PositiveFloat = Field(default=1.0, description="Slope.")
    delta: float | None = None  # which every loss has: its value comes from there


def sloped(inputs: LossInputs, options: Own) -> PolicyTerm:
    ratio = inputs.ratio()
    return PolicyTerm(-options.slope * ratio * inputs.advantages - (options.delta or 0.0), ratio)


def plain(inputs, options):
    ratio = inputs.ratio()
    return PolicyTerm(-ratio * inputs.advantages, ratio)


def six_arguments(logp, old_logp, advantage, mask, limits, spec):
    raise AssertionError("never called")


class Shadowing(Options):
    entropy_coef: NonNegativeFloat = 0.07


def shadowing(inputs: LossInputs, options: Shadowing) -> PolicyTerm: ...


class Retyped(Options):
    epsilon: Float = 0.3


def retyped(inputs: LossInputs, options: Retyped) -> PolicyTerm: ...


@dataclass
class Plain:
    slope: float = 1.0


def by_dataclass(inputs: LossInputs, options: Plain) -> PolicyTerm: ...


by_sequence = Recipe(sloped, "sequence_mean", low=0.1, high=0.3, scale_rewards="none", takes_delta=True)


def value(loss: LossOptions) -> float:
    logp = torch.tensor([[RATIO]], dtype=torch.float64).log()
    mask = torch.ones(1, 1, dtype=torch.bool)
    return policy_term(loss, logp, torch.zeros_like(logp), torch.tensor([ADVANTAGE]), mask).loss.item()


def test_it_receives_what_it_declares():
    assert value(LossOptions(loss_type=f"{HERE}:sloped")) == pytest.approx(-RATIO * ADVANTAGE)
    assert value(LossOptions(loss_type=f"{HERE}:sloped", slope=0.5)) == pytest.approx(-0.5 * RATIO * ADVANTAGE)
    options = LossOptions(loss_type=f"{HERE}:by_sequence", slope=0.5, delta=1.75)
    assert value(options) == pytest.approx(-0.5 * RATIO * ADVANTAGE - 1.75)
    assert value(LossOptions(loss_type=f"{HERE}:plain")) == pytest.approx(-RATIO * ADVANTAGE)


def test_a_recipe_says_the_rest():
    assert get_loss(f"{HERE}:by_sequence") is by_sequence
    assert get_loss(f"{HERE}:sloped").reduction == "token_mean"
    config = load_config({"loss": {"loss_type": f"{HERE}:by_sequence", "slope": "1e-1"}})
    lines = [" ".join(line.split()) for line in show_config(config).splitlines()]
    assert "epsilon: null # Clip range below 1, a ratio; null is the loss's own. Here: 0.1." in lines
    assert "slope: 0.1 # Slope." in lines


MISTAKES = [
    ({"loss_type": f"{HERE}:sloped", "slop": 1}, "unknown option loss.slop: did you mean loss.slope?"),
    ({"loss_type": f"{HERE}:sloped", "slope": -1}, "loss.slope is -1: it must be above 0"),
    ({"loss_type": f"{HERE}:plain", "slope": 1}, "unknown option loss.slope: loss has baseline, "),
    ({"loss_type": "grpo", "slope": 1}, "unknown option loss.slope"),
    ({"loss_type": "grpo", "epsilom": 1}, "unknown option loss.epsilom: did you mean loss.epsilon?"),
    (
        {"loss_type": f"{HERE}:six_arguments"},
        "takes (logp, old_logp, advantage, mask, limits, spec): a policy loss takes (in",
    ),
    (
        {"loss_type": f"{HERE}:shadowing"},
        "declares entropy_coef with another type or default than every",
    ),
    ({"loss_type": f"{HERE}:retyped"}, "declares epsilon with another type or default than every loss has (None)"),
    ({"loss_type": f"{HERE}:by_dataclass"}, "a loss's options is declared as Plain: derive it from keel.base.options"),
    ({"loss_type": "builtins:dict"}, "loss.loss_type=builtins:dict takes (): a policy loss takes (inputs, options)"),
    ({"loss_type": f"{HERE}:nothing"}, f"cannot import loss.loss_type={HERE}:nothing"),
    ({"loss_type": f"{HERE}:RATIO"}, f"loss.loss_type={HERE}:RATIO is a float: give a policy loss or a Recipe"),
]


@pytest.mark.parametrize(("given", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_mistakes_are_one_line(given, says):
    for attempt in (lambda: load_config({"loss": given}), lambda: value(LossOptions(**given))):
        with pytest.raises(KeelError) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    with pytest.raises(KeelError) as caught:
        load_config({"loss": given})
    assert says in str(caught.value)
