"""The subject of an examination: a policy with the parts around it, and a budget for undecided tests."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from keel.base.types import Group, Problem
from keel.config import Config
from keel.doctor.findings import Options
from keel.doctor.thresholds import Thresholds
from keel.models.head import causal_lm, evaluating
from keel.models.options import LoadedModel
from keel.models.pack import right_pad
from keel.models.scorer import padded_mask, padding_columns
from keel.rollout.sampling import SamplingParams

_MAX_ELEMENTS = 50_000_000  # limit of tokens × vocabulary in memory
SPARE_TIMES = 4  # memory for copies, gradients and moments, in multiples of the weights
_MAX_LOGITS = 1 << 23  # logits of one batched forward; up to 32 times as many on a GPU
_BYTES_A_LOGIT = 64  # a logit, its fp32 copy and intermediate results
Text = tuple[tuple[int, ...], tuple[int, ...]]  # tokens of prompt and completion


def each_logits(model: nn.Module, texts: Sequence[Text], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """(index of a text, the model's logits `[t, V]` for its completion), in fp32 and evaluation mode, temperature 1.

    Rows of equal length are batched while their logits are small, and equal rows are computed once. Results are yielded
    one by one, since the whole batch may not fit into memory.
    """
    most = most_logits(device)
    rows: dict[tuple[tuple[int, ...], int], list[int]] = {}  # (tokens, prompt length): indices of texts
    for number, (prompt, tokens) in enumerate(texts):
        rows.setdefault(((*prompt, *tokens), len(prompt)), []).append(number)
    for width, alike in groupby(sorted(rows, key=lambda row: len(row[0])), key=lambda row: len(row[0])):
        same = list(alike)
        at_once = min(32, max(1, most // (width * vocabulary_size(model))))
        for part in (same[i : i + at_once] for i in range(0, len(same), at_once)):
            ids = torch.tensor([text for text, _ in part], device=device)
            with evaluating(model):
                out = model(input_ids=ids, use_cache=False).logits
            for (text, given), logits in zip(part, out, strict=True):
                yield from ((number, logits[given - 1 : -1].float()) for number in rows[text, given])


def row_logits(policy: LoadedModel, rows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """The model's logits `[t, V]` of each row of tokens, in fp32. Right padding has no effect on them."""
    at_once = max(1, _MAX_ELEMENTS // (vocabulary_size(policy.model) * max(map(len, rows), default=1)))
    for part in (rows[i : i + at_once] for i in range(0, len(rows), at_once)):
        width = max(map(len, part))
        padded = [[*row, *(policy.pad_id,) * (width - len(row))] for row in part]
        ids = torch.tensor(padded, device=policy.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in part], device=ids.device)
        columns = padding_columns(ids)
        ids, mask = nn.functional.pad(ids, (0, columns)), padded_mask(mask, columns)
        with evaluating(policy.model):
            logits = policy.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        yield from (logits[i, : len(row)].float() for i, row in enumerate(part))


def most_logits(device: torch.device) -> int:
    """The number of logits per forward. Larger batches are faster on a GPU but not on a CPU."""
    if device.type != "cuda":
        return _MAX_LOGITS
    free, _ = torch.cuda.mem_get_info(device)
    return max(_MAX_LOGITS, min(32 * _MAX_LOGITS, free // _BYTES_A_LOGIT))


def vocabulary_size(model: nn.Module) -> int:
    """The size of the model's output vocabulary."""
    return int(causal_lm(model).get_output_embeddings().weight.shape[0])


def backup(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies to restore from, in main memory if the device has too little room."""
    devices, size = {tensor.device for tensor in tensors}, sum(tensor.nbytes for tensor in tensors)
    free = min((torch.cuda.mem_get_info(device)[0] for device in devices if device.type == "cuda"), default=None)
    if free is not None and SPARE_TIMES * size > free:
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    return [tensor.detach().clone() for tensor in tensors]


@contextmanager
def perturbed_weights(weights: Sequence[Tensor], relative: float, seed: int = 0) -> Iterator[None]:
    """Add seeded noise of `relative` × RMS to each tensor, or of size `relative` if the RMS is 0; restore exactly."""
    originals = backup(weights)
    generators = {weight.device: torch.Generator(weight.device).manual_seed(seed) for weight in weights}
    try:
        with torch.no_grad():
            for weight in weights:
                size = float(weight.float().square().mean().sqrt()) or 1.0
                noise = torch.randn(weight.shape, generator=generators[weight.device], device=weight.device)
                weight.add_((noise * (relative * size)).to(weight))
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, originals, strict=True):
                weight.copy_(before)


# ------------------------------------------------------------------------ the subject

Power = Literal["score", "gradient", "sample", "sync", "reference", "loss", "rewards", "golds", "first_update"]

LOOKS = 4  # largest number of interim looks of a sequential test
RELATIVE_NOISE = 0.05
STRONG_NOISE = 1.0  # makes a different policy: visible in a few samples, and dependent on its whole context


@dataclass
class Budget:
    """Limits on sampling for undecided tests, and the amounts used.

    `judgements` limits calls of a remote judge. Other judges may be called more often for undecided tests.
    """

    doubt_s: float = 120.0
    completions: int = 768
    judgements: int = 150
    spent_s: float = 0.0
    further: list[Group] = field(default_factory=list)  # groups beyond the batch, shared by all tests
    undecided: dict[str, str] = field(default_factory=dict)  # code: why its test is undecided

    @property
    def is_spent(self) -> bool:
        return self.spent_s > self.doubt_s

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time inside as time for undecided tests."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent_s += time.monotonic() - began

    def take_undecided(self) -> tuple[str, ...]:
        """Return and clear the undecided tests, as lines `code: why`."""
        lines = tuple(f"{code}: {why}" for code, why in self.undecided.items())
        self.undecided.clear()
        return lines


class Subject(ABC):
    """A policy in training, with the parts around it.

    A subclass lists its powers and implements their methods. A measure that needs a missing power is reported as
    unchecked.
    """

    powers: ClassVar[frozenset[Power]] = frozenset()
    engine: Any = None  # the sampler, if it is one of Keel's engines
    config: Config  # the options that have a name in Keel, under that name
    thresholds: Thresholds
    budget: Budget
    found: set[str]  # codes of errors found by earlier measures

    @property
    @abstractmethod
    def policy(self) -> LoadedModel:
        """The policy, with its tokenizer and device."""

    def lacks(self, power: Power) -> str:
        """Why this subject does not have a power; empty if it has it."""
        return "" if power in self.powers else f"{type(self).__name__} has no {power.replace('_', ' ')}"

    def swapped(self, **parts: Any) -> Self:
        """A copy with these methods or fields replaced and without cached measurements."""
        other = copy(self)
        for kind in type(self).__mro__:
            for name in (name for name, value in vars(kind).items() if isinstance(value, cached_property)):
                vars(other).pop(name, None)
        vars(other).update(parts)
        return other

    @abstractmethod
    def spelled(self, options: Options) -> Options:
        """Keel's options under the names that this subject's trainer uses."""

    @property
    @abstractmethod
    def groups(self) -> tuple[Group, ...]:
        """The groups of the batch."""

    @property
    @abstractmethod
    def sampling(self) -> SamplingParams:
        """The sampling options, with the batch's number of completions per problem."""

    @property
    @abstractmethod
    def in_half_precision(self) -> bool:
        """Whether training's passes currently run in 16 bits."""

    @property
    def temperature(self) -> float:
        """The temperature of sampling and scoring."""
        return self.sampling.temperature

    @property
    def written(self) -> Tensor:
        """`[B, T]`: all tokens of the completions, trained or not."""
        rows = ((True,) * len(c.tokens) for group in self.chosen(None) for c in group.completions)
        return right_pad(rows, False).bool().to(self.policy.device)

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Run training's passes in the type of the weights."""
        yield

    # ------------------------------------------------------------------------ powers

    def score(self, groups: Sequence[Group] | None = None) -> Tensor:
        """score: training's log-probabilities `[B, T]` of the batch's groups or others, 0 outside the completions."""
        raise NotImplementedError

    def sample(self, *, step: int = 0) -> list[Group]:
        """sample: the batch's problems sampled again with the sampler's weights. Equal steps use equal noise."""
        raise NotImplementedError

    def complete(self, prompts: Sequence[tuple[int, ...]], *, samples: int, length: int, step: int) -> list[Group]:
        """sample: completions of these tokens; empty if the sampler refuses them."""
        raise NotImplementedError

    def sync(self) -> None:
        """sync: send the current weights to the sampler."""
        raise NotImplementedError

    def prompt(self, problem: Problem) -> tuple[int, ...]:
        """golds: the tokens of a problem's prompt, before truncation."""
        raise NotImplementedError

    def answer(self, problem: Problem) -> tuple[int, ...]:
        """golds: the tokens of a problem's gold answer; empty if it has none."""
        raise NotImplementedError

    def problems(self, count: int, *, step: int = 0) -> list[Problem]:
        """golds: training problems."""
        raise NotImplementedError

    def judged(self, problems: Sequence[Problem], *, generations: int, step: int = 0) -> list[Group]:
        """rewards: new completions of each problem with their rewards."""
        raise NotImplementedError

    # ------------------------------------------------------------------------ the model's own forward

    def each_logits(self, groups: Sequence[Group] | None = None) -> Iterator[tuple[int, Tensor]]:
        """(index of a completion, the policy's logits `[t, V]` for it), in fp32 at temperature 1.

        Uses the model's own forward in evaluation mode, without padding, packing or a scorer. Rows of equal length are
        batched while their logits are small, and equal rows are computed once. Results are yielded one by one, since
        the whole batch may not fit into memory.
        """
        texts: list[Text] = [
            (group.prompt_tokens, c.tokens) for group in self.chosen(groups) for c in group.completions
        ]
        return each_logits(self.policy.model, texts, self.policy.device)

    def logits(self, groups: Sequence[Group] | None = None) -> Tensor:
        """The logits of all completions, `[B, T, V]`, 0 where there is no token."""
        rows = dict(self.each_logits(groups))
        width = max(len(row) for row in rows.values())
        padded = {i: torch.nn.functional.pad(row, (0, 0, 0, width - len(row))) for i, row in rows.items()}
        return torch.stack([padded[i] for i in range(len(padded))])

    def tokens(self, groups: Sequence[Group] | None = None) -> Tensor:
        """The completions' tokens `[B, T]`, 0 where there are none."""
        return right_pad((c.tokens for g in self.chosen(groups) for c in g.completions), 0).to(self.policy.device)

    def forward_logp(self, groups: Sequence[Group] | None = None, *, temperature: float | None = None) -> Tensor:
        """Log-probabilities `[B, T]` by the model's own forward, by default at the sampling temperature."""
        tokens = self.tokens(groups)
        scored = torch.zeros(tokens.shape, device=tokens.device)
        for i, row in self.each_logits(groups):
            logp = (row / (self.sampling.temperature if temperature is None else temperature)).log_softmax(-1)
            scored[i, : len(row)] = logp.gather(-1, tokens[i, : len(row), None]).squeeze(-1)
        return scored

    def chosen(self, groups: Sequence[Group] | None) -> Sequence[Group]:
        return self.groups if groups is None else groups

    def answer_logp(self, problems: Sequence[Problem]) -> list[Tensor]:
        """Log-probabilities of the tokens of each gold answer after its prompt, with the current weights."""
        pad = (self.policy.pad_id,)
        pairs = [(self.prompt(problem) or pad, self.answer(problem)) for problem in problems]
        rows = row_logits(self.policy, [(*prompt, *answer) for prompt, answer in pairs])
        return [
            logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(answer, device=logits.device)[:, None])
            for (prompt, answer), logits in zip(pairs, rows, strict=True)
        ]

    @property
    def blind(self) -> float:
        """The NLL in nats per token above which the model does not know an answer."""
        return self.thresholds["bos_surprise"] * math.log(self.vocabulary)

    @cached_property
    def tried(self) -> dict[str, Any]:
        """The selected hypothesis of each table, whatever its verdict."""
        return {}

    @contextmanager
    def perturbed(self, relative: float = RELATIVE_NOISE, seed: int = 0) -> Iterator[None]:
        """Add seeded noise of `relative` × RMS to every trainable weight, or of size `relative` where the RMS is 0.

        Every weight is restored exactly.
        """
        with perturbed_weights([p for p in self.policy.model.parameters() if p.requires_grad], relative, seed):
            yield

    @property
    def vocabulary(self) -> int:
        """The size of the model's output vocabulary."""
        return vocabulary_size(self.policy.model)


__all__ = [
    "LOOKS",
    "RELATIVE_NOISE",
    "STRONG_NOISE",
    "Budget",
    "Power",
    "Subject",
    "Text",
    "backup",
    "each_logits",
    "perturbed_weights",
    "row_logits",
    "vocabulary_size",
]
