"""Does scoring give each token the policy's log-probability: always the same, in any batch, at the right position?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from keel.base.errors import first_line
from keel.base.types import Completion, Group
from keel.doctor.advice import changes, either, setting
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import (
    Gap,
    average,
    beside_alike,
    bf16_scores,
    close,
    ended_early,
    fitting_temperature,
    forward_logp_at,
    in_float32,
    in_half_precision,
    largest,
    other_positions,
    other_rows,
    padded_scores,
    rounding_explains,
    scaled,
    shifted_scores,
    shortened,
    unbatched_scores,
)
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.gradient import gradient_findings
from keel.doctor.probes.masks import is_blind
from keel.doctor.probes.modes import eval_mode, is_active_dropout, no_dropout, without_dropout
from keel.doctor.probes.strange import ordinary_tokens
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome, no_memory_for
from keel.trainer.memory import is_out_of_memory

_MISSED = 0.5  # of a change that scores miss which do not follow the weights, at least
_ROUNDINGS = 2.0  # times one rounding that two of them differ by at most, on average


def probe_scoring(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """Two passes against each other, then one pass against the model's own unpadded forward."""
    completion_mask = _completion_mask(setup)
    passes: list[Tensor] = []
    for score in (
        setup.forward_logp,
        setup.logp,
        setup.logp,
    ):  # the model's own first: Keel's pass refuses such a model
        passes.append(score())
        broken = int((~torch.isfinite(passes[-1][completion_mask])).sum())
        if broken:
            return Outcome("scoring", (_not_finite(setup, broken, int(completion_mask.sum())),))
    forward_logp, first, second = passes
    apart = largest((first - second)[completion_mask])
    figures = {"passes_apart": apart}
    if not apart <= thresholds["scoring_difference"]:
        return Outcome("scoring", (_unsteady(setup, apart, thresholds),), figures)
    unsteady = largest((forward_logp - setup.forward_logp())[completion_mask])
    figures["forward_apart"] = unsteady
    if not unsteady <= thresholds["scoring_difference"]:
        return Outcome("scoring", (_unsteady(setup, unsteady, thresholds),), figures)
    gap = Gap(setup, setup.logp, first, forward_logp, completion_mask, thresholds)
    if not gap.broken(first):
        gap = replace(gap, rescore=lambda: padded_scores(setup), scored=padded_scores(setup))
    figures |= {"gap_max": gap.worst(gap.scored), "gap_mean": gap.mean(gap.scored)}
    lines = (f"scoring: largest difference from the model's own forward {figures['gap_max']:.2g} nats",)
    if not gap.broken(gap.scored):
        gap = _on_other_text(setup, thresholds)
        figures["gap_other_text"] = gap.worst(gap.scored)
    if not gap.broken(gap.scored) and (found := _without_gradient(setup, thresholds)):
        return Outcome("scoring", found, figures, lines)
    exact, untried = not in_half_precision(setup), tuple[str, ...]()
    if not gap.broken(gap.scored) and not exact:
        try:
            exact, found = _in_full_precision(setup, thresholds)
        except Exception as error:  # no room for it, or kernels and buffers of 16 bits alone: training does without
            untried = (f"scoring in fp32: it cannot be tried with these weights of 16 bits: {first_line(error)}",)
        if found:
            return Outcome("scoring", found, figures, lines)
    if not gap.broken(gap.scored):
        found, unchecked = _of_gradient(setup, figures, exact, thresholds)
        found = found or tuple(_of_changed_weights(setup, forward_logp, thresholds))
        return Outcome("scoring", found, figures, lines, (*untried, *unchecked))
    return Outcome("scoring", tuple(_explained(gap)), figures, lines)


def _without_gradient(setup: KeelSubject, thresholds: Thresholds) -> tuple[Finding, ...]:
    """Passes that need no gradient, as of `old_logp` and of the reference, score as those that train do."""
    with torch.no_grad():
        gap = _on_other_text(setup, thresholds)
        rescore = torch.no_grad()(gap.rescore)  # explanations switch gradients on
        found = tuple(_explained(replace(gap, rescore=rescore))) if gap.broken(gap.scored) else ()
    return tuple(replace(f, evidence=f"without a gradient, and not with one, {f.evidence}") for f in found)


