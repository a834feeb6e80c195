"""Gold answers that mean nothing to the policy: random weights, a format it does not know, answers of another kind.

`figures` are the collection's: `gold_share` and `entropy_share` of blind guessing, and the `parse_rate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

import torch

from keel.base.types import Completion, Group
from keel.doctor.evidence import between, chance_above, level, more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.episodes import unfinished
from keel.doctor.probes.gold_likelihood import gold_or_none
from keel.doctor.probes.stops import parsed_without_stop
from keel.doctor.thresholds import Thresholds

USUAL = 0.7  # temperature
LOOP = 3  # tokens that are the one before them
LARGE = 64  # tokens of a vocabulary: of a handful most may be answers
MEANT = 0.2  # geometric mean of the probabilities of tokens


def random_findings(figures: Mapping[str, float], vocabulary: int, thresholds: Thresholds) -> Iterator[Finding]:
    """Random weights are no better than blind guessing on the gold answers, and write nothing that can be read.

    A trained model of high entropy still finds a gold answer far likelier than guessing does.
    """

    def blind(name: str) -> bool:  # no number is none
        return figures["gold_share"] > thresholds[name] and figures["entropy_share"] > thresholds[name]

    unread = figures["parse_rate"] < thresholds["parse_rate_misfit"] and vocabulary >= LARGE
    random = blind("entropy_uniform_share")
    if not random and not (unread and blind("entropy_damaged_share")):
        return
    yield finding(
        "output/random-weights",
        f"entropy is {100 * figures['entropy_share']:.0f} % of ln({vocabulary}), and gold answers have "
        f"{figures['gold_share']:.2f} times the surprise of blind guessing; {100 * figures['parse_rate']:.0f} % of "
        "the completions parse",
        "the weights are random or were not loaded: the model writes noise"
        if random
        else "the weights are damaged (merged, quantized or converted badly), or were hardly trained",
        "load a trained checkpoint in model.name, or give the run a warmstart",
        severity=None if random else "warning",
    )


def looping_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Completions that say one token over and over up to the limit, of a model that means it, and no gold answer does.

    Drawn coldly or by a filter a sound model may be caught in a loop; else it gets out again.
    """
    ends = set(setup.policy.eos_ids)
    golds = [turn for group in setup.groups for turn in gold_or_none(setup.run.task, group.problem) or ()]
    encode = setup.policy.tokenizer.encode
    if setup.sampling.temperature < USUAL or setup.sampling.filtered or not golds:
        return
    if any(loops(encode(gold, add_special_tokens=False)) for gold in golds):
        return

    def caught(completion: Completion) -> bool:  # what an engine drew beyond an end is none of the model's doing
        own = [token for token, action in zip(completion.tokens, completion.action, strict=True) if action]
        return completion.stop_reason == "length" and loops(own) and ends.isdisjoint(own)

    def looping(groups: Sequence[Group]) -> list[float]:
        return [fmean(map(caught, group.completions)) for group in groups]

    def by_chance(groups: Sequence[Group]) -> bool:
        return chance_above(looping(groups), thresholds["healthy_truncated"]) > level(thresholds)

    def doubtful(groups: Sequence[Group]) -> bool:
        return fmean(looping(groups)) > thresholds["truncated_completions"] and by_chance(groups)

    groups = more_groups(setup, "output/truncated", doubtful)
    if fmean(looping(groups)) <= thresholds["truncated_completions"] or by_chance(groups) or not _meant(setup, caught):
        return
    shown = next(c.text for group in groups for c in group.completions if caught(c))
    yield finding(
        "output/random-weights",
        f"{between(looping(groups))} of the completions of {len(groups)} problems say one token over and over up to "
        f"the limit, such as {shown[-40:]!r}, and are likely by the model's own probabilities",
        "the weights are damaged (pruned, quantized, merged, converted badly, scaled otherwise), or the model was "
        "hardly trained: it is caught in loops",
        "load the checkpoint as it was published, in 16 or 32 bits, and compare what it writes there",
    )


