"""GRPO in one file: a tiny transformer learns to add, with or without a KL penalty to where it started.

    python examples/grpo_one_file.py                        # quick tests, then training without a penalty
    python examples/grpo_one_file.py --use-kl-penalty       # β = 0.01 against a frozen copy of the start
    python examples/grpo_one_file.py --test                 # the quick tests alone; --skip-tests leaves them out

The whole loop is here, on `keel.kl` and `keel.losses` and their types: sample groups, reward, advantages, loss, step.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keel.base.types import Batch, Scores
from keel.kl import KLOptions, estimate, masked_mean
from keel.losses import Counts, LossOptions, advantages, global_denominators, objective

CHARACTERS = "0123456789+=."  # "." ends an answer
END = CHARACTERS.index(".")
PROMPT, ANSWER = 4, 3  # "7+8=" and "15."
Info = dict[str, float]


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class TinyTransformer(nn.Module):
    """Two layers of width 64 over a vocabulary of 13 characters."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(CHARACTERS), width), nn.Embedding(PROMPT + ANSWER, width)
        self.body = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))))


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(c) for c in text]


def sample_problems(count: int, generator: torch.Generator) -> tuple[Tensor, list[str]]:
    """`count` prompts "a+b=" with a and b in 0–9, and their answers."""
    pairs = torch.randint(0, 10, (count, 2), generator=generator).tolist()
    return torch.tensor([encode(f"{a}+{b}=") for a, b in pairs]), [f"{a + b}." for a, b in pairs]


@dataclass(frozen=True)
class Rollouts:
    ids: Tensor  # [B, PROMPT + ANSWER]
    action_mask: Tensor  # [B, ANSWER]: what the policy sampled, up to and including the end


@torch.no_grad()
def rollout(model: nn.Module, prompts: Tensor, generator: torch.Generator) -> Rollouts:
    """Sample an answer to each prompt at temperature 1."""
    ids, alive, masks = prompts, torch.ones(len(prompts), dtype=torch.bool), []
    for _ in range(ANSWER):
        token = torch.multinomial(model(ids)[:, -1].softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, torch.where(alive.unsqueeze(1), token, END)], dim=1)
        masks.append(alive)
        alive = alive & (token.squeeze(1) != END)
    return Rollouts(ids, torch.stack(masks, dim=1))


def reward(rollouts: Rollouts, answers: list[str]) -> Tensor:
    """1 for the right sum, 0 otherwise."""
    rows = zip(rollouts.ids[:, PROMPT:], rollouts.action_mask, answers, strict=True)
    return torch.tensor([float(ids[mask].tolist() == encode(answer)) for ids, mask, answer in rows])


def token_logps(model: nn.Module, ids: Tensor) -> Tensor:
    """log π of each answer token, [B, ANSWER]: position t scores token t + 1."""
    logp = model(ids[:, :-1]).log_softmax(-1)[:, PROMPT - 1 :]
    return logp.gather(-1, ids[:, PROMPT:].unsqueeze(-1)).squeeze(-1)


