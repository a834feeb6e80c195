"""Does scoring give each token the policy's log-probability: always the same, in any company, at the right place?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from keel.doctor.bench import Bench
from keel.doctor.findings import Finding, found
from keel.doctor.probes.draws import best_temperature
from keel.doctor.probes.masks import is_blind
from keel.doctor.probes.outcome import Outcome
from keel.doctor.thresholds import Thresholds
from keel.train.batch import score_micro
from keel.types import Group

_NO_DROPOUT = "set model.dropout=false model.lora.dropout=0; a loader or scorer of your own must leave model.eval() on"


def probe_scoring(bench: Bench, thresholds: Thresholds) -> Outcome:
    """Two passes against each other, then one pass against the model's own unpadded forward."""
    exists = _exists(bench)
    passes: list[Tensor] = []
    for way in (bench.witness, bench.logp, bench.logp):  # the model's own first: Keel's pass refuses such a model
        passes.append(way())
        broken = int((~torch.isfinite(passes[-1][exists])).sum())
        if broken:
            return Outcome("scoring", (_not_finite(bench, broken, int(exists.sum())),))
    witness, first, second = passes
    apart = _largest(first - second, exists)
    figures = {"passes_apart": apart}
    if not apart <= thresholds["scoring_difference"]:
        return Outcome("scoring", (_unsteady(bench, apart, thresholds),), figures)
    unsteady = _largest(witness - bench.witness(), exists)
    figures["witness_apart"] = unsteady
    if not unsteady <= thresholds["scoring_difference"]:
        return Outcome("scoring", (_unsteady(bench, unsteady, thresholds),), figures)
    gap = Gap(bench, bench.logp, first, witness, exists, thresholds)
    if not gap.broken(first):
        gap = replace(gap, way=lambda: _in_company(bench), scored=_in_company(bench))
    figures |= {"gap_max": gap.worst(gap.scored), "gap_mean": gap.mean(gap.scored)}
    lines = (f"scoring: largest difference from the model's own forward {figures['gap_max']:.2g} nats",)
    if not gap.broken(gap.scored):
        return Outcome("scoring", tuple(_gradient(bench, figures)), figures, lines)
    return Outcome("scoring", tuple(_explained(gap)), figures, lines)


@dataclass(frozen=True)
class Gap:
    """Scores beside the witness, and how far apart they may be: rounding of the type that computes them.

    `way` makes the scores once more, in the same company.
    """

    bench: Bench
    way: Callable[[], Tensor]
    scored: Tensor
    witness: Tensor
    exists: Tensor
    thresholds: Thresholds

    def worst(self, scored: Tensor) -> float:
        return _largest(scored - self.witness, self.exists)

    def mean(self, scored: Tensor) -> float:
        return _average(scored - self.witness, self.exists)

    def broken(self, scored: Tensor) -> bool:
        """Whether these scores are further from the witness than rounding explains."""
        return not close(self.bench, scored - self.witness, self.exists, self.thresholds)


def close(bench: Bench, difference: Tensor, exists: Tensor, thresholds: Thresholds) -> bool:
    """Within rounding: the largest difference in fp32, the mean one where a pass runs in half precision."""
    if in_half(bench):
        return _average(difference, exists) <= thresholds["scoring_gap_half"]
    return _largest(difference, exists) <= thresholds["scoring_gap"]


def in_half(bench: Bench) -> bool:
    """Whether training's passes run in 16 bits."""
    return bench.run.options.autocast is not None or bench.policy.dtype != torch.float32


def _exists(bench: Bench) -> Tensor:
    counts = torch.tensor([len(c.tokens) for c in bench.batch.completions], device=bench.mask.device)
    return torch.arange(bench.batch.width, device=bench.mask.device) < counts[:, None]


def _largest(difference: Tensor, where: Tensor) -> float:
    values = difference[where].abs()
    return float(values.nan_to_num(torch.inf).max()) if len(values) else 0.0


def _average(difference: Tensor, where: Tensor) -> float:
    values = difference[where].abs()
    return float(values.nan_to_num(torch.inf).mean()) if len(values) else 0.0


