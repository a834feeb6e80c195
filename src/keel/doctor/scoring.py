"""Scoring: training's log-probabilities must be the policy's, deterministic, and correct in any batch.

Training's scores are compared with the model's own forward under increasingly difficult conditions. If they differ by
more than rounding, the hypothesis that closes the gap is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from keel.base.errors import first_line
from keel.base.types import Completion, Group
from keel.doctor.advice import changes, either, setting
from keel.doctor.decide import Gap, Hypothesis, OpenGap, open_gap, swap, within
from keel.doctor.draws import best_temperature, ordinary_tokens
from keel.doctor.findings import Advice, finding
from keel.doctor.gap import (
    average,
    bf16_scores,
    close,
    closed,
    eval_mode,
    in_float32,
    in_half_precision,
    is_active_dropout,
    largest,
    no_dropout,
    rounding_explains,
    without_dropout,
)
from keel.doctor.gradient import gradient_findings
from keel.doctor.measure import Outcome, Verdict, no_memory_for
from keel.doctor.subject import Subject
from keel.models.head import evaluating
from keel.models.scorer import padded_mask, padding_columns
from keel.trainer.memory import is_out_of_memory

_MISSED = 0.5  # scores that miss more than this share of a weight change count as independent of the weights
_ROUNDINGS = 2.0  # factor over one rounding error; the mean difference of two roundings is at most this

NAN = torch.nan  # at tokens without an expected score


def _errors(subject: Any) -> Tensor:
    """Scores minus the model's own log-probabilities `[N]`, at tokens with an expected score."""
    expected = subject.forward_logp()
    known = subject.written & ~expected.isnan()
    return (subject.score() - expected)[known]


GAP = Gap(_errors, close, closed)

# ------------------------------------------------------------------------ explanations of a gap

_ALIGN = "use logits[:, :-1] with tokens[:, 1:] in model.scorer, in the context of the whole prompt (rows.completion)"


def hypotheses(subject: Subject) -> Iterator[Hypothesis]:
    """The explanations of a gap, in order of priority: the first that closes it is reported."""
    temperature = _fitting_temperature(subject)
    expected, scored = partial(_swapped, "forward_logp"), partial(_swapped, "score")
    trains_only = (
        "a layer that is active only in training mode, such as dropout, is active while log-probabilities are computed"
    )
    mode = within(lambda subject: eval_mode(subject.policy.model))
    yield Hypothesis("in evaluation mode", "scoring/dropout", trains_only, no_dropout(subject.config), mode)
    for name, code, cause, advice, apply in (
        (
            "when the rows of scores are reordered",
            "mismatch",
            "model.scorer returns scores in another order than its rows (rolled, or sorted and not restored)",
            "return the scores in the order of the rows, or undo the sorting",
            expected(_other_rows),
        ),
        (
            "when rows of equal length are batched without padding",
            "positions",
            "padding changes the scores of real tokens: position ids count the padding (left padding), or attention "
            "includes it",
            "pad on the right, or give position_ids = attention_mask.cumsum(-1) - 1 and pass the attention mask",
            scored(partial(_apart, beside=2)),
        ),
        (
            "when each completion is scored alone",
            "mismatch",
            "rows of a batch attend to each other: they are packed without a mask between them, or share a cache",
            "let every row attend only to its own tokens (a block-diagonal mask, cu_seqlens), with its own position "
            "ids",
            scored(_apart),
        ),
        *(
            (
                f"with log-probabilities from the logits one position {where} the right one",
                "shifted",
                "logits and tokens are misaligned by one: logits at position i predict token i + 1",
                _ALIGN,
                expected(partial(_shifted, shift=shift)),
            )
            for shift, where in ((-1, "before"), (1, "after"))
        ),
        (
            f"at temperature {temperature:.3g}, while sampling uses {subject.temperature:g}",
            "temperature",
            "model.scorer does not divide the logits by the temperature it is given",
            "compute log_softmax(logits / temperature) in model.scorer",
            expected(lambda subject: subject.forward_logp(temperature=temperature)),
        ),
        *(
            (
                f"with {what}",
                "positions",
                "the training pass uses wrong position ids",
                "give position_ids 0, 1, 2, … over prompt and completion",
                expected(partial(_at_positions, positions=positions)),
            )
            for what, positions in POSITIONS.items()
        ),
        (
            "without the last token of each completion",
            "shifted",
            "the scores end one token early, so the last token is not trained",
            _ALIGN,
            expected(_ended_early),
        ),
        (
            "after prompts without their first token",
            "shifted",
            "the prompt is shortened or shifted before it is scored",
            _ALIGN,
            expected(_shortened),
        ),
    ):
        yield Hypothesis(name, f"scoring/{code}", cause, advice, apply)
    yield Hypothesis(
        "when completions do not attend to their prompts",
        "mask/attention",
        "the training pass does not attend to the prompt: the loss mask is used as the attention mask",
        "set attention_mask to 1 on every real token (prompt, completion, tool output), and use the loss mask only in "
        "the loss",
        expected(_of_unseen_prompts),
    )


