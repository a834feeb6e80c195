"""What is examined: a policy with the parts around it, and what may be spent on doubts."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from keel.base.types import Group, Problem
from keel.doctor.findings import Options
from keel.doctor.thresholds import Thresholds
from keel.doctor.weights import Text, each_logits, perturbed_weights, row_logits, vocabulary_size
from keel.models.loaded import LoadedModel
from keel.models.pack import right_pad
from keel.rollout.sampling import SamplingParams

Power = Literal["score", "sample", "sync", "reference", "loss", "rewards", "golds", "first_update"]

LOOKS = 4  # how often a test may look at its sample while that grows
RELATIVE_NOISE = 0.05
STRONG_NOISE = 1.0  # another policy altogether: a few draws tell, and it minds whatever it reads


@dataclass
class Budget:
    """What a subject may spend on doubts, and what it has spent.

    `judgements` are those of rewards; where a test is in doubt, more are asked of a judge that is not elsewhere.
    """

    doubt_s: float = 120.0
    completions: int = 768
    judgements: int = 150
    spent_s: float = 0.0
    further: list[Group] = field(default_factory=list)  # beyond the batch: what one test sampled serves the next
    undecided: dict[str, str] = field(default_factory=dict)  # code: why its test has no answer

    @property
    def is_spent(self) -> bool:
        return self.spent_s > self.doubt_s

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Time within counts as time for doubts."""
        began = time.monotonic()
        yield
        self.spent_s += time.monotonic() - began

    def take_undecided(self) -> tuple[str, ...]:
        """The tests that ended undecided since this was asked last, as lines `code: why`."""
        lines = tuple(f"{code}: {why}" for code, why in self.undecided.items())
        self.undecided.clear()
        return lines


