"""Draw tokens: filters, and noise that is a pure function of row key and position."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from keel.base.errors import KeelError
from keel.models.splitmix import GOLDEN, mix, shift
from keel.rollout.options import RolloutOptions

_TOP_P_HEAD = 1024  # top-p first sorts this many tokens, because sorting a whole vocabulary is slow


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. Temperature 0 is greedy, top_k 0 is off, and `max_batch` rows run at a time (None: all).

    `max_batch` bounds memory: the KV cache of running rows is allocated at full length, and temporarily twice when rows
    join. `ignore_eos` samples every row to its full length, for benchmarks. `stop_ids` are additional tokens that end a
    row.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_completion_length: int = 64
    num_generations: int = 8
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    max_batch: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise KeelError(f"stop must be a list of strings, not the string {self.stop!r}: write [{self.stop!r}]")
        rules = {
            "temperature": (self.temperature >= 0, "must be 0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "must be above 0 and at most 1 (1 switches it off)"),
            "top_k": (self.top_k >= 0, "must be 0 (off) or more"),
            "min_p": (0 <= self.min_p <= 1, "must be between 0 (off) and 1"),
            "max_completion_length": (self.max_completion_length >= 1, "must be at least 1"),
            "num_generations": (self.num_generations >= 1, "must be at least 1: a group needs a completion"),
            "stop": (all(self.stop), "must hold non-empty strings"),
            "max_batch": (self.max_batch is None or self.max_batch >= 1, "must be at least 1, or null for no limit"),
        }
        for name, (valid, rule) in rules.items():
            if not valid:
                raise KeelError(f"rollout.{name} is {getattr(self, name)!r}: it {rule}")

    @classmethod
    def of(cls, rollout: RolloutOptions, **changes: Any) -> SamplingParams:
        """Sampling parameters from the options of the same names in `rollout`, replaced by `changes`."""
        shared = {field.name for field in fields(cls)} - {"ignore_eos", "stop_ids"}  # not configuration options
        return cls(**{**{name: getattr(rollout, name) for name in shared}, **changes})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def row_key(seed: int, attempt: int, step: int, problem: str, sample: int) -> int:
    """The 64-bit signed key of one completion's noise.

    It is a cryptographic hash, so that adjacent seeds, steps and samples have independent noise.
    """
    text = "\x1f".join((str(seed), str(attempt), str(step), str(sample), problem))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def gumbel(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """Standard Gumbel noise `[*keys.shape, width]` of (row key, position, index), in float64.

    It is a pure function of its arguments, independent of the batch and of earlier draws. It uses 53 random bits,
    because 24 bits would cut off tails of probability 1e-7.
    """
    stream = mix(keys + mix((positions + 1) * GOLDEN))
    index = torch.arange(1, width + 1, device=keys.device) * GOLDEN
    bits = shift(mix(stream.unsqueeze(-1) + index), 11)
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def block_shape(vocabulary: int) -> tuple[int, int]:
    """The number of blocks that cover the vocabulary, and their size.

    The two numbers are close to each other. If a divisor allows it, there is no padding.
    """
    root = round(vocabulary**0.5)
    for size in sorted(range(max(1, root // 2), 2 * root + 1), key=lambda size: abs(size - root)):
        if vocabulary % size == 0:
            return vocabulary // size, size
    return -(-vocabulary // root), root


def filter_threshold(logits: Tensor, params: SamplingParams) -> Tensor:
    """The smallest logit `[B, 1]` that passes top-k, then top-p, then min-p.

    Order and meaning are those of transformers' warpers. Each filter keeps the tokens above some logit, so one
    threshold per row suffices. All tokens tied at the threshold are kept; transformers keeps some of them.
    """
    threshold = torch.full_like(logits[:, :1], -torch.inf)
    if params.top_k and params.top_k < logits.shape[-1]:
        head = logits.topk(params.top_k, dim=-1).values
        threshold = head[:, -1:]
        if params.top_p < 1:
            threshold = _nucleus_edge(head, head.logsumexp(-1, keepdim=True), params.top_p)
    elif params.top_p < 1:
        threshold = _nucleus(logits, params.top_p)
    if params.min_p > 0:  # p >= min_p * max p; the normaliser cancels
        threshold = threshold.maximum(logits.amax(-1, keepdim=True) + math.log(params.min_p))
    return threshold


def sorts_all(params: SamplingParams, vocabulary: int) -> bool:
    """Whether top-p applies to the whole vocabulary because there is no top-k before it."""
    return params.top_p < 1 and not (params.top_k and params.top_k < vocabulary)


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """The smallest logit in the smallest set of tokens whose probability reaches top_p.

    Only the most probable tokens are sorted. Rows where these do not reach top_p sort the whole vocabulary.
    """
    normaliser = logits.logsumexp(-1, keepdim=True)
    head = logits.topk(min(_TOP_P_HEAD, logits.shape[-1]), dim=-1).values
    threshold = _nucleus_edge(head, normaliser, top_p)
    flat = ((head - normaliser).exp().sum(-1) < top_p).nonzero().squeeze(-1)
    if head.shape[-1] < logits.shape[-1] and len(flat):
        ordered = logits[flat].sort(dim=-1, descending=True).values
        threshold[flat] = _nucleus_edge(ordered, normaliser[flat], top_p)
    return threshold


def _nucleus_edge(ordered: Tensor, normaliser: Tensor, top_p: float) -> Tensor:
    """The logit at which the cumulative probability of descending logits first reaches top_p."""
    cumulative = (ordered - normaliser).exp().cumsum(-1)
    edge = (cumulative < top_p).sum(-1, keepdim=True).clamp(max=ordered.shape[-1] - 1)
    return ordered.gather(-1, edge)


def draw(logits: Tensor, params: SamplingParams, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row from logits `[B, V]`; returns (token, sample_logp, filtered_logp), each `[B]`.

    Gumbel-argmax in two stages: first over blocks of the vocabulary, then over the tokens of a block. By the chain rule
    this is exact. It needs about 2·sqrt(V) noise values `[B, blocks + size]` instead of V. Inverting the cumulative
    distribution would be less robust to rounding. Logits differ by about 1e-6 between batch sizes. This changes an
    argmax with about that probability, but it shifts all V boundaries of the cumulative distribution.

    For a greedy token, `sample_logp` is at temperature 1 and `filtered_logp` is 0.
    """
    logits = logits.float()
    if params.greedy:
        token = logits.argmax(-1)
        logp = logits.gather(-1, token.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
        return token, logp, torch.zeros_like(logp)
    assert noise is not None, "sampling at a temperature above 0 needs noise"
    if params.temperature != 1:
        logits = logits / params.temperature
    blocks, size = block_shape(logits.shape[-1])
    if blocks * size != logits.shape[-1]:
        logits = F.pad(logits, (0, blocks * size - logits.shape[-1]), value=-torch.inf)
    threshold = filter_threshold(logits, params) if params.filtered else None
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()
    mass = weights.view(-1, blocks, size).sum(-1)
    normaliser = filtered_normaliser = mass.sum(-1).log() + peak.squeeze(-1)
    if threshold is not None:
        mass = weights.masked_fill_(logits < threshold, 0).view(-1, blocks, size).sum(-1)
        filtered_normaliser = mass.sum(-1).log() + peak.squeeze(-1)
    block = (mass.double().log() + noise[:, :blocks]).argmax(-1)
    inside = logits.view(-1, blocks, size).gather(1, block.view(-1, 1, 1).expand(-1, 1, size)).squeeze(1)
    if threshold is not None:
        inside = inside.masked_fill(inside < threshold, -torch.inf)
    offset = (inside.double() + noise[:, blocks:]).argmax(-1)
    logit = inside.gather(-1, offset.unsqueeze(-1)).squeeze(-1)
    return block * size + offset, logit - normaliser, logit - filtered_normaliser