def _of_gradient(
    setup: KeelSubject, figures: dict[str, float], exact: bool, thresholds: Thresholds
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """What is wrong with the gradient, and that it is unchecked where two more of it have no room.

    As training computes it, and where scores of 16-bit weights are `exact` in fp32, in fp32 too: rounding hides less.
    """
    try:
        found = tuple(gradient_findings(setup, figures, thresholds))
        if not found and exact and in_half_precision(setup):
            with in_float32(setup):
                found = tuple(gradient_findings(setup, figures, thresholds))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return (), (no_memory_for("scoring/gradient", error),)
    return found, ()


def _of_changed_weights(setup: KeelSubject, forward_logp: Tensor, thresholds: Thresholds) -> Iterator[Finding]:
    """Scores follow the weights: right ones of the first weights may be remembered, and every update leaves them.

    Such scores miss what the weights have changed, of which 16 bits round away a part.
    """
    completion_mask, before = _completion_mask(setup), setup.logp()
    with setup.perturbed(seed=2):
        gap = Gap(setup, setup.logp, setup.logp(), setup.forward_logp(), completion_mask, thresholds)
    changed = average((gap.forward_logp - forward_logp)[completion_mask])
    if not gap.broken(gap.scored) or gap.mean(gap.scored) <= _MISSED * changed:
        return
    moved = largest((gap.scored - before)[completion_mask])
    yield finding(
        "scoring/mismatch",
        f"training's log-probabilities are right with the weights of the start; after a change of all trainable ones "
        f"they have moved by up to {moved:.3g} nats and are off by up to {gap.worst(gap.scored):.3g}",
        "what is scored does not follow the weights: scores of the same tokens are kept from before, or a part of the "
        "pass has weights of its own",
        "let model.scorer compute with the model that it is given at every call, without a cache",
    )


def _in_full_precision(setup: KeelSubject, thresholds: Thresholds) -> tuple[bool, tuple[Finding, ...]]:
    """Without autocast and with the weights in fp32: whether scores are right to fp32's rounding, and what is wrong.

    A scorer that narrows by itself is off by as much as that alone, or by two such roundings.
    """
    with in_float32(setup):
        gap = _on_other_text(setup, thresholds)
        if in_half_precision(setup):
            return False, ()  # a base of integers
        if not gap.broken(gap.scored):
            return True, ()
        rounding = average((bf16_scores(gap.setup) - gap.forward_logp)[gap.completion_mask])
        off = gap.mean(gap.scored) > _ROUNDINGS * rounding
        return False, tuple(_explained(gap, narrow=False)) if off else ()


def _on_other_text(setup: KeelSubject, thresholds: Thresholds) -> Gap:
    """The gap on completions of other tokens, each drawn evenly from the vocabulary.

    A policy that is certain of what it writes has log-probabilities near 0 and hardly looks at its positions: there
    a wrong score is as near as a right one. Of other text no token is certain.
    """
    other = replace(setup, batch=setup.pack(_other_text(setup)), of_batch={})
    completion_mask = _completion_mask(other)
    return Gap(other, other.logp, other.logp(), other.forward_logp(), completion_mask, thresholds)


def _other_text(setup: KeelSubject) -> list[Group]:
    ordinary = ordinary_tokens(setup)
    draw = Random(setup.config.run.seed).choices

    def written(completion: Completion) -> Completion:
        return replace(completion, tokens=tuple(draw(ordinary, k=len(completion.tokens))))

    return [replace(group, completions=tuple(map(written, group.completions))) for group in setup.groups]


def _completion_mask(setup: KeelSubject) -> Tensor:
    counts = torch.tensor([len(c.tokens) for c in setup.batch.completions], device=setup.mask.device)
    return torch.arange(setup.batch.width, device=setup.mask.device) < counts[:, None]


def _not_finite(setup: KeelSubject, broken: int, total: int) -> Finding:
    weights = [name for name, p in setup.policy.model.named_parameters() if not bool(torch.isfinite(p).all())]
    cause = f"the weights themselves are not finite: {', '.join(weights[:3])}" if weights else "a pass overflows"
    return finding(
        "scoring/non-finite",
        f"{broken} of {total} log-probabilities are NaN or infinite before any update",
        cause,
        "load whole weights in model.name"
        if weights
        else either(
            setting("set {}", changes(setup.config.to_dict(), {"model.dtype": "float32"})), "mend model.scorer"
        ),
    )


def _unsteady(setup: KeelSubject, apart: float, thresholds: Thresholds) -> Finding:
    """Which switch makes two passes agree: evaluation mode, or dropout taken out of torch itself."""
    completion_mask, limit = _completion_mask(setup), thresholds["scoring_difference"]
    active = [name for name, module in setup.policy.model.named_modules() if is_active_dropout(module)]
    switches: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("evaluation mode", lambda: eval_mode(setup.policy.model)),
        ("dropout replaced by the identity", without_dropout),
    )
    for switch, context in switches:
        with context():
            again = largest((setup.logp() - setup.logp())[completion_mask])
        if again <= limit:
            named = f"; active dropout layers: {', '.join(active[:3])}" if active else ""
            return finding(
                "scoring/dropout",
                f"two passes over the same tokens differ by up to {apart:.3g} nats, with {switch} by "
                f"{again:.1g}{named}",
                "dropout (or another layer that acts in training mode only) is on where log-probabilities are taken, "
                "and off in the reference and the sampler",
                no_dropout(setup.config),
            )
    return finding(
        "scoring/nondeterministic",
        f"two passes over the same tokens differ by up to {apart:.3g} nats, in evaluation mode too",
        "a kernel, the model or model.scorer draws random numbers or depends on what ran before",
        "use attn_implementation=eager or sdpa, and take randomness out of the model's forward or of model.scorer",
        severity="error",
    )


