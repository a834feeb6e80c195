"""verl's own KL terms, called with one sampled token: in the loss, in the reward, and its distillation losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import verl
import yaml
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.distillation import losses as distillation
from verl.trainer.distillation.fsdp import losses as fsdp
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig

from keel.verify.peer_terms import Losses, PeerTerm, in_loss, of_distributions

KINDS = ("kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "low_var_kl+")


def formulas() -> Sequence[PeerTerm]:
    """Every KL term of the installed verl that can be called separately."""
    actor, algorithm = _defaults("actor/actor"), _defaults("ppo_trainer")["algorithm"]
    terms = [
        PeerTerm(
            "KL in the loss",
            f"use_kl_loss=True, kl_loss_type={kind}",
            core_algos.kl_penalty,
            in_loss(partial(lambda kind, logp, ref, old: core_algos.kl_penalty(logp, ref, kind), kind)),
            default=kind == actor["kl_loss_type"],
        )
        for kind in KINDS
    ]
    terms += [
        PeerTerm(
            "KL in the reward",
            f"use_kl_in_reward=True, kl_penalty={kind}",
            ray_trainer.apply_kl_penalty,
            _in_reward(kind),
            default=kind == algorithm["kl_penalty"],
        )
        for kind in ("kl", "low_var_kl")
    ]
    own = _defaults("distillation/distillation")["distillation_loss"]
    in_yaml = DistillationLossConfig(**{name: value for name, value in own.items() if name != "_target_"})
    for where, config in (("YAML", in_yaml), ("dataclass", DistillationLossConfig())):
        terms.append(
            PeerTerm(
                "distillation",
                f"defaults of the {where}: loss_mode={config.loss_mode}, "
                f"use_policy_gradient={config.use_policy_gradient}, loss_max_clamp={config.loss_max_clamp}",
                distillation.distillation_loss,
                _distillation(config),
            )
        )
    for k in (8, 32):
        terms.append(
            PeerTerm(
                "distillation",
                f"loss_mode=forward_kl_topk, topk={k} of 64",
                fsdp.compute_forward_kl_topk,
                _topk(k),
                default=False,
                vocabulary=64,
            )
        )
    return terms


def _defaults(name: str) -> dict[str, Any]:
    """verl's YAML defaults."""
    path = Path(verl.__file__).parent / "trainer" / "config" / f"{name}.yaml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def _in_reward(kind: str) -> Losses:
    """Use the reward minus the penalty as the advantage in verl's own policy loss."""
    actor = _actor()

    def losses(policy: Tensor, ref: Tensor, sampler: Tensor) -> tuple[Tensor, Tensor]:
        logp, ref_logp, old = (logits.log_softmax(0)[:, None] for logits in (policy, ref, sampler))
        mask = torch.ones_like(ref_logp)
        batch = {"response_mask": mask, "token_level_scores": 0 * mask, "old_log_probs": old, "ref_log_prob": ref_logp}
        data = DataProto.from_dict(tensors={name: tensor.detach() for name, tensor in batch.items()})
        data, _ = ray_trainer.apply_kl_penalty(data, core_algos.FixedKLController(1.0), kind)
        advantages = data.batch["token_level_rewards"]
        return -advantages[:, 0], _policy_losses(logp, old, advantages, actor)

    return losses


def _policy_losses(logp: Tensor, old: Tensor, advantages: Tensor, actor: ActorConfig) -> Tensor:
    one = torch.ones(1, 1, dtype=logp.dtype)
    each = [
        core_algos.compute_policy_loss_vanilla(
            old[i : i + 1], logp[i : i + 1], advantages[i : i + 1], one, config=actor
        )[0]
        for i in range(len(logp))
    ]
    return torch.stack(each)


def _actor() -> ActorConfig:
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)


def _distillation(config: DistillationLossConfig) -> Losses:
    actor, settings = _actor(), DistillationConfig(distillation_loss=config)

    def losses(policy: Tensor, ref: Tensor, sampler: Tensor) -> tuple[Tensor, Tensor]:
        logp, teacher, old = (logits.log_softmax(0) for logits in (policy, ref, sampler))
        each = [
            distillation.distillation_loss(actor, settings, *_one_token(logp[i], teacher[i], old[i]))[0]
            for i in range(len(policy))
        ]
        value = core_algos.kl_penalty(logp, teacher, config.loss_mode)
        return value.detach(), torch.stack(each)

    return losses


def _one_token(logp: Tensor, teacher: Tensor, old: Tensor) -> tuple[dict[str, Tensor], TensorDict]:
    """A model's output and verl's data for one prompt token and one sampled token."""

    def scored(value: Tensor, last: tuple[int, ...] = ()) -> Tensor:  # a token is scored at the position before it
        both = torch.stack([value, torch.zeros_like(value)]).view(2, *last)
        return torch.nested.nested_tensor_from_jagged(both, torch.tensor([0, 2]))

    def rows(value: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor([value], layout=torch.jagged)

    fields = {
        "prompts": rows(torch.zeros(1, dtype=torch.int64)),
        "responses": rows(torch.zeros(1, dtype=torch.int64)),
        "response_mask": rows(torch.ones(1, dtype=torch.int64)),
        "old_log_probs": rows(old.detach().view(1)),
        "teacher_logprobs": scored(teacher.detach(), (1,)),
    }
    data = TensorDict(fields, 1)
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=1, global_batch_size=1)
    return {"log_probs": scored(logp)}, data


def _topk(k: int) -> Losses:
    config: Any = SimpleNamespace(distillation_loss=DistillationLossConfig())

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        top = teacher.log_softmax(0).topk(k)
        best, ids = (torch.nested.as_nested_tensor([x[None]], layout=torch.jagged) for x in (top.values, top.indices))
        found = fsdp.compute_forward_kl_topk(student[None, None], best, ids, config, "thd")
        return found["distillation_losses"].clamp_min(0.0).sum()

    return of_distributions(loss)
