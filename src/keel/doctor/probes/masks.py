"""Which tokens are trained, and what the training pass can see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter

import torch
from torch import Tensor

from keel.base.types import Group
from keel.doctor.draws import (
    Draws,
    batch_draws,
    chance_of,
    improbable_runs,
    tail_masses,
    unfiltered,
    uniform_p_value,
)
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import average, in_half_precision, largest
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.alternatives import alternatives, applied, fitted
from keel.doctor.probes.ends import end_findings
from keel.doctor.probes.objective import loss_gradient
from keel.doctor.subject import STRONG_NOISE
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.rollout.sampling import SamplingParams

TRAINED, GIVEN, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"  # green, dim
_MAX_POSITIONS = 6
_CHANGES = 3  # other tokens that are tried at a position
_ENOUGH, _USUAL = 12, 0.05  # tokens, and a chance of theirs, by which they may be draws
_MOVED = 2  # answers of the model's own forward: one may lie at an edge of rounding


def probe_masks(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """Perturb what a completion should see; differentiate the loss; compare what is trained with what was drawn."""
    findings = [*_blindness(setup, thresholds), *_gradient(setup), *end_findings(setup, thresholds)]
    findings += _foreign(setup, thresholds)
    trained = int(setup.mask.sum())
    total = sum(len(c.tokens) for c in setup.batch.completions)
    figures = {"trained_tokens": float(trained), "completion_tokens": float(total)}
    if "left out of turns" in setup.shared:
        figures["left_out_of_turns"] = float(setup.shared["left out of turns"])
    return Outcome("masks", tuple(findings), figures, tuple(_colored_masks(setup)))


def _colored_masks(setup: KeelSubject) -> list[str]:
    """The first completion of a few groups: trained tokens in green, what is read only dimmed."""
    lines = [f"masks: {TRAINED}trained{PLAIN} and {GIVEN}read only{PLAIN}"]
    for group in setup.groups[:2]:
        completion = group.completions[0]
        decode = setup.policy.tokenizer.decode
        text = f"{GIVEN}{decode(list(group.prompt_tokens[-60:]))!r}{PLAIN} "
        for action, run in groupby(zip(completion.tokens, completion.action, strict=True), key=itemgetter(1)):
            text += f"{TRAINED if action else GIVEN}{decode([token for token, _ in run])!r}{PLAIN}"
        lines.append(f"  {text}")
    return lines


def is_blind(setup: KeelSubject, thresholds: Thresholds) -> bool:
    """Whether the training pass cannot see a part of what it should."""
    return any(finding.code == "mask/attention" for finding in _blindness(setup, thresholds))


def _blindness(setup: KeelSubject, thresholds: Thresholds) -> list[Finding]:
    """Change tokens before the completion (and between its turns); what comes after must answer."""
    if "blindness" not in setup.of_batch:
        setup.of_batch["blindness"] = [*_prompt_unseen(setup, thresholds), *_tool_unseen(setup, thresholds)]
    findings: list[Finding] = setup.of_batch["blindness"]
    return findings


def _prompt_unseen(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """The last prompt token scores the completion's first one by itself, seen or not: the ones after it must answer.

    A model that does not mind some of its prompt is asked once more under noise.
    """
    groups = [group for group in setup.groups if len(group.prompt_tokens) > 1 and _longest(group) > 0]
    if not groups:
        return
    group = max(groups, key=lambda group: len(group.prompt_tokens))
    last = len(group.prompt_tokens) - 1
    answers = _answers(setup, group, [*_spread(range(last)), *([last] if _longest(group) > 1 else [])], thresholds)
    undecided = [position for position, answer in answers.items() if answer is None]
    if undecided:
        with setup.perturbed(STRONG_NOISE, seed=3):
            answers |= _answers(setup, group, undecided, thresholds)
    hidden = {position: answer for position, answer in answers.items() if answer is not None and answer < math.inf}
    if not hidden:
        return
    yield finding(
        "mask/attention",
        f"changing the prompt tokens at places {[*hidden]} of {len(group.prompt_tokens)} moves the completion's "
        f"log-probabilities by {max(hidden.values()):.1g} nats in training's pass, "
        "while the model's own forward answers",
        "the training pass cannot see the prompt: a loss mask serves as the attention mask",
        "let attention_mask be 1 on every real token (prompt, completion, tool output) and use action_mask in "
        "the loss alone",
    )


def _answers(
    setup: KeelSubject, group: Group, positions: Sequence[int], thresholds: Thresholds
) -> dict[int, float | None]:
    """`_blind_answer` of the prompt's tokens at these positions."""
    scored, before = _answering(setup, group, thresholds), setup.logp(setup.pack([group]))
    answers = {}
    for position in positions:
        last = position == len(group.prompt_tokens) - 1
        where = scored & _after_the_first(group).to(scored.device) if last else scored
        others = _with_others(setup, group.prompt_tokens, position)
        changed = [replace(group, prompt_tokens=tokens) for tokens in others]
        answers[position] = _blind_answer(setup, group, before, changed, where, thresholds)
    return answers


