"""Training's scores against the model's own forward, and ways to score again that explain a gap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from keel.base.types import Group
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.draws import best_temperature
from keel.doctor.thresholds import Thresholds
from keel.doctor.weights import backup
from keel.models.head import evaluating

ROUNDING = 1e-4  # nats: mean differences below it are two orders of the same fp32 sums
_LEFT, _LEFT_HALF = 0.02, 0.1  # of a gap that may be left where its cause is found; weights of 16 bits leave more


@dataclass(frozen=True)
class Gap:
    """Training's scores against the model's own forward, which may differ by rounding.

    `rescore` makes the scores once more, in the same batch.
    """

    setup: KeelSubject
    rescore: Callable[[], Tensor]
    scored: Tensor
    forward_logp: Tensor
    completion_mask: Tensor
    thresholds: Thresholds

    def worst(self, scored: Tensor) -> float:
        return largest((scored - self.forward_logp)[self.completion_mask])

    def mean(self, scored: Tensor) -> float:
        return average((scored - self.forward_logp)[self.completion_mask])

    def broken(self, scored: Tensor) -> bool:
        """Whether these scores are further from the model's own forward than rounding explains."""
        return not self.close(scored - self.forward_logp)

    def close(self, difference: Tensor, where: Tensor | None = None) -> bool:
        """Whether a difference `[B, T]` is within rounding on the completions, or where `where` says."""
        return close(self.setup, difference[self.completion_mask if where is None else where], self.thresholds)


def closed(setup: KeelSubject, gap: float) -> float:
    """The mean difference in nats at which a mean gap of this size counts as closed by an explanation."""
    return max((_LEFT_HALF if _of_16_bits(setup) else _LEFT) * gap, ROUNDING)


def close(setup: KeelSubject, differences: Tensor, thresholds: Thresholds) -> bool:
    """Within rounding: the largest difference in fp32, the mean one where a pass runs in half precision."""
    if in_half_precision(setup):
        return average(differences) <= thresholds["scoring_gap_half"]
    return largest(differences) <= thresholds["scoring_gap"]


def in_half_precision(setup: KeelSubject) -> bool:
    """Whether training's passes run in 16 bits, as the weights are now."""
    return setup.run.amp_dtype is not None or _of_16_bits(setup)


def _of_16_bits(setup: KeelSubject) -> bool:
    """Whether some weight is of another type than fp32, as they are now; also a base of integers, whose passes are."""
    return any(p.dtype != torch.float32 for p in setup.policy.model.parameters())


def largest(differences: Tensor) -> float:
    return float(differences.abs().nan_to_num(torch.inf).max()) if len(differences) else 0.0


def average(differences: Tensor) -> float:
    return float(differences.abs().nan_to_num(torch.inf).mean()) if len(differences) else 0.0


def padded_scores(setup: KeelSubject) -> Tensor:
    """The batch's completions scored beside a longer row, so that all of them are padded."""
    group = setup.groups[0]
    context = setup.policy.context_length or 1 << 30
    prompt = (group.prompt_tokens * 2)[: context - len(group.completions[0].tokens)]
    longer = replace(group, prompt_tokens=prompt, completions=group.completions[:1], rewards=group.rewards[:1])
    return setup.logp(setup.pack([*setup.groups, longer]))[:-1, : setup.batch.width]


def unbatched_scores(setup: KeelSubject) -> Tensor:
    """Each completion scored in a batch of its own."""
    rows = []
    for group in setup.groups:
        for index in range(len(group.completions)):
            single = replace(group, completions=(group.completions[index],), rewards=group.rewards[index : index + 1])
            logp = setup.logp(setup.pack([single]))
            rows.append(functional.pad(logp, (0, setup.batch.width - logp.shape[1])))
    return torch.cat(rows)


def other_rows(gap: Gap) -> tuple[int, int]:
    """How many rows have the scores of another row, as far as both go, of how many whose scores are not their own."""
    lengths = gap.completion_mask.sum(-1)
    taken = broken = 0
    for i, scored in enumerate(gap.scored):
        both = gap.completion_mask & gap.completion_mask[i]
        differences = scored - gap.forward_logp
        if not lengths[i] or gap.close(differences[i], gap.completion_mask[i]):
            continue
        broken += 1
        taken += any(bool(both[j].any()) and gap.close(differences[j], both[j]) for j in range(len(lengths)) if j != i)
    return taken, broken


