"""Which tokens are trained, which tokens the training pass attends to, and how the engine's turns end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter

import torch
from torch import Tensor

from keel.base.types import Completion, Group
from keel.doctor.draws import (
    Draws,
    batch_draws,
    chance_of,
    draws,
    improbable_runs,
    nll_p_value,
    tail_masses,
    unfiltered,
    uniform_p_value,
)
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import average, largest
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.alternatives import alternatives, applied
from keel.doctor.probes.objective import loss_gradient
from keel.doctor.subject import STRONG_NOISE
from keel.models.pack import right_pad

TRAINED, GIVEN, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"  # green, dim
_MAX_PLACES = 6
_CHANGES = 3  # other tokens that are tried at a position
_MOVED = 2  # changes in the model's own forward; a single one may be due to rounding


def probe_masks(setup: KeelSubject) -> Outcome:
    """Perturb context tokens, differentiate the loss, and compare the trained tokens with the drawn ones."""
    findings = [*_blindness(setup), *_gradient(setup), *end_findings(setup)]
    findings += _foreign(setup)
    trained = int(setup.mask.sum())
    total = sum(len(c.tokens) for c in setup.batch.completions)
    figures = {"trained_tokens": float(trained), "completion_tokens": float(total)}
    if "left out of turns" in setup.shared:
        figures["left_out_of_turns"] = float(setup.shared["left out of turns"])
    return Outcome("masks", tuple(findings), figures, tuple(_colored_masks(setup)))


def _colored_masks(setup: KeelSubject) -> list[str]:
    """The first completion of a few groups: trained tokens in green, context dimmed."""
    lines = [f"masks: {TRAINED}trained{PLAIN} and {GIVEN}context{PLAIN}"]
    for group in setup.groups[:2]:
        completion = group.completions[0]
        decode = setup.policy.tokenizer.decode
        text = f"{GIVEN}{decode(list(group.prompt_tokens[-60:]))!r}{PLAIN} "
        for action, run in groupby(zip(completion.tokens, completion.action, strict=True), key=itemgetter(1)):
            text += f"{TRAINED if action else GIVEN}{decode([token for token, _ in run])!r}{PLAIN}"
        lines.append(f"  {text}")
    return lines


def _blindness(setup: KeelSubject) -> list[Finding]:
    """Change context tokens. Later log-probabilities must change in training's pass, too.

    Tokens that have no effect on the model are tested once more with perturbed weights.
    """
    if "blindness" not in setup.of_batch:
        asked: dict[str, Iterable[tuple[Group, int]]]
        asked = {"the prompt": _prompt_places(setup), "tool output": _tool_places(setup)}
        setup.of_batch["blindness"] = [f for what, at in asked.items() for f in _unseen(setup, what, at)]
    findings: list[Finding] = setup.of_batch["blindness"]
    return findings


def _prompt_places(setup: KeelSubject) -> list[tuple[Group, int]]:
    """A few positions of the longest prompt, including the first and the last."""
    group = max(setup.groups, key=lambda group: len(group.prompt_tokens))
    last = len(group.prompt_tokens) - 1
    return [(group, place) for place in sorted({round(i * last / (_MAX_PLACES - 1)) for i in range(_MAX_PLACES)})]


def _tool_places(setup: KeelSubject) -> Iterator[tuple[Group, int]]:
    """Positions in the middle of the text between two turns, one per completion."""
    for group in setup.groups if setup.multi_turn else ():
        for completion in group.completions:
            end = len(completion.action) - 1 - completion.action[::-1].index(True) if any(completion.action) else 0
            given = [i for i in range(end - 1) if not (completion.action[i] or completion.action[i + 1])]
            if given:
                yield (
                    replace(group, completions=(completion,), rewards=()),
                    len(group.prompt_tokens) + given[len(given) // 2],
                )


def _unseen(setup: KeelSubject, what: str, asked: Iterable[tuple[Group, int]]) -> Iterator[Finding]:
    places = list(islice(asked, _MAX_PLACES))
    answers = {i: _answer(setup, *place) for i, place in enumerate(places)}
    if undecided := [i for i, answer in answers.items() if answer is None]:
        with setup.perturbed(STRONG_NOISE, seed=3):
            answers |= {i: _answer(setup, *places[i]) for i in undecided}
    hidden = {places[i][1]: answer for i, answer in answers.items() if answer is not None and answer < math.inf}
    if hidden:
        yield finding(
            "mask/attention",
            f"changing tokens of {what} at positions {[*hidden]} changes later log-probabilities by at most "
            f"{max(hidden.values()):.1g} nats in training's pass, while those of the model's own forward change",
            f"the training pass does not attend to {what}: the loss mask is used as the attention mask",
            "set attention_mask to 1 on every real token (prompt, completion, tool output), and use action_mask only "
            "in the loss",
        )


def _answer(setup: KeelSubject, group: Group, place: int) -> float | None:
    """The largest change of training's scores if they ignore a change of this token.

    Infinity if the scores depend on it; None if the model's own forward does not depend on it either. Only scores after
    the next token count, because a token is the next one's direct input in any case. The model's own forward must
    change by more than bfloat16 rounds a probability or its logarithm, since low-precision passes hide smaller changes.
    """
    prompt, (first, *_) = group.prompt_tokens, group.completions
    inside, unit = place - len(prompt), torch.finfo(torch.bfloat16).eps
    if inside < 0:
        changed = [
            replace(group, prompt_tokens=(*prompt[:place], other, *prompt[place + 1 :]))
            for other in _others(setup, prompt[place])
        ]
    else:
        changed = [
            replace(
                group,
                completions=(replace(first, tokens=(*first.tokens[:inside], other, *first.tokens[inside + 1 :])),),
            )
            for other in _others(setup, first.tokens[inside])
        ]
    before, answers, moved = setup.logp(setup.pack([group])), [0.0], 0
    rows = [[a and i > inside + 1 for i, a in enumerate(c.action)] for c in group.completions]
    where = right_pad(rows, False).bool().to(before.device)
    rewritten = tuple(
        replace(c, tokens=tuple(_others(setup, token)[0] for token in c.tokens)) for c in group.completions
    )
    constant = (before - setup.logp(setup.pack([replace(group, completions=rewritten)]))).abs()
    where &= (
        constant > setup.thresholds["mask_seen"]
    )  # scores that do not depend on any token are excluded, and so is NaN
    for other in changed:
        answers.append(largest((before - setup.logp(setup.pack([other])))[where]))
        if answers[-1] > setup.thresholds["mask_seen"]:
            return math.inf
    expected = setup.forward_logp([group])
    for other in changed:
        moves = (expected - setup.forward_logp([other])).abs() > unit * expected.abs().clamp_min(1.0)
        moved += int((moves & where).sum())
    return max(answers) if moved >= _MOVED else None


def _others(setup: KeelSubject, token: int) -> list[int]:
    """A few other ordinary tokens."""
    special = set(getattr(setup.policy.tokenizer, "all_special_ids", ()))
    size = setup.vocabulary
    ordinary = (t for t in ((token + step) % size for step in range(7, size + 7)) if t not in special and t != token)
    return list(islice(ordinary, 0, 5 * _CHANGES, 5))


def _gradient(setup: KeelSubject) -> Iterator[Finding]:
    """∂loss/∂logp of the configured objective including the KL term. It must be 0 at tokens that were not sampled."""
    mask = setup.mask
    signs = torch.tensor([1.0 if i % 2 == 0 else -1.0 for i in range(len(mask))], device=mask.device)
    outside = loss_gradient(setup, signs, beta=setup.full_beta, log_ratio=-0.1)[~mask]
    if not bool((outside != 0).any()):
        return
    yield finding(
        "mask/not-actions",
        f"∂loss/∂logp is not zero on {int((outside != 0).sum())} tokens that action_mask excludes",
        f"loss.loss_type={setup.config.loss.loss_type} does not apply its mask",
        "multiply by the mask that is passed to the loss, or use one of Keel's losses",
    )


def foreign(setup: KeelSubject) -> Tensor:
    """`[N]` bool over the batch's action tokens: those that the policy did not draw (see `draws`)."""
    if "foreign" not in setup.of_batch:
        drawn = batch_draws(setup)
        logp = drawn.logp(unfiltered(setup.sampling))
        zeros = drawn.sample_logp == 0
        silent = zeros & (logp < -setup.thresholds["mask_silent"])
        # zeros at all tokens mean that the engine reports no log-probabilities, which is another finding
        silent &= ~zeros.float().mean().gt(setup.thresholds["foreign_silent_most"])
        # rounded values and tokens of greedy sampling may be 0 as well; they are consistent with the policy
        silent &= nll_p_value(drawn.where(zeros), setup.sampling) < setup.thresholds["foreign_chance"]
        runs = improbable_runs(drawn, setup.sampling, setup.thresholds["foreign_chance"])
        if bool(runs.any()) and _shaped(setup, drawn):
            runs = torch.zeros_like(runs)
        claimed, others = ((drawn.sample_logp - logp)[part & (drawn.sample_logp < 0)] for part in (runs, ~runs))
        another = (
            runs.float().mean() > setup.thresholds["foreign_most"] or average(others) > setup.thresholds["foreign_gap"]
        )
        # varied reported log-probabilities mean that another policy sampled these tokens
        another = another or (len(claimed.unique()) > 1 and average(claimed) > setup.thresholds["foreign_gap"])
        another = another or setup.shared.get("other prompt", False)
        setup.of_batch["foreign"] = silent if another else silent | runs  # with `another`, the whole sampler differs
    marked: Tensor = setup.of_batch["foreign"]
    return marked