def _explained(gap: Gap, *, narrow: bool = True) -> Iterator[Finding]:
    """Recompute under each hypothesis and name the first that closes the gap; `narrow`: 16 bits among them."""
    setup, scored = gap.setup, gap.scored
    size = f"training's log-probabilities are off by up to {gap.worst(scored):.3g} nats ({gap.mean(scored):.3g} mean)"
    if is_blind(setup, gap.thresholds):
        return  # the masks probe has named it, and it explains the gap
    with eval_mode(setup.policy.model):
        eval_scores = gap.rescore()
    if not gap.broken(eval_scores):
        yield finding(
            "scoring/dropout",
            f"{size} in training mode and by {gap.worst(eval_scores):.1g} in evaluation mode",
            "a layer that acts only in training mode is on while log-probabilities are computed",
            no_dropout(setup.config),
        )
        return
    alone = unbatched_scores(setup)
    if not gap.broken(alone):
        size = f"{size} in a batch and by {gap.worst(alone):.1g} when each completion is scored alone"
        yield _between_rows(gap, size) or finding(
            "scoring/positions",
            f"{size}, without padding; beside a row of its own length too it is right",
            "padding moves the real tokens: position ids count it (left padding), or attention sees it",
            "pad on the right, or give position_ids = attention_mask.cumsum(-1) - 1 and pass the attention mask",
        )
        return
    for shift in (-1, 1):
        moved = shifted_scores(setup, shift)
        if not gap.close(scored - moved, gap.completion_mask & (moved != 0)):
            continue
        where = "after" if shift > 0 else "before"
        yield finding(
            "scoring/shifted",
            f"{size}; they equal the log-probabilities taken from the logits one place {where} the right one",
            "logits and tokens are misaligned by one: logits at place i belong to token i + 1",
            "use logits[:, :-1] with tokens[:, 1:] in model.scorer (rows.completion picks the completion's part)",
        )
        return
    temperature = fitting_temperature(gap)
    if temperature is not None:
        yield finding(
            "scoring/temperature",
            f"{size}; the gap closes at temperature {temperature:.3g}, sampling has {setup.temperature:g}",
            "model.scorer does not divide the logits by the temperature it is given",
            "compute log_softmax(logits / temperature) in model.scorer",
        )
        return
    for name, positions in other_positions().items():
        if not gap.close(scored - forward_logp_at(setup, positions)):
            continue
        yield finding(
            "scoring/positions",
            f"{size}; the gap closes with {name}",
            "the position ids of the training pass are not those of the text",
            "give position_ids 0, 1, 2, … over prompt and completion",
        )
        return
    shifted = ended_early(gap) or shortened(gap)
    if shifted is not None:
        yield finding(
            "scoring/shifted",
            f"{size}; {shifted[0]}",
            shifted[1],
            "score every token of the completion in the context of the whole prompt: logits[:, :-1] with "
            "tokens[:, 1:], and rows.completion for the completion's part",
        )
        return
    rounding = bf16_scores(setup) - gap.forward_logp
    if narrow and rounding_explains(
        (scored - gap.forward_logp)[gap.completion_mask], rounding[gap.completion_mask], gap.thresholds
    ):
        yield finding(
            "sampler/precision",
            f"{size}; the same forward in bfloat16 is off by {average(rounding[gap.completion_mask]):.3g} on average",
            "model.scorer computes in half precision, the sampler in the weights' own",
            "compute the log-softmax in fp32: logits.float() before log_softmax",
            severity="warning" if gap.mean(scored) < gap.thresholds["precision_error"] else "error",
        )
        return
    yield finding(
        "scoring/mismatch",
        size + scaled(gap),
        "what training takes for log π(token) is something else: none of dropout, padding, shift, temperature, "
        "positions and precision explains it",
        "compare model.scorer with scorer native: logits[:, :-1] / temperature, log_softmax in fp32, gather "
        "tokens[:, 1:]",
    )


def _between_rows(gap: Gap, size: str) -> Finding | None:
    """Rows that get another one's scores, or read each other where nothing is padded."""
    taken, broken = other_rows(gap)
    if taken > broken / 2:
        return finding(
            "scoring/mismatch",
            f"{size}; {taken} of the {broken} rows that are off have the log-probabilities of another row",
            "model.scorer gives scores back in another order than its rows (rolled, or sorted by length and not put "
            "back): each completion is trained by another one's",
            "return the scores in the order of the rows, or undo the sorting",
        )
    beside = beside_alike(gap.setup)
    if close(gap.setup, beside, gap.thresholds):
        return None
    return finding(
        "scoring/mismatch",
        f"{size}; beside a row of its own length, where nothing is padded, it is off by up to {largest(beside):.3g}",
        "rows of a batch read each other: packed into one without a mask between them, a cache or statistics that they "
        "share",
        "let every row attend to its own tokens alone (a block-diagonal mask, cu_seqlens), with positions that begin "
        "anew at each",
    )
