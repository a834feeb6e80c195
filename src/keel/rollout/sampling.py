"""How a token is drawn: filters, and noise that depends on what is drawn and on nothing else."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from keel.errors import KeelError

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_TOP_P_HEAD = 1024  # top-p looks at this many tokens first; sorting a whole vocabulary costs as much as the model


@dataclass(frozen=True)
class SamplingParams:
    """What to sample: temperature 0 is greedy, top_k 0 is off, `max_batch` rows run at a time (None: all of them).

    `ignore_eos` runs every row to its full length, for benchmarks.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_completion_length: int = 64
    num_generations: int = 8
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
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
        for name, (fine, rule) in rules.items():
            if not fine:
                raise KeelError(f"rollout.{name} is {getattr(self, name)!r}: it {rule}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def row_key(seed: int, attempt: int, step: int, problem: str, sample: int) -> int:
    """The 64-bit key of one completion's noise, signed as torch wants it.

    A cryptographic hash, so that neighbouring seeds, steps and samples share nothing.
    """
    text = "\x1f".join((str(seed), str(attempt), str(step), str(sample), problem))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64: torch's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection of 64 bits that passes BigCrush as a counter."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def gumbel(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """Standard Gumbel noise `[*keys.shape, width]` of (row key, position, index), in float64.

    A pure function of its arguments: neither the batch a row sits in nor what was drawn before can move it. 53 bits,
    since 24 would cut tails off at 1e-7.
    """
    stream = _mix(keys + _mix((positions + 1) * _GOLDEN))
    index = torch.arange(1, width + 1, device=keys.device) * _GOLDEN
    bits = _shift(_mix(stream.unsqueeze(-1) + index), 11)
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def block_shape(vocabulary: int) -> tuple[int, int]:
    """(blocks, size) that cover the vocabulary in near-square blocks, without padding where a divisor allows it."""
    root = round(vocabulary**0.5)
    for size in sorted(range(max(1, root // 2), 2 * root + 1), key=lambda size: abs(size - root)):
        if vocabulary % size == 0:
            return vocabulary // size, size
    return -(-vocabulary // root), root


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Set to -inf what top-k, then top-p, then min-p leave out, each seeing what the one before left.

    The order and meaning of transformers' warpers; exact ties at a threshold are all kept, where those keep some.
    """
    if params.top_k and params.top_k < logits.shape[-1]:
        threshold = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if params.top_p < 1:
        logits = logits.masked_fill(logits < _nucleus_threshold(logits, params.top_p), -torch.inf)
    if params.min_p > 0:
        # log(min_p * max p) in logits: the normaliser cancels
        threshold = logits.amax(-1, keepdim=True) + math.log(params.min_p)
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return logits


def _nucleus_threshold(logits: Tensor, top_p: float) -> Tensor:
    """The smallest logit in the smallest set of tokens whose probability reaches top_p."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    width = min(_TOP_P_HEAD, logits.shape[-1])
    values = logits.topk(width, dim=-1).values
    cumulative = (values - normaliser).exp().cumsum(-1)
    if width < logits.shape[-1] and bool((cumulative[..., -1] < top_p).any()):
        values = logits.sort(dim=-1, descending=True).values
        cumulative = (values - normaliser).exp().cumsum(-1)
    kept = (cumulative < top_p).sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1)
    return values.gather(-1, kept)


def draw(logits: Tensor, params: SamplingParams, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token a row from logits `[B, V]`: (token, sample_logp, filtered_logp), each `[B]`.

    Gumbel-argmax in two stages, first a block of the vocabulary by its probability and then a token within it: exact
    by the chain rule, with about 2·sqrt(V) noises a row in place of V. It is preferred over one uniform through the
    cumulative distribution because of rounding. Batches of different sizes give logits that differ by some 1e-6, and
    argmax turns that into another token with that probability only; the cumulative distribution has a boundary at
    each of V tokens, and every one of them moves.
    """
    logits = logits.float()
    if params.greedy:
        token = logits.argmax(-1)
        logp = logits.gather(-1, token.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
        return token, logp, torch.zeros_like(logp)
    if params.temperature != 1:
        logits = logits / params.temperature
    if not params.filtered:
        token, logit, normaliser = _gumbel_argmax(logits, noise)
        logp = logit - normaliser
        return token, logp, logp
    full_normaliser = logits.logsumexp(-1)
    token, logit, normaliser = _gumbel_argmax(filter_logits(logits, params), noise)
    return token, logit - full_normaliser, logit - normaliser


def _gumbel_argmax(logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(token, its logit, log-normaliser) of a draw from softmax(logits), with noise `[B, blocks + size]`."""
    assert noise is not None, "sampling at a temperature above 0 needs noise"
    blocks, size = block_shape(logits.shape[-1])
    if blocks * size != logits.shape[-1]:
        logits = F.pad(logits, (0, blocks * size - logits.shape[-1]), value=-torch.inf)
    peak = logits.amax(-1, keepdim=True)
    mass = (logits - peak).exp_().view(-1, blocks, size).sum(-1)
    normaliser = mass.sum(-1).log() + peak.squeeze(-1)
    block = (mass.double().log() + noise[:, :blocks]).argmax(-1)
    inside = logits.view(-1, blocks, size).gather(1, block.view(-1, 1, 1).expand(-1, 1, size)).squeeze(1)
    offset = (inside.double() + noise[:, blocks:]).argmax(-1)
    logit = inside.gather(-1, offset.unsqueeze(-1)).squeeze(-1)
    return block * size + offset, logit, normaliser