def _shaped(setup: KeelSubject, drawn: Draws) -> bool:
    """Whether an alternative distribution explains all tokens, such as blocked n-grams or a minimum length."""
    plain = unfiltered(setup.sampling)
    likely, odds = alternatives(drawn, plain, setup.policy.eos_ids)
    if odds <= -math.log(setup.thresholds["foreign_chance"]):
        return False
    way = applied(drawn, likely[0], plain)
    return chance_of(way, plain) > setup.thresholds["sampler_explained"]


def _foreign(setup: KeelSubject) -> Iterator[Finding]:
    """Tokens marked as sampled that the policy did not draw."""
    marked = foreign(setup)
    if int(marked.sum()) < 2:
        return
    drawn = batch_draws(setup)
    silent = int((drawn.sample_logp[marked] == 0).sum())
    text = setup.policy.tokenizer.decode(drawn.tokens[marked][:24].tolist())
    how = f", {silent} of them reported with a log-probability of exactly 0" if silent else ""
    yield finding(
        "mask/not-actions",
        f"{int(marked.sum())} of {len(drawn)} trained tokens were not drawn from the policy{how}: {text!r}",
        "tool output or other given text is marked as sampled by the policy and would be trained",
        "set Completion.action to False on every token that the engine did not sample",
    )