def _swapped(part: str, measured: Callable[[Any], Tensor]) -> Callable[[Any], AbstractContextManager[Any]]:
    """An experiment that replaces a method by a value computed beforehand on the subject itself."""

    def apply(subject: Any) -> AbstractContextManager[Any]:
        value = measured(subject)
        return swap(**{part: lambda: value})(subject)

    return apply


def _other_rows(subject: Any) -> Tensor:
    """For each row of scores, the nearest row of the model's own scores, compared at common positions."""
    scored, expected = subject.score(), subject.forward_logp()
    written = subject.written
    rows = expected.masked_fill(~written, NAN)
    apart = (scored[:, None] - rows).abs().nanmean(-1)  # [B, B], over the tokens of the other row
    both = (written[:, None] & written[None]).any(-1)
    return rows[apart.masked_fill(~both, torch.inf).argmin(-1)]


def _apart(subject: Any, beside: int = 0) -> Tensor:
    """`[B, T]`: each completion scored in its own batch, with `beside` other completions of equal length."""
    rows, width = [], subject.written.shape[1]
    for group in subject.chosen(None):
        for i, own in enumerate(group.completions):
            others = [replace(own, tokens=tuple((t + k) % subject.vocabulary for t in own.tokens)) for k in (7, 13)]
            completions = (own, *others[:beside])
            alone = replace(group, completions=completions, rewards=group.rewards[i : i + 1] * len(completions))
            logp = subject.score([alone])[:1]
            rows.append(functional.pad(logp, (0, width - logp.shape[1])))
    return torch.cat(rows)


def _shifted(subject: Any, shift: int) -> Tensor:
    """Log-probabilities of the tokens from the logits one position off; NaN where there are none."""
    logp = (subject.logits() / subject.temperature).log_softmax(-1)
    picked = logp.roll(-shift, dims=1).gather(-1, subject.tokens().unsqueeze(-1)).squeeze(-1).clone()
    for row, count in enumerate(subject.written.sum(-1).tolist()):
        picked[row, slice(max(count - 1, 0), None) if shift > 0 else slice(0, 1)] = NAN
    return picked


def _fitting_temperature(subject: Any) -> float:
    """The temperature at which the model's own forward is closest to the scores."""
    scored, logits, tokens = subject.score(), subject.logits().double(), subject.tokens().unsqueeze(-1)

    def off(params: Any) -> float:
        logp = (logits / params.temperature).log_softmax(-1).gather(-1, tokens).squeeze(-1)
        return average((scored - logp)[subject.written])

    return best_temperature(subject.sampling, off)


POSITIONS: dict[str, Callable[[int, int], Tensor]] = {  # (prompt length, completion length) → position ids
    "positions that begin at 1": lambda p, n: torch.arange(1, p + n + 1),
    "positions that restart at the completion": lambda p, n: torch.cat((torch.arange(p), torch.arange(n))),
    "every position at 0": lambda p, n: torch.zeros(p + n, dtype=torch.long),
    "positions that are 0 in the prompt and count from 1 in the completion": lambda p, n: torch.cat(
        (torch.zeros(p, dtype=torch.long), torch.arange(1, n + 1))
    ),
}


