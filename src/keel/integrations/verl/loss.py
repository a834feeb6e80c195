"""The loss of verl's workers: verl's own policy loss without its KL term, plus Keel's KL term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from keel.base.errors import KeelError
from keel.base.metrics import Number
from keel.base.types import Batch, Scores
from keel.integrations.verl.settings import REDUCTIONS
from keel.kl import KLOptions, Pairing
from keel.losses.objective import kl_penalty
from keel.losses.options import MismatchOptions
from keel.losses.reductions import Denominators

REPORTED = ("loss/kl", "loss/policy")


def policy_config(actor: Any) -> Any:
    """verl's actor options for its loss, without verl's own KL term."""
    return omega_conf_to_dataclass(OmegaConf.merge(actor, {"use_kl_loss": False}))


@dataclass(frozen=True)
class KeelLoss:
    """`(model_output, data) -> loss, metrics` of a microbatch, for `set_loss_fn` of verl's workers; picklable."""

    actor: Any
    kl: KLOptions
    pairing: Pairing
    beta: float

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        policy, metrics = ppo_loss(config=self.actor, model_output=model_output, data=data, dp_group=dp_group)
        penalty, logged = self.penalty(no_padding_2_padding(model_output["log_probs"], data), data)
        alone = metrics["actor/pg_loss"].aggregate()  # `policy` includes verl's entropy bonus
        for name, value in zip(REPORTED, (logged, alone), strict=True):
            metrics[name] = Metric(aggregation=AggregationType.SUM, value=value)
        return policy + penalty, metrics

    def penalty(self, logp: Tensor, data: Any) -> tuple[Tensor, Number]:
        """The KL's part of a microbatch's loss (with β) and its value, times the ranks over which verl averages."""
        rows = data.select("response_mask", "old_log_probs", "ref_log_prob").to_padded_tensor()
        batch = Batch(rows["response_mask"].bool(), old_logp=rows["old_log_probs"], ref_logp=rows["ref_log_prob"])
        mode = self.actor.loss_agg_mode
        penalty, logged = kl_penalty(
            self.kl,
            self.pairing,
            REDUCTIONS[mode],
            self.beta,
            Scores(logp),
            batch,
            denominators(mode, self.actor.loss_scale_factor, data, logp.shape[-1]),
            MismatchOptions(kind="none"),
        )
        ranks = data["dp_size"]
        return penalty * ranks, logged * ranks


def denominators(mode: str, scale: int | None, data: Any, width: int) -> Denominators:
    """The denominators of a minibatch over all ranks, under verl's `loss_agg_mode`."""
    sequences, tokens = data["global_batch_size"], data["batch_num_tokens"]
    if sequences is None or tokens is None:
        raise KeelError(
            "verl's engine did not pass global_batch_size and batch_num_tokens, the denominators of Keel's KL term"
        )
    if mode == "token-sum":
        return Denominators(1.0, tokens, 1)
    length = (scale or width) if mode == "seq-mean-token-sum-norm" else 1
    return Denominators(sequences, tokens, length)
