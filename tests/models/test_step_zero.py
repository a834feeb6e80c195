"""At step 0 the policy is its own reference: every KL that is measured is 0, not merely small."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keel.kl import measure_kl
from keel.models import load_model
from keel.models.head import frozen_head
from keel.models.pack import pack
from keel.models.scorer import hidden_states, score_tokens
from keel.reference.kinds import build_reference

from .packing_cases import gradients, make_groups

LORAS: dict[str, Any] = {
    "full": None,
    "body": {"r": 2},
    "body-and-head": {"r": 2, "targets": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
@pytest.mark.parametrize("kind", ["auto", "frozen", "ema"])
def test_every_measured_kl_is_zero(kind: str, lora: Any) -> None:
    loaded = load_model("tiny", device="cpu", lora=lora)
    packed = pack(make_groups([(7, (3, 9, 5)), (1, (4,))]), loaded.pad_id, shared_prefix=loaded.shared_prefix)
    reference = build_reference(kind, loaded)
    with reference.model() as held, torch.no_grad():
        ref_hidden, ref_head = hidden_states(held, packed), frozen_head(held)
        ref_logp = score_tokens(held, packed).logp
    scores = score_tokens(
        loaded.model, packed, exact_kl=True, ref_policy=True, ref_hidden=ref_hidden, ref_head=ref_head
    )
    metrics = measure_kl(scores.logp, ref_logp, packed.action_mask, exact_kl=scores.exact_kl)
    measured = {name: value for name, value in metrics.items() if name.startswith("kl/policy_ref/")}
    assert any("/exact/" in name for name in measured)
    assert measured.pop("kl/policy_ref/overlap") == 1.0
    assert {name: value for name, value in measured.items() if value != 0.0} == {}
    assert scores.ref_policy_kl is not None
    assert scores.ref_policy_kl.abs().max() == 0.0
    assert scores.exact_kl is not None
    grads = gradients(loaded.model, scores.exact_kl.sum())
    assert max(float(gradient.abs().max()) for gradient in grads.values()) < 1e-5