def _at_positions(subject: Any, positions: Callable[[int, int], Tensor], prompt_mask: int = 1) -> Tensor:
    """Scores of the model's own forward with other position ids, or with the prompts masked."""
    rows, model, width = [], subject.policy.model, subject.written.shape[1]
    with evaluating(model):
        for group, completion in ((g, c) for g in subject.chosen(None) for c in g.completions):
            tokens = torch.tensor([[*group.prompt_tokens, *completion.tokens]], device=subject.policy.device)
            given = len(group.prompt_tokens)
            ids = positions(given, len(completion.tokens)).to(tokens.device)[None]
            seen = torch.ones_like(tokens)  # an explicit mask, since position ids that restart could mean packed texts
            seen[:, :given] = prompt_mask
            columns = padding_columns(tokens)
            padded, ids = (functional.pad(row, (0, columns)) for row in (tokens, ids))
            mask = padded_mask(seen, columns)
            logits = model(input_ids=padded, attention_mask=mask, position_ids=ids, use_cache=False).logits[0].float()
            logp = (logits / subject.temperature).log_softmax(-1)[given - 1 : tokens.shape[1] - 1]
            picked = logp.gather(-1, tokens[0, given:, None]).squeeze(-1)
            rows.append(functional.pad(picked, (0, width - len(picked))))
    return torch.stack(rows)


def _of_unseen_prompts(subject: Any) -> Tensor:
    logp = _at_positions(subject, lambda p, n: torch.arange(p + n), prompt_mask=0)
    logp[:, 0] = NAN  # predicted from a token that attends to nothing
    return logp


def _ended_early(subject: Any) -> Tensor:
    counts, expected = subject.written.sum(-1), subject.forward_logp().clone()
    expected[torch.arange(len(expected), device=expected.device), counts.clamp_min(1) - 1] = NAN
    return expected


def _shortened(subject: Any) -> Tensor:
    groups = [replace(g, prompt_tokens=g.prompt_tokens[1:] or g.prompt_tokens) for g in subject.chosen(None)]
    shorter: Tensor = subject.forward_logp(groups)
    return shorter


# ------------------------------------------------------------------------ conditions


def _padded(subject: Any) -> Any:
    """The subject scored together with a longer row, so that all of its completions are padded."""
    groups, width = subject.chosen(None), subject.written.shape[1]
    group = groups[0]
    context = subject.policy.context_length or 1 << 30
    prompt = (group.prompt_tokens * 2)[: context - len(group.completions[0].tokens)]
    longer = replace(group, prompt_tokens=prompt, completions=group.completions[:1], rewards=group.rewards[:1])

    def score(others: Sequence[Group] | None = None) -> Tensor:
        logp: Tensor = subject.score(others) if others is not None else subject.score([*groups, longer])[:-1, :width]
        return logp

    return subject.swapped(score=score)


def _of_other_text(subject: Any) -> Any:
    """The subject with completions of uniformly random tokens.

    A confident policy has log-probabilities near 0 that hardly depend on positions, so that wrong scores are close to
    right ones. Random tokens are never certain.
    """
    ordinary, draw = ordinary_tokens(subject), Random(0).choices

    def written(completion: Completion) -> Completion:
        return replace(completion, tokens=tuple(draw(ordinary, k=len(completion.tokens))))

    groups: Sequence[Group] = [
        replace(group, completions=tuple(map(written, group.completions))) for group in subject.chosen(None)
    ]

    def chosen(others: Sequence[Group] | None) -> Sequence[Group]:
        return groups if others is None else others

    return subject.swapped(chosen=chosen, score=lambda others=None: subject.score(chosen(others)))


@contextmanager
def _without_gradient(subject: Any) -> Iterator[Any]:
    with torch.no_grad():
        other = _of_other_text(subject)
        yield other.swapped(score=torch.no_grad()(other.score))  # some hypotheses enable gradients


# In order of difficulty. The label is part of the evidence.
CONDITIONS: tuple[tuple[str, Callable[[Any], AbstractContextManager[Any]]], ...] = (
    ("", nullcontext),
    ("", lambda subject: nullcontext(_padded(subject))),
    ("", lambda subject: nullcontext(_of_other_text(subject))),
    ("only in a pass without gradients, ", _without_gradient),
)