def _not_finite(bench: Bench, broken: int, total: int) -> Finding:
    weights = [name for name, p in bench.policy.model.named_parameters() if not bool(torch.isfinite(p).all())]
    cause = f"the weights themselves are not finite: {', '.join(weights[:3])}" if weights else "a pass overflows"
    return found(
        "scoring/non-finite",
        f"{broken} of {total} log-probabilities are NaN or infinite before any update",
        cause,
        "load whole weights in model.name" if weights else "use model.dtype=float32 or bfloat16, or mend model.scorer",
    )


def _unsteady(bench: Bench, apart: float, thresholds: Thresholds) -> Finding:
    """Which switch makes two passes agree: evaluation mode, or dropout taken out of torch itself."""
    exists, limit = _exists(bench), thresholds["scoring_difference"]
    active = [name for name, module in bench.policy.model.named_modules() if _drops(module)]
    ways: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("evaluation mode", lambda: _mode(bench.policy.model, training=False)),
        ("dropout replaced by the identity", _no_dropout),
    )
    for way, context in ways:
        with context():
            again = _largest(bench.logp() - bench.logp(), exists)
        if again <= limit:
            named = f"; active dropout layers: {', '.join(active[:3])}" if active else ""
            return found(
                "scoring/dropout",
                f"two passes over the same tokens differ by up to {apart:.3g} nats, with {way} by {again:.1g}{named}",
                "dropout (or another layer that acts in training mode only) is on where log-probabilities are taken, "
                "and off in the reference and the sampler",
                _NO_DROPOUT,
            )
    return found(
        "scoring/nondeterministic",
        f"two passes over the same tokens differ by up to {apart:.3g} nats, in evaluation mode too",
        "a kernel, the model or model.scorer draws random numbers or depends on what ran before",
        "use attn_implementation=eager or sdpa, and take randomness out of the model's forward or of model.scorer",
        severity="error",
    )


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _no_dropout() -> Iterator[None]:
    """Every functional dropout is the identity inside, whatever its caller thinks of training mode."""
    names = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
    kept = {name: getattr(functional, name) for name in names}
    try:
        for name in names:
            setattr(functional, name, lambda x, *args, **options: x)
        yield
    finally:
        for name, function in kept.items():
            setattr(functional, name, function)


def _explained(gap: Gap) -> Iterator[Finding]:
    """Recompute under each hypothesis and name the first that closes the gap."""
    bench, scored = gap.bench, gap.scored
    size = f"training's log-probabilities are off by up to {gap.worst(scored):.3g} nats ({gap.mean(scored):.3g} mean)"
    if is_blind(bench):
        return  # the masks probe has named it, and it explains the gap
    with _mode(bench.policy.model, training=False):
        calm = gap.way()
    if not gap.broken(calm):
        yield found(
            "scoring/dropout",
            f"{size} in training mode and by {gap.worst(calm):.1g} in evaluation mode",
            "a layer that acts only in training mode is on while log-probabilities are computed",
            _NO_DROPOUT,
        )
        return
    alone = _alone(bench)
    if not gap.broken(alone):
        yield found(
            "scoring/positions",
            f"{size} in a batch and by {gap.worst(alone):.1g} when each completion is scored alone, without padding",
            "padding moves the real tokens: position ids count it (left padding), or attention sees it",
            "pad on the right, or give position_ids = attention_mask.cumsum(-1) - 1 and pass the attention mask",
        )
        return
    for shift in (-1, 1):
        moved = _moved(bench, shift)
        if not close(bench, scored - moved, gap.exists & (moved != 0), gap.thresholds):
            continue
        where = "after" if shift > 0 else "before"
        yield found(
            "scoring/shifted",
            f"{size}; they equal the log-probabilities taken from the logits one place {where} the right one",
            "logits and tokens are misaligned by one: logits at place i belong to token i + 1",
            "use logits[:, :-1] with tokens[:, 1:] in model.scorer (rows.completion picks the completion's part)",
        )
        return
    temperature = _temperature(gap)
    if temperature is not None:
        yield found(
            "scoring/temperature",
            f"{size}; the gap closes at temperature {temperature:.3g}, sampling has {bench.temperature:g}",
            "model.scorer does not divide the logits by the temperature it is given",
            "compute log_softmax(logits / temperature) in model.scorer",
        )
        return
    for name, positions in _other_positions().items():
        if not close(bench, scored - _witness_at(bench, positions), gap.exists, gap.thresholds):
            continue
        yield found(
            "scoring/positions",
            f"{size}; the gap closes with {name}",
            "the position ids of the training pass are not those of the text",
            "give position_ids 0, 1, 2, … over prompt and completion",
        )
        return
    half = _half_gap(bench, gap)
    if gap.mean(scored) <= 3 * half:
        yield found(
            "sampler/precision",
            f"{size}; the same forward in bfloat16 is off by {half:.3g} on average",
            "model.scorer computes in half precision, the sampler in the weights' own",
            "compute the log-softmax in fp32: logits.float() before log_softmax",
            severity="warning" if gap.mean(scored) < 0.1 else "error",
        )
        return
    yield found(
        "scoring/mismatch",
        size + _scaled(gap),
        "what training takes for log π(token) is something else: none of dropout, padding, shift, temperature, "
        "positions and precision explains it",
        "compare model.scorer with scorer native: logits[:, :-1] / temperature, log_softmax in fp32, gather "
        "tokens[:, 1:]",
    )


