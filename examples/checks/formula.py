"""Does the KL term of your own trainer pull towards the reference? `python formula.py faulty` has k1 in the loss."""

import sys
from typing import Any

import torch
from trl import GRPOTrainer

from keel.integrations.trl.formulas import kl_of


class MyTrainer(GRPOTrainer):
    """Somebody's trainer: the policy term of TRL, a KL term of their own."""

    faulty = sys.argv[1:] == ["faulty"]

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        beta, self.beta = self.beta, 0.0
        loss = super()._compute_loss(model, inputs)
        self.beta = beta
        logp, _, _ = self._get_per_token_logps_and_entropies(model, inputs["completion_ids"], None, 1)
        log_ratio = logp - inputs["ref_per_token_logps"]
        kl = log_ratio if self.faulty else (logp - logp.detach()).exp() * (torch.expm1(-log_ratio) + log_ratio)
        mask = inputs["completion_mask"]
        return loss + beta * (kl * mask).sum() / mask.sum()


row = kl_of(MyTrainer)
print(f"value {row.value}, expected gradient {row.gradient}, from older weights {row.off_policy}")
sys.exit(row.gradient != "policy||ref")