def beside_alike(setup: KeelSubject) -> Tensor:
    """`[N]`: how far each group's longest completion is off after others of its own length, where nothing is padded."""
    differences = []
    for group in setup.groups:
        own = max(group.completions, key=lambda completion: len(completion.tokens))
        others = [replace(own, tokens=tuple((t + k) % setup.vocabulary for t in own.tokens)) for k in (7, 13)]
        for rows in ([own, *others], [*others, own]):  # a row may read those before it alone, or those after it
            alike = replace(group, completions=tuple(rows), rewards=group.rewards[:1] * len(rows))
            scored, expected = setup.logp(setup.pack([alike])), setup.forward_logp([alike])
            differences.append((scored - expected)[rows.index(own)])
    return torch.cat(differences)


def shifted_scores(setup: KeelSubject, shift: int) -> Tensor:
    """Log-probabilities of the tokens from the logits one position off; 0 where there is none."""
    logp = (setup.logits() / setup.temperature).log_softmax(-1)
    picked = logp.roll(-shift, dims=1).gather(-1, setup.tokens().unsqueeze(-1)).squeeze(-1)
    picked = picked.clone()
    counts = [len(c.tokens) for c in setup.batch.completions]
    for row, count in enumerate(counts):
        edge = slice(max(count - 1, 0), None) if shift > 0 else slice(0, 1)
        picked[row, edge] = 0.0
    return picked


def fitting_temperature(gap: Gap) -> float | None:
    """The temperature at which the model's own forward equals the scores, if there is one."""
    logits, tokens = gap.setup.logits().double(), gap.setup.tokens().unsqueeze(-1)

    def at(t: float) -> Tensor:
        return (logits / t).log_softmax(-1).gather(-1, tokens).squeeze(-1)

    best = best_temperature(
        gap.setup.sampling, lambda params: average((gap.scored - at(params.temperature))[gap.completion_mask])
    )
    left = average((gap.scored - at(best))[gap.completion_mask])
    return best if left <= closed(gap.setup, gap.mean(gap.scored)) else None


def other_positions() -> dict[str, Callable[[int, int], Tensor]]:
    """Position ids that a training pass may have had instead, from the lengths of prompt and completion."""
    return {
        "positions that begin at 1": lambda p, n: torch.arange(1, p + n + 1),
        "positions that begin anew at the completion": lambda p, n: torch.cat((torch.arange(p), torch.arange(n))),
        "every position at 0": lambda p, n: torch.zeros(p + n, dtype=torch.long),
        "positions that count the completion only": lambda p, n: torch.cat(
            (torch.zeros(p, dtype=torch.long), torch.arange(1, n + 1))
        ),
    }


def forward_logp_at(setup: KeelSubject, positions: Callable[[int, int], Tensor]) -> Tensor:
    """The model's own forward under other position ids."""
    rows = []
    model = setup.policy.model
    with evaluating(model):
        for group, completion in ((g, c) for g in setup.groups for c in g.completions):
            tokens = torch.tensor([[*group.prompt_tokens, *completion.tokens]], device=setup.policy.device)
            position_ids = positions(len(group.prompt_tokens), len(completion.tokens)).to(tokens.device)[None]
            seen = torch.ones_like(tokens)  # given, so that positions that begin anew are not read as a new text
            out = model(input_ids=tokens, attention_mask=seen, position_ids=position_ids, use_cache=False)
            logits = out.logits[0].float()
            logp = (logits / setup.temperature).log_softmax(-1)[len(group.prompt_tokens) - 1 : -1]
            completion_ids = torch.tensor(completion.tokens, device=tokens.device)[:, None]
            picked = logp.gather(-1, completion_ids).squeeze(-1)
            rows.append(functional.pad(picked, (0, setup.batch.width - len(picked))))
    return torch.stack(rows)


def bf16_scores(setup: KeelSubject) -> Tensor:
    """The model's own forward in bfloat16 `[B, T]`."""
    with torch.autocast(setup.policy.device.type, dtype=torch.bfloat16):
        return setup.forward_logp()