def measure_scoring(subject: Subject) -> Outcome:
    """Training's log-probabilities must be deterministic and equal those of the model's own forward, padded or not."""
    figures: dict[str, float] = {}
    broken = _unsteady(subject, figures)
    if broken is not None:
        return Outcome.of("scoring", [broken], ())
    errors = _errors(subject)
    figures |= {"gap_max": largest(errors), "gap_mean": average(errors)}
    lines = (f"scoring: largest difference from the model's own forward {figures['gap_max']:.2g} nats",)
    verdicts = [Verdict.sound("", **figures)]
    for label, condition in CONDITIONS:
        with condition(subject) as given:
            opened = open_gap(GAP, given, hypotheses(given))
            if opened is not None:
                verdicts += _explained(given, opened, label)
                return Outcome.of("scoring", verdicts, lines)
    exact = not in_half_precision(subject)
    if not exact:
        try:
            with in_float32(subject):
                exact, found = _in_full_precision(subject)
                verdicts += found
        except Exception as error:  # out of memory, or 16-bit kernels and buffers; training does not need this
            why = f"this cannot be tested with these 16-bit weights: {first_line(error)}"
            verdicts.append(Verdict.unchecked(["scoring in fp32"], why))
    if all(verdict.state != "found" for verdict in verdicts):
        verdicts += _of_gradient(subject, exact)
    if all(verdict.state != "found" for verdict in verdicts):
        verdicts += _of_changed_weights(subject)
    return Outcome.of("scoring", verdicts, lines)


def _explained(subject: Any, opened: OpenGap, label: str, *, narrow: bool = True) -> Iterator[Verdict]:
    """The cause of a gap. `narrow`: 16-bit rounding is a possible cause. Empty if the masks probe reported it."""
    size = f"{label}training's log-probabilities are off by up to {opened.largest:.3g} nats ({opened.mean:.3g} mean)"
    if "mask/attention" in subject.found:
        return
    if opened.by is not None:
        by = opened.by
        yield Verdict.found(finding(by.code, f"{size}; the gap closes {by.name}", by.cause, by.advice))
        return
    written = subject.written
    gap, rounding = (scored - subject.forward_logp() for scored in (subject.score(), bf16_scores(subject)))
    if narrow and rounding_explains(gap[written], rounding[written], subject.thresholds):
        mild = opened.mean < subject.thresholds["precision_error"]
        yield Verdict.found(
            finding(
                "sampler/precision",
                f"{size}; the same forward in bfloat16 is off by {average(rounding[written]):.3g} on average",
                "model.scorer computes in half precision, while the sampler uses the type of the weights",
                "compute the log-softmax in fp32: logits.float() before log_softmax",
                severity="warning" if mild else "error",
            )
        )
        return
    ours, theirs = subject.score()[written].double(), subject.forward_logp()[written].double()
    factor = float((ours * theirs).sum() / theirs.square().sum().clamp_min(1e-12))
    scaled = float((ours - factor * theirs).abs().mean()) <= 0.01 * float(theirs.abs().mean())
    yield Verdict.found(
        finding(
            "scoring/mismatch",
            size + (f"; they are {factor:.3g} times the right ones" if scaled else ""),
            "training does not compute the model's log-probabilities; dropout, padding, a shift, the temperature, "
            "position ids and precision do not explain the difference",
            "compare model.scorer with logits[:, :-1] / temperature, log_softmax in fp32, gathered at tokens[:, 1:]",
        )
    )


def _in_full_precision(subject: Any) -> tuple[bool, list[Verdict]]:
    """With fp32 weights and without autocast: whether scores are exact up to rounding, and the cause if they are not.

    A scorer that rounds to 16 bits by itself is off by one or two such roundings, which is accepted.
    """
    other = _of_other_text(subject)
    if in_half_precision(subject):
        return False, []  # integer base weights
    opened = open_gap(GAP, other, hypotheses(other))
    if opened is None:
        return True, []
    rounding = average((bf16_scores(other) - other.forward_logp())[other.written])
    return False, [*_explained(other, opened, "", narrow=False)] if opened.mean > _ROUNDINGS * rounding else []


def _of_gradient(subject: Any, exact: bool) -> list[Verdict]:
    """Findings about the gradient, or unchecked if two more gradients do not fit into memory.

    The gradient is tested in training's precision. 16-bit weights with `exact` scores in fp32 are also tested in fp32,
    where rounding errors are smaller.
    """
    if why := subject.lacks("gradient"):
        return [Verdict.unchecked(["scoring/gradient"], why)]
    figures: dict[str, float] = {}
    try:
        found = [*gradient_findings(subject, figures)]
        if not found and exact and in_half_precision(subject):
            with in_float32(subject):
                found = [*gradient_findings(subject, figures)]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        code, _, why = no_memory_for("scoring/gradient", error).partition(": ")
        return [Verdict.unchecked([code], why)]
    return [Verdict.sound("", **figures), *map(Verdict.found, found)]