def _after_the_first(group: Group) -> Tensor:
    """`[B, T]`: the tokens of the completions but for each one's first."""
    lengths = torch.tensor([len(completion.tokens) for completion in group.completions])
    positions = torch.arange(_longest(group))
    return (positions > 0) & (positions < lengths[:, None])


def _answering(setup: KeelSubject, group: Group, thresholds: Thresholds) -> Tensor:
    """`[B, T]`: the tokens whose score in training's pass depends on the text at all; a constant sees nothing."""
    others = tuple(replace(c, tokens=tuple(_others(setup, token)[0] for token in c.tokens)) for c in group.completions)
    before, after = (setup.logp(setup.pack([g])) for g in (group, replace(group, completions=others)))
    return (before - after).abs() > thresholds["mask_seen"]  # false where either is no number


def _tool_unseen(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """The same for messages between two turns; a model that does not mind them is asked once more under noise."""
    answer = _answer_to_tools(setup, thresholds)
    if answer is None and setup.multi_turn:
        with setup.perturbed(STRONG_NOISE, seed=3):
            answer = _answer_to_tools(setup, thresholds)
    if answer is None or answer == math.inf:
        return
    yield finding(
        "mask/attention",
        f"changing a token of a tool's output moves the turns after it by {answer:.1g} nats in training's "
        "pass, while the model's own forward answers",
        "the training pass cannot see tool output: a loss mask serves as the attention mask",
        "let attention_mask be 1 on tool output too and use action_mask in the loss alone",
    )


def _answer_to_tools(setup: KeelSubject, thresholds: Thresholds) -> float | None:
    """`_blind_answer` of the first messages that decide it."""
    tried = 0
    for group in setup.groups:
        for index, completion in enumerate(group.completions):
            observed = [i for i, action in enumerate(completion.action) if not action]
            later = [i for i, action in enumerate(completion.action) if action and observed and i > observed[0] + 1]
            inner = [i for i in observed if later and i + 1 < later[-1] and not completion.action[i + 1]]
            if not inner or tried >= _MAX_POSITIONS:
                continue
            position, tried = inner[len(inner) // 2], tried + 1
            single = replace(group, completions=(completion,), rewards=group.rewards[index : index + 1])
            changed = [
                replace(single, completions=(replace(completion, tokens=tokens),))
                for tokens in _with_others(setup, completion.tokens, position)
            ]
            after = torch.zeros(1, len(completion.tokens), dtype=torch.bool, device=setup.mask.device)
            after[0, [i for i in later if i > position + 1]] = True
            after &= _answering(setup, single, thresholds)
            if not bool(after.any()):
                continue
            before = setup.logp(setup.pack([single]))
            answer = _blind_answer(setup, single, before, changed, after, thresholds)
            if answer is not None:
                return answer
    return None


def _blind_answer(
    setup: KeelSubject, group: Group, before: Tensor, changed: Sequence[Group], where: Tensor, thresholds: Thresholds
) -> float | None:
    """How far training's scores `before` move in `where` `[B, T]` with changes that they do not see.

    Infinite where they see them, None where the model's own forward does not answer either.
    Each answer is of two passes, so that noise counts as one. The model's own forward must answer by more than the
    rounding of a probability or its logarithm to bfloat16: what a coarse pass loses tells nothing of its mask.
    """
    unit = torch.finfo(torch.bfloat16).eps
    answers, moved = [], 0
    for other in changed:
        answers.append(largest((before - setup.logp(setup.pack([other])))[where]))
        if answers[-1] > thresholds["mask_seen"]:
            return math.inf
    expected = setup.forward_logp([group])
    for other in changed:
        moves = (expected - setup.forward_logp([other])).abs() > unit * expected.abs().clamp_min(1.0)
        moved += int((moves & where).sum())
    return max(answers) if moved >= _MOVED else None


def _spread(positions: Sequence[int]) -> list[int]:
    """A few of them, first and last included."""
    if len(positions) <= _MAX_POSITIONS:
        return list(positions)
    return sorted({positions[round(i * (len(positions) - 1) / (_MAX_POSITIONS - 1))] for i in range(_MAX_POSITIONS)})


def _with_others(setup: KeelSubject, tokens: Sequence[int], position: int) -> list[tuple[int, ...]]:
    """The tokens with others at one position."""
    return [(*tokens[:position], other, *tokens[position + 1 :]) for other in _others(setup, tokens[position])]


def _others(setup: KeelSubject, token: int) -> list[int]:
    """A few other ordinary tokens."""
    special = set(getattr(setup.policy.tokenizer, "all_special_ids", ()))
    size = setup.vocabulary
    ordinary = (t for t in ((token + step) % size for step in range(7, size + 7)) if t not in special and t != token)
    return list(islice(ordinary, 0, 5 * _CHANGES, 5))


def _longest(group: Group) -> int:
    return max(len(completion.tokens) for completion in group.completions)


def _gradient(setup: KeelSubject) -> Iterator[Finding]:
    """∂loss/∂logp of the configured objective, KL term included: zero wherever the token was not sampled."""
    mask = setup.mask
    signs = torch.tensor([1.0 if i % 2 == 0 else -1.0 for i in range(len(mask))], device=mask.device)
    outside = loss_gradient(setup, signs, beta=setup.full_beta, log_ratio=-0.1)[~mask]
    if not bool((outside != 0).any()):
        return
    yield finding(
        "mask/not-actions",
        f"∂loss/∂logp is not zero on {int((outside != 0).sum())} tokens that action_mask leaves out",
        f"loss.loss_type={setup.config.loss.loss_type} does not select by its mask",
        "multiply by the mask that the loss is given, or use a loss of Keel's own",
    )


def foreign(setup: KeelSubject, thresholds: Thresholds) -> Tensor:
    """`[N]` over the batch's action tokens: those that the policy did not draw (see `draws`)."""
    if "foreign" not in setup.of_batch:
        drawn = batch_draws(setup)
        logp = drawn.logp(unfiltered(setup.sampling))
        rounding = "scoring_gap_half" if in_half_precision(setup) else "scoring_gap"
        silent = (drawn.sample_logp == 0) & (logp < -thresholds["mask_silent"])
        silent &= not are_rounded_away(drawn.sample_logp, logp, thresholds[rounding])
        # an engine that reports zeros everywhere gives no log-probabilities at all: that is another fault
        silent &= ~(drawn.sample_logp == 0).float().mean().gt(thresholds["foreign_silent_most"])
        silent &= not _are_draws(drawn, silent, setup.sampling)
        runs = improbable_runs(drawn, setup.sampling, thresholds["foreign_chance"])
        if bool(runs.any()) and _shaped(setup, drawn, thresholds):
            runs = torch.zeros_like(runs)
        claimed, others = ((drawn.sample_logp - logp)[part & (drawn.sample_logp < 0)] for part in (runs, ~runs))
        another = runs.float().mean() > thresholds["foreign_most"] or average(others) > thresholds["foreign_gap"]
        # what a sampler says it drew, each token with a chance of its own, is another policy's
        another = another or (len(claimed.unique()) > 1 and average(claimed) > thresholds["foreign_gap"])
        another = another or setup.shared.get("other prompt", False)
        setup.of_batch["foreign"] = silent if another else silent | runs  # the sampler as a whole is another policy
    marked: Tensor = setup.of_batch["foreign"]
    return marked


def _shaped(setup: KeelSubject, drawn: Draws, thresholds: Thresholds) -> bool:
    """Whether another way to draw explains all tokens, as blocked n-grams or a least length do."""
    plain = unfiltered(setup.sampling)
    likely, odds = alternatives(drawn, plain, setup.policy.eos_ids)
    if odds <= -math.log(thresholds["foreign_chance"]):
        return False
    way = applied(drawn, fitted(drawn, likely[0], plain), plain)
    return chance_of(way, plain) > thresholds["sampler_explained"]


def _are_draws(drawn: Draws, silent: Tensor, sampling: SamplingParams) -> bool:
    """Whether tokens that are reported with 0 are the policy's all the same.

    They stand at one and the same place of all completions, and are as likely as draws: a policy that is not sure of
    them would seldom have drawn given text, and what a tool says is longer than a token.
    """
    assert drawn.position is not None
    places = drawn.position[silent].unique()
    if len(places) != 1 or not bool((drawn.sample_logp[drawn.position == places[0]] == 0).all()):
        return False
    there = drawn.where(drawn.position == places[0])
    return len(there) >= _ENOUGH and uniform_p_value(tail_masses(there, sampling)) > _USUAL


def are_rounded_away(sample_logp: Tensor, logp: Tensor, rounding: float) -> bool:
    """Whether zeros were reported `[N]` of likely tokens alone, of all down to some log-probability.

    Coarse numbers do that; text that nobody sampled has likely and unlikely tokens.
    """
    zeros, others = logp[sample_logp == 0], logp[sample_logp < 0]
    return bool(len(zeros) and len(others) and zeros.min() >= others.max() - rounding)


def _foreign(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Tokens marked as sampled that no sampling from the policy explains."""
    marked = foreign(setup, thresholds)
    if int(marked.sum()) < 2:
        return
    drawn = batch_draws(setup)
    silent = int((drawn.sample_logp[marked] == 0).sum())
    text = setup.policy.tokenizer.decode(drawn.tokens[marked][:24].tolist())
    how = f", {silent} of them reported with a log-probability of exactly 0" if silent else ""
    yield finding(
        "mask/not-actions",
        f"{int(marked.sum())} of {len(drawn)} trained tokens were not drawn from the policy{how}: {text!r}",
        "tool output or other given text is marked as the policy's own and would be trained",
        "set Completion.action to False on every token that the engine did not sample",
    )