class Subject(ABC):
    """A policy that is trained, with the parts around it.

    A subclass lists its powers and implements their methods. A measure that needs another one is unchecked.
    """

    powers: ClassVar[frozenset[Power]] = frozenset()
    thresholds: Thresholds
    budget: Budget
    found: set[str]  # codes of the errors that earlier measures have found

    @property
    @abstractmethod
    def policy(self) -> LoadedModel:
        """The policy, with its tokenizer and device."""

    def lacks(self, power: Power) -> str:
        """Why this subject does not have a power; empty if it has it."""
        return "" if power in self.powers else f"{type(self).__name__} has no {power.replace('_', ' ')}"

    def swapped(self, **parts: Any) -> Self:
        """The same subject with these methods or fields in place of its own; what it has measured is forgotten."""
        other = copy(self)
        for kind in type(self).__mro__:
            for name in (name for name, value in vars(kind).items() if isinstance(value, cached_property)):
                vars(other).pop(name, None)
        vars(other).update(parts)
        return other

    @abstractmethod
    def spelled(self, options: Options) -> Options:
        """Keel's options under the names that this subject's user sets."""

    @property
    @abstractmethod
    def groups(self) -> tuple[Group, ...]:
        """The groups of its batch."""

    @property
    @abstractmethod
    def sampling(self) -> SamplingParams:
        """How it samples, with as many completions a problem as the batch has."""

    @property
    @abstractmethod
    def in_half_precision(self) -> bool:
        """Whether training's passes run in 16 bits, as the weights are now."""

    # ------------------------------------------------------------------------ powers

    def score(self, groups: Sequence[Group] | None = None) -> Tensor:
        """score: training's log-probabilities `[B, T]` of the batch's groups or others, 0 outside the completions."""
        raise NotImplementedError

    def sample(self, *, step: int = 0) -> list[Group]:
        """sample: the batch's problems once more, by the weights that the sampler has; equal steps draw equal noise."""
        raise NotImplementedError

    def complete(self, prompts: Sequence[tuple[int, ...]], *, samples: int, length: int, step: int) -> list[Group]:
        """sample: what the sampler writes after these tokens; nothing where it refuses them."""
        raise NotImplementedError

    def sync(self) -> None:
        """sync: the sampler takes over the weights as they are now."""
        raise NotImplementedError

    def prompt(self, problem: Problem) -> tuple[int, ...]:
        """golds: the tokens of a problem's prompt, before any limit cuts them."""
        raise NotImplementedError

    def answer(self, problem: Problem) -> tuple[int, ...]:
        """golds: the tokens of a problem's gold answer; empty where it has none."""
        raise NotImplementedError

    def problems(self, count: int, *, step: int = 0) -> list[Problem]:
        """golds: problems that are trained on."""
        raise NotImplementedError

    def judged(self, problems: Sequence[Problem], *, generations: int, step: int = 0) -> list[Group]:
        """rewards: fresh completions of each problem with their rewards."""
        raise NotImplementedError

    # ------------------------------------------------------------------------ the model's own forward

    def each_logits(self, groups: Sequence[Group] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Number of a completion and the policy's own logits `[t, V]` for it, fp32, temperature 1.

        In evaluation mode, without padding, packing or a scorer, by the model's own forward; rows of equal length go
        together as long as their logits are small, and equal rows are one. One at a time, since a batch of them need
        not fit into memory.
        """
        texts: list[Text] = [
            (group.prompt_tokens, c.tokens) for group in self.chosen(groups) for c in group.completions
        ]
        return each_logits(self.policy.model, texts, self.policy.device)

    def logits(self, groups: Sequence[Group] | None = None) -> Tensor:
        """The same of all completions, `[B, T, V]`, 0 where there is no token."""
        rows = dict(self.each_logits(groups))
        width = max(len(row) for row in rows.values())
        padded = {i: torch.nn.functional.pad(row, (0, 0, 0, width - len(row))) for i, row in rows.items()}
        return torch.stack([padded[i] for i in range(len(padded))])

    def tokens(self, groups: Sequence[Group] | None = None) -> Tensor:
        """The completions' tokens `[B, T]`, 0 where there are none."""
        return right_pad((c.tokens for g in self.chosen(groups) for c in g.completions), 0).to(self.policy.device)

    def forward_logp(self, groups: Sequence[Group] | None = None, *, temperature: float | None = None) -> Tensor:
        """The log-probabilities `[B, T]` of the model's own forward, by default at the sampling temperature."""
        tokens = self.tokens(groups)
        scored = torch.zeros(tokens.shape, device=tokens.device)
        for i, row in self.each_logits(groups):
            logp = (row / (self.sampling.temperature if temperature is None else temperature)).log_softmax(-1)
            scored[i, : len(row)] = logp.gather(-1, tokens[i, : len(row), None]).squeeze(-1)
        return scored

    def chosen(self, groups: Sequence[Group] | None) -> Sequence[Group]:
        return self.groups if groups is None else groups

    def answer_logp(self, problems: Sequence[Problem]) -> list[Tensor]:
        """Log-probabilities of the tokens of each gold answer after its prompt, with the weights as they are now."""
        pad = (self.policy.pad_id,)
        pairs = [(self.prompt(problem) or pad, self.answer(problem)) for problem in problems]
        rows = row_logits(self.policy, [(*prompt, *answer) for prompt, answer in pairs])
        return [
            logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(answer, device=logits.device)[:, None])
            for (prompt, answer), logits in zip(pairs, rows, strict=True)
        ]

    @property
    def blind(self) -> float:
        """Nats a token over which an answer is one that the model cannot know."""
        return self.thresholds["bos_surprise"] * math.log(self.vocabulary)

    @cached_property
    def tried(self) -> dict[str, Any]:
        """The hypotheses that were chosen, by their table, whatever became of them."""
        return {}

    @contextmanager
    def perturbed(self, relative: float = RELATIVE_NOISE, seed: int = 0) -> Iterator[None]:
        """Seeded noise on every trainable weight, of `relative` its RMS (zeros, as LoRA's B: of `relative` itself).

        Afterwards every weight has the very bits it had.
        """
        with perturbed_weights([p for p in self.policy.model.parameters() if p.requires_grad], relative, seed):
            yield

    @property
    def vocabulary(self) -> int:
        """How many tokens the model can choose from."""
        return vocabulary_size(self.policy.model)


__all__ = ["LOOKS", "RELATIVE_NOISE", "STRONG_NOISE", "Budget", "Power", "Subject"]
