"""TRL's own KL terms, called one sampled token at a time: GRPO's, GMPO's, and those of its distillation trainers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DistillationConfig, GRPOConfig, GRPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.sdpo import SDPOConfig
from trl.experimental.sdpo import loss_utils as sdpo
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer
from trl.trainer import distillation_trainer as distillation

from keel.integrations.versions import TRL
from keel.verify.peer_terms import Losses, PeerTerm, PeerTermResult, by_token, examine_term, of_distributions


def formulas() -> Sequence[PeerTerm]:
    """Every KL term of the installed TRL that can be called separately."""
    grpo, gmpo = _args(GRPOConfig), _args(GMPOConfig, beta=1.0)
    full, gkd = _args(DistillationConfig), _args(GKDConfig)
    server = _args(ServerDistillationConfig, teacher_model_server_url="http://127.0.0.1")
    self_distillation = _args(SDPOConfig)
    terms = [
        PeerTerm(
            f"GRPOTrainer, KL term of {grpo.loss_type}",
            f"use_bias_correction_kl={corrected}",
            GRPOTrainer._compute_loss,
            _grpo(GRPOTrainer, _args(GRPOConfig, beta=1.0, use_bias_correction_kl=corrected)),
            default=corrected == grpo.use_bias_correction_kl,
        )
        for corrected in (True, False)
    ]
    corrected = f"use_bias_correction_kl={gmpo.use_bias_correction_kl}"
    terms.append(PeerTerm("GMPOTrainer", corrected, GMPOTrainer._compute_loss, _grpo(GMPOTrainer, gmpo)))
    terms += [
        PeerTerm(
            "DistillationTrainer",
            f"beta={beta}",
            distillation._chunked_divergence_loss,
            _chunked(beta),
            default=beta == full.beta,
        )
        for beta in (1.0, 0.0, 0.5)
    ]
    terms.append(PeerTerm("GKDTrainer", f"beta={gkd.beta}", GKDTrainer.generalized_jsd_loss, _gkd(gkd.beta)))
    terms.append(
        PeerTerm(
            "ServerDistillationTrainer",
            f"beta={server.beta}, loss_top_k={server.loss_top_k}, loss_add_tail={server.loss_add_tail}",
            ServerDistillationTrainer._compute_sparse_top_1_divergence_loss,
            _server(server),
        )
    )
    alpha, tail = self_distillation.distillation_alpha, self_distillation.distillation_add_tail
    terms.append(
        PeerTerm(
            "SDPOTrainer",
            f"distillation_mode=sampled_token, distillation_is_clip={self_distillation.distillation_is_clip}",
            sdpo.compute_sampled_token_self_distillation_loss,
            _sampled(self_distillation),
            default=self_distillation.distillation_mode == "sampled_token",
        )
    )
    for added in (tail, not tail):
        terms.append(
            PeerTerm(
                "SDPOTrainer",
                f"distillation_mode=topk_logits, distillation_topk=8 of 64, distillation_add_tail={added}",
                sdpo.compute_topk_self_distillation_loss,
                _topk(alpha, added),
                default=False,
                vocabulary=64,
            )
        )
    return terms


def kl_of(trainer: type[GRPOTrainer] = GRPOTrainer, **options: Any) -> PeerTermResult:
    """Examine the KL term of a trainer under options of GRPOConfig: `kl_of(MyTrainer, loss_type="dr_grpo")`."""
    text = ", ".join(f"{name}={value}" for name, value in options.items()) or "TRL's defaults"
    losses = _grpo(trainer, _args(GRPOConfig, **{**options, "beta": 1.0, "max_completion_length": 1}))
    return examine_term("TRL", TRL.check_version(), PeerTerm(trainer.__name__, text, trainer._compute_loss, losses))


def _args(kind: type, **changes: Any) -> Any:
    """Arguments with TRL's defaults, without an accelerator."""
    return kind(use_cpu=True, bf16=False, report_to="none", **changes)