def compute_kl_divergence(policy_log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """KL(policy‖reference) of each sampled token, [B, T], as k3: never negative, and right on average."""
    return estimate("k3", policy_log_probs, ref_log_probs, mask)


def compute_loss(logp: Tensor, batch: Batch, kl_coef: float, counts: Counts | None = None) -> tuple[Tensor, Info]:
    """Clipped policy loss + kl_coef · KL(policy‖reference), the KL as k3, pulled along ∇KL(policy‖reference)."""
    beta = kl_coef if batch.ref_logp is not None else 0.0
    out = objective(Scores(logp), batch, LossOptions(loss_type="grpo"), KLOptions(estimator="k3"), beta, counts)
    return out.loss, {"loss": out.metrics["loss/total"].value, "kl_penalty": out.metrics["loss/kl"].value}


def grpo_microbatch_step(model: nn.Module, ids: Tensor, batch: Batch, counts: Counts, kl_coef: float) -> Info:
    """Forward and backward of one microbatch; the denominators are the whole batch's, so any split is the same."""
    loss, info = compute_loss(token_logps(model, ids), batch, kl_coef, counts)
    loss.backward()
    return info


def frozen_reference(model: nn.Module) -> nn.Module:
    """A copy of the policy as it is now, in eval mode, without gradient."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def warm_start(model: nn.Module, steps: int, generator: torch.Generator) -> None:
    """Supervised start: enough to be right now and then, so that there is something to reinforce."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        prompts, answers = sample_problems(64, generator)
        targets = torch.tensor([encode(a.ljust(ANSWER, ".")) for a in answers])
        logits = model(torch.cat([prompts, targets], dim=1)[:, :-1])[:, PROMPT - 1 :]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()


def accuracy(model: nn.Module, generator: torch.Generator, samples: int = 4) -> float:
    """Share of right answers to all hundred problems, sampled as in training."""
    pairs = [(a, b) for a in range(10) for b in range(10)] * samples
    prompts = torch.tensor([encode(f"{a}+{b}=") for a, b in pairs])
    return reward(rollout(model, prompts, generator), [f"{a + b}." for a, b in pairs]).mean().item()


def open_tensorboard(folder: Path) -> Any:
    """A TensorBoard writer, or None with a word about it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return print("TensorBoard is not installed: console only (pip install 'keel-rl[tensorboard]')")
    return SummaryWriter(str(folder))


def log_train(writer: Any, step: int, info: Info) -> None:
    """One line on the console, the same numbers in TensorBoard."""
    line = f"Step {step} | Loss: {info['loss']:.4f} | Grad norm: {info['grad_norm']:.4f} | Reward: {info['reward']:.3f}"
    kl = f" | KL penalty: {info['kl_penalty']:.4f} | KL: {info['kl']:.4f}" if "kl" in info else ""
    print(line + kl, flush=True)
    if writer is not None:
        for name, value in info.items():
            writer.add_scalar(f"train/{name}", value, step)


def train(model: nn.Module, reference: nn.Module | None, args: argparse.Namespace, generator: torch.Generator) -> None:
    """GRPO: groups of completions, advantages within the group, one clipped update a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    writer = open_tensorboard(args.logdir)
    for step in range(1, args.steps + 1):
        prompts, answers = sample_problems(args.prompts, generator)
        group = torch.arange(args.prompts).repeat_interleave(args.group_size)
        rollouts = rollout(model, prompts[group], generator)
        rewards = reward(rollouts, [answers[g] for g in group.tolist()])
        advantage = advantages(rewards, group)
        mask = rollouts.action_mask
        info = {"loss": 0.0, "kl_penalty": 0.0, "reward": rewards.mean().item()}
        ref_logp = None
        if reference is not None:
            ref_logp, logp = (token_logps(m, rollouts.ids).detach() for m in (reference, model))
            info["kl"] = masked_mean(compute_kl_divergence(logp, ref_logp, mask), mask).item()
        counts = global_denominators(Batch(mask))
        optimizer.zero_grad()
        for rows in torch.arange(len(group)).chunk(args.microbatches):
            part = Batch(mask[rows], advantage[rows], ref_logp=None if ref_logp is None else ref_logp[rows])
            for name, value in grpo_microbatch_step(model, rollouts.ids[rows], part, counts, args.kl_coef).items():
                info[name] += value
        info["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            log_train(writer, step, info)
    if writer is not None:
        writer.close()


def test_reward() -> None:
    prompts, answers = sample_problems(16, torch.Generator().manual_seed(0))
    gold = torch.cat([prompts, torch.tensor([encode(a.ljust(ANSWER, ".")) for a in answers])], dim=1)
    rollouts = Rollouts(gold, torch.tensor([[True, True, len(a) == 3] for a in answers]))
    assert reward(rollouts, answers).tolist() == [1.0] * 16, "the right answer earns the reward"
    assert reward(rollouts, answers[1:] + answers[:1]).sum() < 16, "a wrong one does not"


def test_compute_kl_divergence() -> None:
    logp, ref_logp = torch.randn(2, 4, len(CHARACTERS), generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    kl = compute_kl_divergence(logp, ref_logp)
    assert (kl >= 0).all(), "never negative"
    assert (compute_kl_divergence(logp, logp) == 0).all(), "0 to itself"
    exact = F.kl_div(ref_logp, logp, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close((logp.exp() * kl).sum(-1), exact, msg="its mean under the policy is the KL")


def test_compute_loss_with_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    model = TinyTransformer()
    rollouts, reference = rollout(model, sample_problems(16, generator)[0], generator), frozen_reference(model)
    logp, mask = token_logps(model, rollouts.ids), rollouts.action_mask
    assert not any(p.requires_grad for p in reference.parameters()), "the reference is frozen"
    same = Batch(mask, torch.zeros(16), ref_logp=token_logps(reference, rollouts.ids))
    assert compute_loss(logp, same, kl_coef=1.0)[1]["kl_penalty"] == 0.0, "KL to itself is 0"
    ref_logp = logp.detach() - 0.5
    loss, info = compute_loss(logp, Batch(mask, torch.zeros(16), ref_logp=ref_logp), kl_coef=0.1)
    penalty = 0.1 * masked_mean(compute_kl_divergence(logp, ref_logp, mask), mask).item()
    assert abs(info["kl_penalty"] - penalty) < 1e-6, "the penalty is the coefficient times the mean KL"
    gradient = torch.autograd.grad(loss, logp)[0]
    assert (gradient[mask] > 0).all(), "tokens surer than the reference are pushed down"
    assert (gradient[~mask] == 0).all(), "tokens that were not sampled are left alone"


def quick_tests() -> None:
    """Checks of each piece, in a second; every one can fail."""
    for test in (test_reward, test_compute_kl_divergence, test_compute_loss_with_kl):
        test()
        print(f"{test.__name__} passed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--use-kl-penalty", action="store_true", help="penalise KL to a frozen copy of the start")
    parser.add_argument("--kl-coef", type=float, default=0.01, help="β of the penalty (0.001 to 0.1; default 0.01)")
    parser.add_argument("--steps", type=int, default=300, help="GRPO steps")
    parser.add_argument("--warm-start-steps", type=int, default=45, help="supervised steps before them")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="completions a prompt")
    parser.add_argument("--microbatches", type=int, default=2, help="parts that a batch is split into")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--logdir", type=Path, default=Path("runs/grpo_one_file"), help="TensorBoard folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", action="store_true", help="run the quick tests and stop")
    parser.add_argument("--skip-tests", action="store_true", help="train without running the quick tests first")
    args = parser.parse_args()
    if min(args.steps, args.prompts, args.group_size, args.microbatches) < 1 or args.kl_coef < 0:
        parser.error("--steps, --prompts, --group-size, --microbatches must be at least 1, --kl-coef at least 0")
    if args.test or not args.skip_tests:
        quick_tests()
    if args.test:
        return
    torch.set_num_threads(1)  # the model is tiny: threads would only wait for each other
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    started = time.perf_counter()
    model = TinyTransformer()
    warm_start(model, args.warm_start_steps, generator)
    before = accuracy(model, generator)
    reference = frozen_reference(model) if args.use_kl_penalty else None
    train(model, reference, args, generator)
    print(f"accuracy {before:.2f} -> {accuracy(model, generator):.2f} in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
