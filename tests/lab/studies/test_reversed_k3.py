"""The reversed k3 by exact enumeration: its mean and its mean gradient are those of a χ² divergence."""

import pytest
import torch

from keel.base.errors import KeelError
from keel.config import load_config
from keel.kl.facts import check_pairing
from keel.lab.studies.reversed_k3 import reversed_k3
from trainer.small import BASE

NAME = "keel.lab.studies.reversed_k3:reversed_k3"


@pytest.fixture
def pair():
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=g, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0)


def test_its_mean_is_chi_square_less_the_kl(pair):
    logits, ref = pair
    logp = logits.detach().log_softmax(0)
    pi, p = logp.exp(), ref.exp()
    mean = (pi * reversed_k3(ref - logp)).sum()
    chi2, kl = (pi.square() / p).sum() - 1, (pi * (logp - ref)).sum()
    assert mean.item() == pytest.approx((chi2 - kl).item(), abs=1e-12)
    assert mean.item() > 1.5 * kl.item()


def test_its_gradient_is_half_that_of_chi_square(pair):
    logits, ref = pair
    pi = logits.detach().softmax(0)
    expected = torch.autograd.grad(0.5 * (logits.softmax(0).square() / ref.exp()).sum(), logits)[0]
    values = reversed_k3(ref - logits.log_softmax(0))
    gradient = sum(pi[i] * torch.autograd.grad(values[i], logits, retain_graph=True)[0] for i in range(6))
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_it_is_refused_by_the_audit_and_keeps_its_own_gradient():
    with pytest.raises(KeelError, match="no divergence's gradient"):
        load_config(BASE, [f"kl.estimator={NAME}"])
    assert load_config(BASE, [f"kl.estimator={NAME}", "kl.allow_biased=true"]).kl.estimator == NAME
    assert str(check_pairing(NAME, allow_biased=True).form) == "plain"
    with pytest.raises(KeelError, match="cannot import"):
        load_config(BASE, ["kl.estimator=keel.lab.studies.reversed_k3:nothing", "kl.allow_biased=true"])