class _Trainer:
    """The attributes that a trainer's `_compute_loss` reads. In subclasses it precedes the trainer's class."""

    logp: Tensor

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.logp, torch.zeros_like(self.logp), None


def _grpo(cls: type[GRPOTrainer], args: Any) -> Losses:
    """The trainer's loss for one token with an advantage of 0, which is its KL term under any reduction."""
    stub = type("OneToken", (_Trainer, cls), {})
    trainer = stub(
        args=args,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
        ),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=args.steps_per_generation,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        **{
            name: getattr(args, name)
            for name in (
                *("beta", "loss_type", "importance_sampling_level", "top_entropy_quantile", "use_vllm"),
                *("off_policy_mask_threshold", "vllm_importance_sampling_correction", "max_completion_length"),
            )
        },
    )
    one = torch.ones(1, 1, dtype=torch.long)

    def losses(policy: Tensor, ref: Tensor, sampler: Tensor) -> tuple[Tensor, Tensor]:
        logp, ref_logp, old = (logits.log_softmax(0) for logits in (policy, ref, sampler))
        each = []
        for token in range(len(policy)):
            trainer.logp = logp[token].view(1, 1)
            inputs = {
                **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), one),
                "advantages": torch.zeros(1, dtype=policy.dtype),
                "old_per_token_logps": old[token].view(1, 1),
                "ref_per_token_logps": ref_logp[token].view(1, 1),
                "num_items_in_batch": torch.tensor(1.0),
            }
            each.append(trainer._compute_loss(None, inputs))
        loss = torch.stack(each)
        return loss.detach(), loss

    return losses


def _chunked(beta: float) -> Losses:
    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        head = torch.eye(len(student), dtype=student.dtype)  # the identity as head, so that hidden states are logits
        return distillation._chunked_divergence_loss(
            student[None, None], teacher[None, None], head, head, torch.ones(1, 1), beta
        )[0]

    return of_distributions(loss)


def _gkd(beta: float) -> Losses:
    return of_distributions(
        lambda student, teacher: GKDTrainer.generalized_jsd_loss(student[None, None], teacher[None, None], beta=beta)
    )


def _sampled(args: Any) -> Losses:
    def loss(student: Tensor, teacher: Tensor, sampler: Tensor, token: Tensor) -> Tensor:
        each = sdpo.compute_sampled_token_self_distillation_loss(
            student[None, None],
            teacher[None, None],
            token.view(1, 1),
            distillation_alpha=args.distillation_alpha,
        )
        logp, old = (logits.log_softmax(0)[token].view(1, 1) for logits in (student, sampler))
        return sdpo.apply_importance_sampling_clipping(each, logp, old, args.distillation_is_clip).sum()

    return by_token(loss)


def _topk(alpha: float, tail: bool) -> Losses:
    return of_distributions(
        lambda student, teacher: sdpo.compute_topk_self_distillation_loss(
            student[None, None],
            teacher[None, None],
            distillation_topk=8,
            distillation_alpha=alpha,
            distillation_add_tail=tail,
        ).sum()
    )


def _server(args: Any) -> Losses:
    trainer: Any = SimpleNamespace(
        beta=args.beta,
        loss_add_tail=args.loss_add_tail,
        _reduce_divergence_loss=ServerDistillationTrainer._reduce_divergence_loss,
    )

    def loss(student: Tensor, teacher: Tensor, sampler: Tensor, token: Tensor) -> Tensor:
        best = teacher.argmax().view(1, 1)
        logp = teacher.log_softmax(0)
        return ServerDistillationTrainer._compute_sparse_top_1_divergence_loss(
            trainer,
            student.log_softmax(0)[None, None],
            best,
            logp[best],
            token.view(1, 1),
            logp[token].view(1, 1),
            labels=token.view(1, 1),
        )

    return by_token(loss)
