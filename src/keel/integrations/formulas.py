"""`keel verify --peers`: examine the KL terms of every installed trainer by calling the trainer's own functions.

One function here returns the terms of each of OpenRLHF, AReaL, tinker-cookbook and prime-rl. Those of TRL and verl are
in `trl/formulas.py` and `verl/formulas.py`. The four compute their policy term on workers or servers. A penalty in the
reward or the advantage is therefore examined under the plain policy term −ρ·A.
"""

from __future__ import annotations

import asyncio
import importlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.integrations.versions import TRL, VERL, minor
from keel.verify.peer_terms import (
    GRADIENT_LABELS,
    VALUE_LABELS,
    Losses,
    PeerTerm,
    PeerTermResult,
    examine_term,
    in_advantage,
    in_loss,
)

# For each trainer: name, distribution, supported minor versions, and the path of the function that returns its terms.
PEERS = (
    ("TRL", "trl", TRL.tested, "keel.integrations.trl.formulas:formulas"),
    ("verl", "verl", VERL.tested, "keel.integrations.verl.formulas:formulas"),
    ("OpenRLHF", "openrlhf", ("0.11",), "keel.integrations.formulas:openrlhf"),
    ("AReaL", "areal", ("1.0",), "keel.integrations.formulas:areal"),
    ("tinker-cookbook", "tinker-cookbook", ("0.6",), "keel.integrations.formulas:tinker_cookbook"),
    ("prime-rl", "prime-rl", ("0.8",), "keel.integrations.formulas:prime_rl"),
)


@dataclass(frozen=True)
class Peer:
    """A trainer, with its rows or the reason why there are none."""

    name: str
    version: str | None
    rows: tuple[PeerTermResult, ...] = ()
    reason: str = ""


def peers() -> Iterator[Peer]:
    """Examine every peer in turn. A peer that cannot be called gets a one-line reason."""
    for name, package, tested, where in PEERS:
        try:
            installed = version(package)
        except PackageNotFoundError:
            yield Peer(name, None, reason="not installed")
            continue
        if minor(installed) not in tested:
            yield Peer(name, installed, reason=f"Keel supports only version {', '.join(tested)}")
            continue
        try:
            yield Peer(name, installed, tuple(_rows(name, installed, where)))
        except KeelError as error:
            yield Peer(name, installed, reason=str(error).removeprefix(f"{name} {installed}").lstrip(": "))


def _rows(name: str, installed: str, where: str) -> Iterator[PeerTermResult]:
    module, _, function = where.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            terms: Any = getattr(importlib.import_module(module), function)()
        except (ImportError, OSError, RuntimeError) as error:
            raise KeelError(
                f"{name} {installed} cannot be imported here: {next(iter(str(error).splitlines()), '')}"
            ) from None
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise KeelError(
                f"{name} {installed}: its functions differ from those that Keel supports "
                f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
            ) from None
        yield from (examine_term(name, installed, term) for term in terms)


def columns(row: PeerTermResult) -> dict[str, str]:
    """The texts of a row on the page and in the terminal, by column name."""
    gradient = GRADIENT_LABELS[row.gradient]
    if row.gradient == "none":
        gradient += f" (cosines {row.cosine_policy_ref:.2f} and {row.cosine_ref_policy:.2f})"
    far = "the same" if row.far == row.gradient else GRADIENT_LABELS[row.far]
    off = "the same" if row.off_policy == row.gradient else GRADIENT_LABELS[row.off_policy]
    return {
        "its value": VALUE_LABELS.get(row.value, VALUE_LABELS["none"]),
        "its expected gradient": gradient,
        "log-ratios above 2 nats": far,
        "samples of older weights": off,
    }


def lines(peer: Peer) -> Iterator[str]:
    """The lines that the terminal shows for a peer."""
    title = f"{peer.name} {peer.version}" if peer.version else peer.name
    yield f"{title}: {peer.reason}" if peer.reason else title
    for row in peer.rows:
        yield f"  {row.name}, {row.file}:{row.line}"
        yield f"    {row.options}{' (default)' if row.default else ''}"
        yield f"    {'; '.join(f'{name}: {text}' for name, text in columns(row).items())}"


