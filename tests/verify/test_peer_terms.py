"""Terms whose gradient is known by algebra are named; a clamp is seen where it acts, and nowhere else."""

import pytest
import torch

from keel.base.errors import KeelError
from keel.verify.peer_terms import PeerTerm, examine_term, in_advantage, in_loss


def k3(logp, ref, old):
    return torch.expm1(ref - logp) - (ref - logp)


# value, gradient, the gradient beyond 2 nats, and with samples of older weights
KNOWN = {
    "k1 in the loss": (in_loss(lambda logp, ref, old: logp - ref), "policy||ref", "zero", "zero", "away"),
    "k2 in the loss": (in_loss(lambda logp, ref, old: (logp - ref) ** 2 / 2), "none", *["policy||ref"] * 2, "none"),
    "k3 in the loss": (in_loss(k3), "policy||ref", "ref||policy", "ref||policy", "none"),
    "weighted k3": (in_loss(lambda p, r, old: (p - old).exp() * k3(p, r, old)), *["policy||ref"] * 4),
    "clamped k3": (in_loss(lambda *x: k3(*x).clamp(max=7)), "policy||ref", "ref||policy", "none", "none"),
    "abs in the loss": (in_loss(lambda p, r, old: (p - r).abs()), "none", *["total-variation"] * 2, "none"),
    "k1 in the reward": (in_advantage(lambda old, ref: old - ref), *["policy||ref"] * 3, "none"),
    "k3 in the reward": (
        in_advantage(lambda old, ref: k3(old, ref, old)),
        "policy||ref",
        *["policy||ref - ref||policy"] * 2,
        "none",
    ),
    "fp32": (in_loss(lambda p, r, old: k3(p.float(), r.float(), old)), "policy||ref", *["ref||policy"] * 2, "none"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_terms_are_named(name):
    losses, *expected = KNOWN[name]
    row = examine_term("Peer", "1.0", PeerTerm(name, "", k3, losses))
    assert [row.value, row.gradient, row.far, row.off_policy] == expected
    assert row.file.endswith("tests/verify/test_peer_terms.py")
    assert row.line == k3.__code__.co_firstlineno


def test_cosines_are_those_of_the_worst_world():
    forward = examine_term("Peer", "1.0", PeerTerm("k3", "", k3, in_loss(k3)))
    assert forward.cosine_ref_policy == pytest.approx(1)
    assert 0.9 < forward.cosine_policy_ref < 0.999
    reverse = examine_term("Peer", "1.0", PeerTerm("-k3", "", k3, in_loss(lambda *x: -k3(*x))))
    assert reverse.gradient == "none"
    assert reverse.cosine_ref_policy == pytest.approx(-1)


def test_a_function_that_is_called_otherwise_is_one_line():
    def other(logp, ref):
        return logp

    with pytest.raises(KeelError, match=r"Peer 9\.9.*its KL term") as error:
        examine_term("Peer", "9.9", PeerTerm("KL term", "", k3, in_loss(other)))
    assert "\n" not in str(error.value)
