"""Gold answers that mean nothing to the policy: random weights, a format it does not know, answers of another kind.

`figures` are the collection's: `gold_share` and `entropy_share` of blind guessing, and the `parse_rate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from keel.base.thresholds import Thresholds
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.episodes import unfinished
from keel.lab.doctor.probes.stops import parsed_without_stop
from keel.lab.doctor.setup import ProbeSetup


def random_findings(figures: Mapping[str, float], vocabulary: int, thresholds: Thresholds) -> Iterator[Finding]:
    """Random weights are no better than blind guessing on the gold answers, and write nothing that can be read.

    A trained model of high entropy still finds a gold answer far likelier than guessing does.
    """
    limit = thresholds["entropy_uniform_share"]
    if not (figures["gold_share"] > limit and figures["entropy_share"] > limit):
        return
    yield finding(
        "output/random-weights",
        f"entropy is {100 * figures['entropy_share']:.0f} % of ln({vocabulary}), and gold answers have "
        f"{figures['gold_share']:.2f} times the surprise of blind guessing; {100 * figures['parse_rate']:.0f} % of "
        "the completions parse",
        "the weights are random or were not loaded: the model writes noise",
        "load a trained checkpoint in model.name, or give the run a warmstart",
    )


def misfit_findings(setup: ProbeSetup, figures: Mapping[str, float], thresholds: Thresholds) -> Iterator[Finding]:
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
    setup: ProbeSetup, figures: Mapping[str, float], paid: Sequence[float], thresholds: Thresholds
) -> Iterator[Finding]:
    """A model that is sure and writes what can be read, and to which gold answers are no answers at all.

    `paid` is what gold answers earn. Where a model only lacks the skill, right answers are still likelier than tokens
    that are drawn blindly; where only its form is another one, some of its completions earn. Answers that a task
    computes are no other column's: they may be out of reach, which the groups show.
    """
    if setup.config.data.path is None:
        return
    limit = thresholds["entropy_uniform_share"]
    if setup.failures or setup.run.task.several_turns or "another template" in setup.shared or not paid:
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