def openrlhf() -> Sequence[PeerTerm]:
    from openrlhf.models.utils import compute_approx_kl

    def term(kind: str, unbiased: bool) -> PeerTerm:
        losses = in_loss(lambda logp, ref, old: compute_approx_kl(logp, ref, old, kind, unbiased))
        options = f"algo.kl.use_loss, algo.kl.estimator={kind}, algo.kl.unbiased_gradient={unbiased}"
        return PeerTerm("KL in the loss", options, compute_approx_kl, losses, default=False)

    reward = in_advantage(lambda old, ref: compute_approx_kl(old, ref))
    return [
        PeerTerm("KL in the reward", "algo.kl.estimator=k1", compute_approx_kl, reward),
        *(term(kind, unbiased) for unbiased in (False, True) for kind in ("k1", "k2", "k3")),
    ]


def areal() -> Sequence[PeerTerm]:
    from areal.trainer.ppo.actor import grpo_loss_fn
    from areal.utils.data import KLEstimator

    kinds = ("k1", "k2", "k3")
    rewards = [
        PeerTerm(
            "KL in the reward",
            f"kl_estimator={kind}",
            KLEstimator._compute_approx_kl,
            in_advantage(KLEstimator(kind)),
            default=kind == KLEstimator().kl_estimator,
        )
        for kind in kinds
    ]

    def distilled(weight: float) -> Losses:
        def one(logp: Tensor, teacher: Tensor, old: Tensor) -> Tensor:
            data = {
                "logprobs": old,
                "prox_logp": old,
                "advantages": torch.zeros_like(old),
                "loss_mask": torch.ones_like(old),
                "teacher_logp": teacher,
                "rl_loss_weight": weight,
                "distill_loss_weight": 1.0,
            }
            return grpo_loss_fn(logp, torch.zeros_like(old), data, 0.2, None, None)

        def each(*double: Tensor) -> Tensor:  # the trainer's function accepts only fp32
            logp, teacher, old = (x.float() for x in double)
            return torch.stack([one(logp[i], teacher[i], old[i]) for i in range(len(logp))])[:, None]

        return in_loss(each)

    return rewards + [
        PeerTerm("distillation", f"rl_loss_weight={weight}", grpo_loss_fn, distilled(weight), default=weight != 0)
        for weight in (1.0, 0.0)
    ]


def tinker_cookbook() -> Sequence[PeerTerm]:
    import tinker
    from tinker_cookbook.rl.metrics import incorporate_kl_penalty

    def penalty(old: Tensor, ref: Tensor) -> Tensor:
        """The penalties of all tokens as one batch. Each row is a prompt of one token and the token itself."""
        base = iter(ref[:, 0].tolist())

        def sample(**_: Any) -> Any:
            async def answer() -> Any:
                return SimpleNamespace(prompt_logprobs=[None, next(base)], prompt_cache_hit_tokens=0, sequences=[])

            return SimpleNamespace(coroutine=answer)

        def datum(token: int) -> Any:
            inputs = {
                "target_tokens": torch.tensor([token]),
                "logprobs": old[token].float(),
                "mask": torch.ones(1),
                "advantages": torch.zeros(1),
            }
            tensors = {name: tinker.TensorData.from_torch(value) for name, value in inputs.items()}
            return tinker.Datum(model_input=tinker.ModelInput.from_ints([0]), loss_fn_inputs=tensors)

        data = [datum(token) for token in range(len(old))]
        asyncio.run(incorporate_kl_penalty(data, SimpleNamespace(sample=sample), 1.0, 0.0))
        return -torch.stack([row.loss_fn_inputs["advantages"].to_torch() for row in data])

    options = "kl_penalty_coef > 0, kl_discount_factor=0.0"
    return [PeerTerm("KL in the advantage", options, incorporate_kl_penalty, in_advantage(penalty))]


def prime_rl() -> Sequence[PeerTerm]:
    from prime_rl.trainer.rl.loss import LossInputs, ref_kl_loss_fn

    def losses(policy: Tensor, ref: Tensor, sampler: Tensor) -> tuple[Tensor, Tensor]:
        logp, ref_logp, old = (logits.log_softmax(0)[:, None] for logits in (policy, ref, sampler))
        one, none = torch.ones(1, dtype=torch.bool), torch.zeros(1)
        each = [ref_kl_loss_fn(LossInputs(logp[i], old[i].detach(), ref_logp[i], none, one)) for i in range(len(logp))]
        value = torch.stack([-out.metrics["ref_kl"] for out in each]).double()
        return value.detach(), torch.stack([out.loss for out in each]).double()

    return [PeerTerm("distillation", "loss type ref_kl", ref_kl_loss_fn, losses)]
