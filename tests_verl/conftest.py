"""Keel inside verl, against verl itself: `make test-verl`. Without verl these tests fail rather than be skipped.

verl's engines need an accelerator, so that workers and the TransferQueue are stand-ins here; configuration, trainer,
losses and registries are verl's own.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import verl
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

torch.set_num_threads(1)

SMALL = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
)


@cache  # composing takes seconds
def _composed() -> Any:
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=list(SMALL))


def verl_config(*overrides: str) -> Any:
    """verl's own configuration, with overrides as on its command line."""
    config = copy.deepcopy(_composed())
    for override in overrides:
        name, _, value = override.partition("=")
        OmegaConf.update(config, name.lstrip("+"), yaml.safe_load(value), force_add=name.startswith("+"))
    return config


def keel_config(*overrides: str) -> Any:
    return verl_config("trainer.v1.trainer_mode=keel_sync", *overrides)


def nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


class Rows:
    """Completions of unequal lengths as verl's workers see them, and their log-probabilities as a leaf.

    Tensors are kept a row each; `micro` packs some of the rows as a microbatch of the whole.
    """

    def __init__(self, seed: int = 0, lengths: Sequence[int] = (5, 3, 6, 1), spread: float = 0.5) -> None:
        noise = torch.Generator().manual_seed(seed)

        def draw(n: int) -> torch.Tensor:
            return torch.randn(n, generator=noise, dtype=torch.float64)

        self.lengths, self.prompt = lengths, 2
        self.logp = [(-1.5 + 0.3 * draw(n)).requires_grad_() for n in lengths]
        self.old = [x.detach() + 0.2 * draw(len(x)) for x in self.logp]
        self.ref = [x.detach() + spread * draw(len(x)) for x in self.logp]
        self.advantages = [draw(1).expand(n).clone() for n in lengths]
        self.mask = [torch.ones(n, dtype=torch.int64) for n in lengths]
        self.mask[0][1:2] = 0  # what a tool answered is not the policy's

    @property
    def tokens(self) -> int:
        return int(sum(mask.sum() for mask in self.mask))

    def micro(self, rows: Sequence[int], ranks: int = 1) -> tuple[dict[str, Any], TensorDict]:
        """Model output and data of a microbatch; counts are those of all rows, on all ranks."""
        padded = []
        for i in rows:  # a model's output scores the next token, so that a completion's begins one early
            before, after = self.logp[i].new_zeros(self.prompt - 1), self.logp[i].new_zeros(1)
            padded.append(torch.cat([before, self.logp[i], after]))
        flat = torch.cat(padded)
        offsets = torch.tensor([0, *(len(x) for x in padded)]).cumsum(0)
        fields = {"old_log_probs": self.old, "ref_log_prob": self.ref, "advantages": self.advantages}
        fields |= {"response_mask": self.mask, "responses": [torch.zeros(n, dtype=torch.int64) for n in self.lengths]}
        fields["prompts"] = [torch.zeros(self.prompt, dtype=torch.int64) for _ in self.lengths]
        data = TensorDict({name: nested([values[i] for i in rows]) for name, values in fields.items()}, len(rows))
        tu.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=self.tokens, global_batch_size=len(self.lengths))
        return {"log_probs": torch.nested.nested_tensor_from_jagged(flat, offsets)}, data

    def padded(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.autograd.grad(loss, self.logp, retain_graph=True))


@pytest.fixture
def rows() -> Rows:
    return Rows()