def _gradient_error(bench: Bench) -> tuple[float, float]:
    """∂Σlogp/∂θ by training's pass against the model's own forward, on one completion: how far off, and its size."""
    weights = [p for p in bench.policy.model.parameters() if p.requires_grad]
    group = max(bench.groups, key=lambda group: len(group.completions[0].tokens))
    single = replace(group, completions=group.completions[:1], rewards=group.rewards[:1])
    batch = bench.pack([single])
    scored = score_micro(batch.micros[0], batch, bench.run).logp.sum()
    ids = torch.tensor([[*group.prompt_tokens, *group.completions[0].tokens]], device=bench.policy.device)
    logits = bench.policy.model(input_ids=ids, use_cache=False).logits[0, len(group.prompt_tokens) - 1 : -1].float()
    logp = (logits / bench.temperature).log_softmax(-1)
    own = logp.gather(-1, ids[0, len(group.prompt_tokens) :, None]).sum()
    wanted = _flat(own, weights)
    given = _flat(scored, weights) if scored.requires_grad else torch.zeros_like(wanted)
    error = float((given - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return error, float(given.norm() / wanted.norm().clamp_min(1e-30))


def _gradient(bench: Bench, figures: dict[str, float]) -> Iterator[Finding]:
    """The gradient in the mode of training; where it is off, whether evaluation mode mends it."""
    error, size = _gradient_error(bench)
    figures["gradient_error"] = error
    limit = 0.3 if in_half(bench) else 0.01
    if not error > limit:
        return
    with _mode(bench.policy.model, training=False):
        calm, _ = _gradient_error(bench)
    if calm <= limit:
        active = [name for name, module in bench.policy.model.named_modules() if _drops(module)]
        yield found(
            "scoring/dropout",
            f"the gradient of log-probabilities is off by {error:.3g} of its size in training mode, by {calm:.1g} in "
            f"evaluation mode; active dropout layers: {', '.join(active[:3]) or 'none known to torch'}",
            "dropout is on in the policy's pass: the first update makes policy and reference differ by it",
            _NO_DROPOUT,
        )
    else:
        yield found(
            "scoring/gradient",
            f"the gradient of training's log-probabilities is {size:.3g} times the size of the model's own and off by "
            f"{error:.3g} of it, although their values agree",
            "model.scorer detaches a part of what it computes, or runs without gradient",
            "return log-probabilities that autograd can follow back to every trainable weight",
        )


def _flat(value: Tensor, weights: Sequence[nn.Parameter]) -> Tensor:
    found_gradients = torch.autograd.grad(value, weights, allow_unused=True)
    parts = zip(found_gradients, weights, strict=True)
    return torch.cat([(torch.zeros_like(w) if g is None else g).flatten().float() for g, w in parts])


def _in_company(bench: Bench) -> Tensor:
    """The bench's completions scored beside a longer row, so that all of them are padded."""
    group = bench.groups[0]
    prompt = (group.prompt_tokens * 2)[: _room(bench) - len(group.completions[0].tokens)]
    longer = replace(group, prompt_tokens=prompt, completions=group.completions[:1], rewards=group.rewards[:1])
    return bench.logp(bench.pack([*bench.groups, longer]))[:-1, : bench.batch.width]


def _room(bench: Bench) -> int:
    return bench.policy.context_length or 1 << 30


def _alone(bench: Bench) -> Tensor:
    """Each completion scored in a batch of its own."""
    rows = []
    for group in bench.groups:
        for index in range(len(group.completions)):
            single = replace(group, completions=(group.completions[index],), rewards=group.rewards[index : index + 1])
            logp = bench.logp(bench.pack([single]))
            rows.append(functional.pad(logp, (0, bench.batch.width - logp.shape[1])))
    return torch.cat(rows)


def _moved(bench: Bench, shift: int) -> Tensor:
    """Log-probabilities of the tokens from the logits one place off; 0 where there is no such place."""
    logp = (bench.logits() / bench.temperature).log_softmax(-1)
    picked = logp.roll(-shift, dims=1).gather(-1, bench.tokens().unsqueeze(-1)).squeeze(-1)
    picked = picked.clone()
    counts = [len(c.tokens) for c in bench.batch.completions]
    for row, count in enumerate(counts):
        edge = slice(max(count - 1, 0), None) if shift > 0 else slice(0, 1)
        picked[row, edge] = 0.0
    return picked


def _temperature(gap: Gap) -> float | None:
    """The temperature at which the witness equals the scores, if there is one."""
    logits, tokens = gap.bench.logits().double(), gap.bench.tokens().unsqueeze(-1)

    def at(t: float) -> Tensor:
        return (logits / t).log_softmax(-1).gather(-1, tokens).squeeze(-1)

    best = best_temperature(
        gap.bench.sampling, lambda params: _average(gap.scored - at(params.temperature), gap.exists)
    )
    fits = _average(gap.scored - at(best), gap.exists) <= max(0.02 * gap.mean(gap.scored), 1e-4)
    return best if fits else None


def _other_positions() -> dict[str, Callable[[int, int], Tensor]]:
    """Position ids that a training pass may have had instead, from the lengths of prompt and completion."""
    return {
        "positions that begin at 1": lambda p, n: torch.arange(1, p + n + 1),
        "positions that begin anew at the completion": lambda p, n: torch.cat((torch.arange(p), torch.arange(n))),
        "every position at 0": lambda p, n: torch.zeros(p + n, dtype=torch.long),
        "positions that count the completion only": lambda p, n: torch.cat(
            (torch.zeros(p, dtype=torch.long), torch.arange(1, n + 1))
        ),
    }


def _witness_at(bench: Bench, positions: Callable[[int, int], Tensor]) -> Tensor:
    """The witness under other position ids."""
    rows = []
    model = bench.policy.model
    with _mode(model, training=False), torch.no_grad():
        for group, completion in _pairs(bench.groups):
            tokens = torch.tensor([[*group.prompt_tokens, *completion.tokens]], device=bench.policy.device)
            places = positions(len(group.prompt_tokens), len(completion.tokens)).to(tokens.device)[None]
            seen = torch.ones_like(tokens)  # given, so that positions that begin anew are not read as a new text
            out = model(input_ids=tokens, attention_mask=seen, position_ids=places, use_cache=False)
            logits = out.logits[0].float()
            logp = (logits / bench.temperature).log_softmax(-1)[len(group.prompt_tokens) - 1 : -1]
            own = torch.tensor(completion.tokens, device=tokens.device)[:, None]
            picked = logp.gather(-1, own).squeeze(-1)
            rows.append(functional.pad(picked, (0, bench.batch.width - len(picked))))
    return torch.stack(rows)


def _pairs(groups: Sequence[Group]) -> Iterator[tuple[Group, Any]]:
    return ((group, completion) for group in groups for completion in group.completions)


def _half_gap(bench: Bench, gap: Gap) -> float:
    """What bfloat16 alone does to the witness, mean in nats."""
    with torch.autocast(bench.policy.device.type, dtype=torch.bfloat16):
        return _average(bench.witness() - gap.witness, gap.exists)


def _scaled(gap: Gap) -> str:
    """A constant factor between scores and witness, in words, if that is all that is between them."""
    ours, theirs = gap.scored[gap.exists].double(), gap.witness[gap.exists].double()
    factor = float((ours * theirs).sum() / theirs.square().sum().clamp_min(1e-12))
    if float((ours - factor * theirs).abs().mean()) <= 0.01 * float(theirs.abs().mean()):
        return f"; they are {factor:.3g} times the right ones"
    return ""
