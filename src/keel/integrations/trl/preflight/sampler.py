"""Check the sampler against the policy: reported log-probabilities, drawn tokens, and synced weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keel.doctor.draws import tail_masses, unfiltered, uniform_p_value
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import largest
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.doctor.weights import Text
from keel.eval.statistics import normal_interval
from keel.integrations.trl.preflight.batch import Subject

MOST_ROUNDS = 6  # of the batch's prompts, sampled with changed weights
ENOUGH_TOKENS = 400


def probe_sampler(subject: Subject, thresholds: Thresholds) -> Outcome:
    """Reported log-probabilities and drawn tokens against the model's own forward."""
    trainer, params = subject.trainer, subject.sampling
    findings, unchecked = [*_options(subject)], []
    figures: dict[str, float] = {}
    reported = subject.batch.get("sampling_per_token_logps")
    if reported is None:
        unchecked.append("sampler/precision: the sampler reports no log-probabilities; its tokens are tested instead")
    else:
        findings += _reported(subject, reported.float(), figures, thresholds)
    if trainer.repetition_penalty != 1.0 or sum((params.top_p < 1, params.top_k > 0, params.min_p > 0)) > 1:
        unchecked.append("sampler/mismatch: a repetition penalty or several filters at once are not modelled")
    elif subject.tools:
        unchecked.append("sampler/mismatch: completions hold tokens of tools")
    else:
        findings += _drawn(subject, figures, thresholds)
    shown = ", ".join(f"{name} {value:.2g}" for name, value in figures.items())
    return Outcome("sampler", tuple(_once(findings)), figures, (f"sampler: {shown}",), tuple(unchecked))


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings on reported and drawn tokens that have one cause."""
    return list({finding.code: finding for finding in reversed(findings)}.values())[::-1]


def _options(subject: Subject) -> Iterator[Finding]:
    """Options that `generation_kwargs` overrides; the loss ignores them."""
    trainer = subject.trainer
    used = (trainer.args.generation_kwargs or {}).get("temperature", trainer.temperature)
    if used != trainer.temperature:
        yield finding(
            "sampler/temperature",
            f"generation_kwargs sample at temperature {used:g}, the loss scores at {trainer.temperature:g}",
            "generation_kwargs override GRPOConfig.temperature for the sampler alone",
            f"set temperature={used:g} in GRPOConfig, and leave it out of generation_kwargs",
        )


def _reported(
    subject: Subject, reported: Tensor, figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """The sampler's log-probabilities minus the policy's, under the sampler's filters if any."""
    known = subject.sampled & reported.isfinite()
    forward = torch.zeros_like(reported)
    for row, drawn in subject.each_draw(None, subject.texts):
        forward[row, : len(drawn)] = drawn.logp(subject.sampling).float()
    gap = reported - forward
    means = [float(gap[row][known[row]].mean()) for row in range(len(gap)) if bool(known[row].any())]
    if not means:
        return
    low, high = normal_interval(means)
    figures |= {"gap_max": largest(gap[known]), "gap_mean": float(gap[known].abs().mean())}
    if not subject.close(gap[known], thresholds):
        yield finding(
            "sampler/mismatch",
            f"what the sampler reports of {int(known.sum())} tokens is {figures['gap_mean']:.2g} nats from the "
            f"policy's log-probabilities on average (difference {sum(means) / len(means):.2g}, 95 % between {low:.2g} "
            f"and {high:.2g}), and by up to {figures['gap_max']:.2g}",
            "the sampler runs other weights, another temperature, or reports before its filters",
            "sync its weights before it samples, and report at the temperature and after the filters",
        )