@contextmanager
def in_float32(setup: KeelSubject) -> Iterator[None]:
    """The policy's own weights in fp32, without autocast: its passes round no more; afterwards all is what it was."""
    narrow = [(p, p.data) for p in setup.policy.model.parameters() if p.is_floating_point() and p.itemsize < 4]
    amp, setup.run.amp_dtype = setup.run.amp_dtype, None
    try:
        for parameter, held in narrow:
            parameter.data = held.float()
        yield
    finally:
        setup.run.amp_dtype = amp
        for parameter, held in narrow:
            parameter.data = held


def rounded_weights() -> dict[str, Callable[[Tensor], Tensor]]:
    """Types that an engine may hold weights `[out, in]` in, each as what is left of them."""
    return {
        "bfloat16": lambda w: w.to(torch.bfloat16).to(w),
        "float16": lambda w: w.to(torch.float16).to(w),
        "float8": lambda w: w.to(torch.float8_e4m3fn).to(w),
        "8-bit integers": lambda w: _integers(w, 127, w.abs().amax()),
        "8-bit integers, a scale a row": lambda w: _integers(w, 127, w.abs().amax(-1, keepdim=True)),
        "4-bit integers": lambda w: _integers(w, 7, w.abs().amax()),
        "4-bit integers, a scale a row": lambda w: _integers(w, 7, w.abs().amax(-1, keepdim=True)),
    }


def _integers(weights: Tensor, largest: int, scale: Tensor) -> Tensor:
    unit = (scale / largest).clamp_min(1e-12)
    return (weights / unit).round() * unit


@contextmanager
def quantized(setup: KeelSubject, rounded: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The policy with matrices that a narrower type holds; afterwards they are what they were."""
    matrices = [p for p in setup.policy.model.parameters() if p.dim() == 2 and p.is_floating_point()]
    originals = backup(matrices)
    try:
        with torch.no_grad():
            for matrix in matrices:
                matrix.copy_(rounded(matrix))
        yield
    finally:
        with torch.no_grad():
            for matrix, before in zip(matrices, originals, strict=True):
                matrix.copy_(before)


def rounding_explains(gap: Tensor, rounding: Tensor, thresholds: Thresholds) -> bool:
    """Whether a gap `[N]` looks like that of bfloat16, `half`: no larger on average, and spread as that is.

    Rounding moves nearly every token; what goes wrong at some places leaves the others as they are.
    """
    gap, rounding = gap.abs().double(), rounding.abs().double()
    if float(gap.mean()) > thresholds["precision_times"] * float(rounding.mean()):
        return False
    moved = (gap > 0.01 * rounding) | (rounding < 1e-6)  # a token that bfloat16 leaves alone tells nothing
    return float(moved.double().mean()) >= thresholds["precision_moved"]


def without_first(groups: Sequence[Group]) -> list[Group]:
    """The same completions after prompts that have lost their first token."""
    return [replace(g, prompt_tokens=g.prompt_tokens[1:] or g.prompt_tokens) for g in groups]


def shortened(gap: Gap) -> tuple[str, str] | None:
    """Evidence and cause where the scores are those after a prompt without its first token."""
    scored = gap.setup.forward_logp(without_first(gap.setup.groups))
    if not gap.close(gap.scored - scored):
        return None
    return (
        "they equal those after a prompt that has lost its first token",
        "the prompt is shortened or shifted before it is scored",
    )


def ended_early(gap: Gap) -> tuple[str, str] | None:
    """Evidence and cause where only the last token of each completion is off."""
    last = torch.zeros_like(gap.completion_mask)
    counts = gap.completion_mask.sum(-1)
    last[torch.arange(len(last), device=last.device), counts.clamp_min(1) - 1] = counts > 0
    others = gap.completion_mask & ~last
    if not bool(others.any()) or not gap.close(gap.scored - gap.forward_logp, others):
        return None
    zero = "; it gets 0" if bool((gap.scored[last] == 0).all()) else ""
    return (
        f"all of it on the last token of each completion, the others are right{zero}",
        "the scores end one token early, so that the last token (the end of the text) is not trained",
    )


def scaled(gap: Gap) -> str:
    """A constant factor between scores and the model's own forward, as text, if that is all that is between them."""
    ours, theirs = gap.scored[gap.completion_mask].double(), gap.forward_logp[gap.completion_mask].double()
    factor = float((ours * theirs).sum() / theirs.square().sum().clamp_min(1e-12))
    if float((ours - factor * theirs).abs().mean()) <= 0.01 * float(theirs.abs().mean()):
        return f"; they are {factor:.3g} times the right ones"
    return ""