def _of_changed_weights(subject: Subject) -> Iterator[Verdict]:
    """Scores must change with the weights. Cached scores are right for the initial weights only.

    They may miss half of the change, because 16-bit weights round part of it away.
    """
    written, before, expected = subject.written, subject.score(), subject.forward_logp()
    with subject.perturbed(seed=2):
        errors, scored = _errors(subject), subject.score()
        changed, is_rounding = average((subject.forward_logp() - expected)[written]), GAP.is_rounding(subject, errors)
    if is_rounding or average(errors) <= _MISSED * changed:
        return
    yield Verdict.found(
        finding(
            "scoring/mismatch",
            "training's log-probabilities are correct for the initial weights; after a change of all trainable "
            f"weights, they have changed by up to {largest((scored - before)[written]):.3g} nats and are off by up to "
            f"{largest(errors):.3g}",
            "the scores do not follow the weights: they are cached, or a part of the pass uses its own copy of the "
            "weights",
            "let model.scorer compute with the model that is passed to it at every call, without a cache",
        )
    )


# ------------------------------------------------------------------------ finite and deterministic scores


def _unsteady(subject: Subject, figures: dict[str, float]) -> Verdict | None:
    """Scores that are not finite or differ between passes. The model's own are computed first."""
    limit, written = subject.thresholds["scoring_difference"], subject.written
    own = subject.forward_logp()
    passes = [own] if not bool(own[written].isfinite().all()) else [own, subject.score(), subject.score()]
    broken = int((~torch.isfinite(torch.stack(passes)[:, written])).any(0).sum())
    if broken:
        return _not_finite(subject, broken, int(written.sum()))
    apart = {"passes_apart": lambda: passes[1] - passes[2], "forward_apart": lambda: own - subject.forward_logp()}
    for name, differences in apart.items():
        figures[name] = largest(differences()[written])
        if not figures[name] <= limit:
            return _random(subject, figures[name], figures)
    return None


def _not_finite(subject: Subject, broken: int, total: int) -> Verdict:
    weights = [name for name, p in subject.policy.model.named_parameters() if not bool(torch.isfinite(p).all())]
    cause = f"the weights themselves are not finite: {', '.join(weights[:3])}" if weights else "a pass overflows"
    wider: Advice = setting("set {}", changes(subject.config.to_dict(), {"model.dtype": "float32"}))
    return Verdict.found(
        finding(
            "scoring/non-finite",
            f"{broken} of {total} log-probabilities are NaN or infinite before any update",
            cause,
            "set model.name to a checkpoint with finite weights" if weights else either(wider, "fix model.scorer"),
        )
    )


def _random(subject: Subject, apart: float, figures: dict[str, float]) -> Verdict:
    """The finding for scores that vary, by whether evaluation mode or disabled dropout makes two passes equal."""
    active = [name for name, module in subject.policy.model.named_modules() if is_active_dropout(module)]
    for switch, context in (
        ("evaluation mode", lambda: eval_mode(subject.policy.model)),
        ("dropout replaced by the identity", without_dropout),
    ):
        with context():
            again = largest((subject.score() - subject.score())[subject.written])
        if again <= subject.thresholds["scoring_difference"]:
            named = f"; active dropout layers: {', '.join(active[:3])}" if active else ""
            dropout = finding(
                "scoring/dropout",
                f"two passes over the same tokens differ by up to {apart:.3g} nats, and by {again:.1g} with "
                f"{switch}{named}",
                "dropout (or another layer that is active only in training mode) is on when log-probabilities are "
                "computed, and off in the reference and the sampler",
                no_dropout(subject.config),
            )
            return Verdict.found(dropout, **figures)
    random = finding(
        "scoring/nondeterministic",
        f"two passes over the same tokens differ by up to {apart:.3g} nats, even in evaluation mode",
        "a kernel, the model or model.scorer draws random numbers or depends on earlier calls",
        "use attn_implementation=eager or sdpa, and remove randomness from the model's forward and from model.scorer",
        severity="error",
    )
    return Verdict.found(random, **figures)


__all__ = ["measure_scoring"]