# ------------------------------------------------------------------------ turns of the engine


def end_findings(setup: KeelSubject) -> list[Finding]:
    """One answer of the engine must be one turn. Replies of the environment come between turns, never inside.

    An engine that runs tools itself has text in its turns that is not an action and that the policy would not write.
    """
    groups = _turns(setup)
    findings = [*_ends(setup, groups)] or [*_left_out(setup, groups)]
    setup.shared["chosen actions"] = bool(findings)
    setup.shared["left out of turns"] = sum(not a for g in groups for turn in g.completions for a in turn.action)
    return findings


def _turns(setup: KeelSubject) -> Sequence[Group]:
    """The batch's turns as the engine returned them, each after its context."""
    if setup.config.rollout.max_turns == 1:
        return setup.sampled
    problems = {group.problem.key: group.problem for group in setup.groups}
    chosen = [turn for turn in setup.turns if turn.request.key in problems]
    return [Group(problems[t.request.key], t.request.tokens, (t.completion,)) for t in chosen]


def _ends(setup: KeelSubject, groups: Sequence[Group]) -> Iterator[Finding]:
    ends = set(setup.policy.eos_ids)
    turns = [turn for group in groups for turn in group.completions if turn.tokens]
    ended = [turn for turn in turns if turn.stop_reason == "eos"]
    past = [] if setup.sampling.ignore_eos else [turn for turn in turns if ends & set(turn.tokens[:-1])]
    bare = [turn for turn in ended if turn.tokens[-1] not in ends and turn not in past]
    untrained = [turn for turn in ended if turn.tokens[-1] in ends and not turn.action[-1]]
    if past:
        tail = sum(_after_the_end(turn, ends) for turn in past)
        yield finding(
            "mask/end",
            f"{len(past)} of {len(turns)} completions continue after an end token; {tail} of the tokens after it are "
            "trained",
            "the engine does not stop at the model's end token, or pads with it, so tokens after the end of the "
            "answer are trained",
            "cut completions after their first end token (Completion.tokens ends with that token)",
        )
    elif bare:
        yield finding(
            "mask/end",
            f"{len(bare)} of {len(ended)} completions with stop_reason eos do not end with an end token "
            f"({', '.join(map(str, sorted(ends)))})",
            "the engine strips the end token, so the policy is never trained to stop and completions become longer",
            "keep the end token in Completion.tokens, with its log-probability and action True",
        )
    elif untrained:
        yield finding(
            "mask/end",
            f"the end token of {len(untrained)} of {len(ended)} completions is not an action",
            "the end token is left out of the loss, so the policy is never trained to stop and completions become "
            "longer",
            "set Completion.action to True on the end token: the policy has sampled it",
        )


def _after_the_end(turn: Completion, ends: set[int]) -> int:
    first = next(i for i, token in enumerate(turn.tokens) if token in ends)
    return sum(turn.action[first + 1 :])


def _left_out(setup: KeelSubject, groups: Sequence[Group]) -> Iterator[Finding]:
    """Tokens of a turn that are not marked as actions although the policy is likely to have drawn them."""
    missing = sum(not action for group in groups for turn in group.completions for action in turn.action)
    if not missing:
        return
    total = sum(len(turn.tokens) for group in groups for turn in group.completions)
    turned = [
        replace(group, completions=tuple(_reversed(turn) for turn in group.completions), rewards=()) for group in groups
    ]
    chance = uniform_p_value(tail_masses(draws(setup, turned), setup.sampling))
    if chance < setup.thresholds["sampler_explained"]:
        return
    yield finding(
        "mask/not-actions",
        f"{missing} of {total} tokens of the engine's turns are not actions, although they fit the policy's "
        f"distribution (p-value {chance:.2g}) and are no replies of the environment",
        "the engine does not mark these sampled tokens as actions, so they are not trained",
        "set Completion.action to True on every token that the engine sampled",
    )


def _reversed(turn: Completion) -> Completion:
    """The turn with the action mask inverted."""
    return replace(turn, action=tuple(not action for action in turn.action))