def _drawn(subject: Subject, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """Whether the drawn tokens are the policy's: their randomised tail masses are uniform if they are."""
    masses, cut, surprise = [], [], []
    plain = unfiltered(subject.sampling)
    for _, drawn in subject.each_draw(None, subject.texts):
        masses.append(tail_masses(drawn, subject.sampling))
        logp = drawn.distribution(plain)
        entropy = -(logp.exp() * logp).nansum(-1)
        surprise.append(float((-drawn.logp(plain) - entropy).mean()))
        cut.append(1 - (drawn.logp(plain) - drawn.logp(subject.sampling)).exp())
    chance = uniform_p_value(torch.cat(masses))
    low, high = normal_interval(surprise)
    figures |= {"draws": float(sum(map(len, masses))), "draws_chance": chance}
    if chance < thresholds["sampler_draws"]:
        subject.shared["not the policy's"] = True
        yield finding(
            "sampler/mismatch",
            f"{int(figures['draws'])} sampled tokens have a chance of {chance:.1g} under the policy; they are "
            f"{sum(surprise) / len(surprise):.2g} nats more surprising than its own (95 % between {low:.2g} and "
            f"{high:.2g})",
            "the tokens were drawn by other weights, at another temperature, or after another prompt",
            "sample with the trainer's own weights and GRPOConfig's temperature",
        )
    mass = float(torch.cat(cut).nan_to_num(0.0).mean())
    if subject.sampling.filtered:
        much = mass > thresholds["filtered_mass"]
        yield finding(
            "sampler/filter",
            f"top_p, top_k or min_p cut {100 * mass:.0f} % of the policy's probability away on average",
            "the sampler draws after its filters, the loss computes before them",
            "set top_p=1.0, top_k=0 and min_p=None in GRPOConfig",
            severity="warning" if much else "note",
        )


def probe_sync(subject: Subject, thresholds: Thresholds) -> Outcome:
    """Change the weights and sample again: the tokens must come from the new weights.

    The odds of the old weights against the new ones have a mean of 1 under the new ones, so that odds of a million come
    about by chance once in a million (Markov).
    """
    trainer = subject.trainer
    reason = (
        "vLLM is not given changed weights here"
        if trainer.use_vllm
        else "completions hold tokens of tools"
        if subject.tools
        else "no weight is trainable"
        if not subject.weights
        else None
    )
    if reason is not None:
        return Outcome("weight sync", unchecked=(f"sampler/stale: {reason}",))
    first = _sample(subject, 0)
    with subject.perturbed() as moved:
        trainer.state.global_step += 1  # for a sampler that is synced once a step
        texts: list[Text] = []
        for number in range(MOST_ROUNDS):
            texts += _sample(subject, number)
            if sum(len(tokens) for _, tokens in texts) >= ENOUGH_TOKENS:
                break
        new = _logp(subject, texts)
        trainer.state.global_step -= 1
    ratios = [float(o - n) for o, n in zip(_logp(subject, texts), new, strict=True)]
    odds, limit = sum(ratios), -math.log(thresholds["sampler_draws"])
    tokens = sum(len(tokens) for _, tokens in texts)
    figures = {"odds_old": odds, "tokens": float(tokens), "moved": moved, "log_ratio": -odds / tokens}
    line = f"weight sync: {tokens} tokens after a change of {moved:.2g} nats: odds of e^{-odds:.3g} for the new weights"
    foreign = bool(subject.shared.get("not the policy's"))
    if odds > limit or (foreign and texts[: len(first)] == first):
        same = f"{tokens} new tokens are e^{odds:.3g} times likelier under the old ones"
        evidence = same if odds > limit else f"the same random numbers give the same {len(first)} completions"
        return Outcome("weight sync", (_stale(evidence, moved),), figures, (line,))
    if odds > -limit and not foreign:
        left = f"sampler/stale: undecided after {tokens} tokens, odds of e^{-odds:.2g} for the new weights"
        return Outcome("weight sync", (), figures, (line,), undecided=(left,))
    return Outcome("weight sync", (), figures, (line,))


def _sample(subject: Subject, seed: int) -> list[Text]:
    """Sample the batch's prompts again with the current weights."""
    torch.manual_seed(seed)
    prompts, completions = subject.trainer._generate(copy.deepcopy(subject.prompts))[:2]
    return [(tuple(map(int, p)), tuple(map(int, c))) for p, c in zip(prompts, completions, strict=True)]


def _logp(subject: Subject, texts: Sequence[Text]) -> list[Tensor]:
    """Each completion's log-probability under the filters; a token that they exclude counts 50 nats."""
    scored = {row: drawn.logp(subject.sampling).clamp_min(-50.0).sum() for row, drawn in subject.each_draw(None, texts)}
    return [scored[row] for row in range(len(texts))]


def _stale(evidence: str, moved: float) -> Finding:
    return finding(
        "sampler/stale",
        f"with weights that were changed by {moved:.2g} nats per token, {evidence}",
        "generation runs on a copy of the model that does not follow the updates",
        "generate with the trainer's own model, or load its weights into the copy before every batch",
    )


__all__ = ["probe_sampler", "probe_sync"]