def loops(tokens: Sequence[int]) -> bool:
    """Whether over half of the tokens, and some at least, are the one before them."""
    again = sum(token == before for before, token in pairwise(tokens))
    return again >= LOOP and 2 * again >= len(tokens)


def _meant(setup: KeelSubject, caught: Callable[[Completion], bool]) -> bool:
    """Whether the model finds the tokens of its loops likely, so that no engine has made them."""
    values = list[float]()
    completions = setup.batch.completions
    for i, logits in setup.each_logits():
        if caught(completions[i]):
            tokens = torch.tensor(completions[i].tokens, device=logits.device)[:, None]
            values.append(float(logits.log_softmax(-1).gather(-1, tokens).mean()))
    return bool(values) and fmean(values) > math.log(MEANT)


def misfit_findings(setup: KeelSubject, figures: Mapping[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """A model that is sure of what it writes, cannot be read, and finds gold answers no likelier than guessing does.

    Episodes that were on their way to an answer say nothing of its form, nor do turns that a stop text cuts; and who
    calls a tool in the way that the prompt asks for knows the prompt.
    """
    limit = thresholds["entropy_uniform_share"]
    shares = [fmean(ended) for group in setup.groups if (ended := unfinished(setup, group))]
    if fmean(shares or [0.0]) > thresholds["truncated_completions"]:
        return
    called = fmean(float(c.counts.get("tool/calls", 0.0) > 0) for group in setup.groups for c in group.completions)
    if called > thresholds["truncated_completions"]:
        return
    if "another template" in setup.shared or parsed_without_stop(setup, thresholds) is not None:
        return  # which has its finding
    if figures["entropy_share"] > limit or not figures["gold_share"] > limit:
        return
    if figures["parse_rate"] >= thresholds["parse_rate_misfit"]:
        return  # it answers in the right form, only wrongly
    yield finding(
        "prompt/format",
        f"gold answers have {figures['gold_share']:.2f} times the surprise of blind guessing and "
        f"{100 * figures['parse_rate']:.0f} % of the completions parse, although the model is sure of what it "
        f"writes (entropy {100 * figures['entropy_share']:.0f} % of uniform)",
        "the prompt's format or the tokenizer does not fit the model: spaces at its end, a chat template too many "
        "or too few, token ids of another vocabulary",
        "render the prompts as the model was trained on them (data.chat_template, data.system_prompt, the task's "
        "prompt), and load the tokenizer that belongs to model.name",
    )


def foreign_findings(
    setup: KeelSubject, figures: Mapping[str, float], paid: Sequence[float], thresholds: Thresholds
) -> Iterator[Finding]:
    """A model that is sure and writes what can be read, and to which gold answers are no answers at all.

    `paid` is what gold answers earn. Where a model only lacks the skill, right answers are still likelier than tokens
    that are drawn blindly; where only its form is another one, some of its completions earn. Answers that a task
    computes are no other column's: they may be out of reach, which the groups show.
    """
    if setup.config.data.path is None:
        return
    limit = thresholds["entropy_uniform_share"]
    if setup.failures or setup.run.task.multi_turn or "another template" in setup.shared or not paid:
        return
    if figures["entropy_share"] > limit or not figures["gold_share"] > limit:
        return
    best = max(reward.total for group in setup.groups for reward in group.rewards)
    if figures["parse_rate"] < thresholds["parse_rate_misfit"] or not best < min(paid) / 2:
        return  # see `misfit_findings`
    examples = ", ".join(repr(str(group.problem.answer)[:20]) for group in setup.groups[:3])
    yield finding(
        "data/misaligned",
        f"gold answers ({examples}, …) have {figures['gold_share']:.2f} times the surprise of blind guessing, although "
        f"the model is sure of what it writes (entropy {100 * figures['entropy_share']:.0f} % of uniform) and "
        f"{100 * figures['parse_rate']:.0f} % of it can be read; the best completion earns {best:.3g}, and a gold "
        f"answer {min(paid):.3g}",
        "what is read as the answers is something else, such as another column of the data, or the model was taught "
        "another task",
        "read some rows, question beside answer; check data.columns",
    )
