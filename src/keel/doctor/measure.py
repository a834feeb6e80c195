"""Measures, and the function that runs them on a subject in order of their dependencies."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keel.base.errors import KeelError, first_line
from keel.base.yaml_text import parse
from keel.doctor.findings import Finding, finding, overrides
from keel.doctor.subject import Power, Subject
from keel.doctor.verdict import Outcome, failed_measure
from keel.envs.calls import TooManyHungCalls
from keel.reference.weights import NoSingleModel
from keel.rollout.engine import ModelMismatch, StaleWeights

OnOutcome = Callable[[Outcome, float], None]


@dataclass(frozen=True)
class Measure:
    """One measure: its function, the codes that it may find, and the powers that it needs.

    `after` names measures that must pass first. `passes`: it makes many forward passes and therefore gets the smaller
    batch of a large model. `skill`: it depends on what the policy has learned. `quick`: it also runs under --quick.
    """

    name: str
    run: Callable[[Any], Outcome]
    about: str
    codes: tuple[str, ...] = ()
    needs: tuple[Power, ...] = ()
    after: tuple[str, ...] = ()
    passes: bool = False
    skill: bool = False
    quick: bool = True

    def missing(self, subject: Subject, outcomes: Mapping[str, Outcome]) -> str:
        """Why the measure cannot run; empty if it can."""
        lacking = next((why for power in self.needs if (why := subject.lacks(power))), "")
        unsound = [name for name in self.after if name in outcomes and not outcomes[name].sound]
        return lacking or (f"it tells nothing while {unsound[0]} is not sound" if unsound else "")


def examine(
    measures: Sequence[Measure],
    subject: Subject,
    small: Subject | None = None,
    on_outcome: OnOutcome | None = None,
    *,
    quick: bool = False,
) -> list[Outcome]:
    """The outcomes of all measures in order. `small` is the subject with a smaller batch for measures with many passes.

    A measure that raises is reported as failed, and the others still run.
    """
    outcomes: dict[str, Outcome] = {}
    for measure in measures:
        if quick and not measure.quick:
            continue
        began = time.monotonic()
        given = small if small is not None and measure.passes else subject
        why = measure.missing(given, outcomes)
        outcome = (
            Outcome(measure.name, unchecked=(f"{', '.join(measure.codes)}: {why}",)) if why else _made(measure, given)
        )
        outcome = replace(
            outcome,
            findings=tuple(_spelled(finding, subject) for finding in outcome.findings),
            undecided=(*outcome.undecided, *subject.budget.take_undecided()),
        )
        outcomes[measure.name] = outcome
        subject.found.update(finding.code for finding in outcome.findings if finding.severity == "error")
        if on_outcome is not None:
            on_outcome(outcome, time.monotonic() - began)
    return list(outcomes.values())


def _made(measure: Measure, subject: Subject) -> Outcome:
    try:
        return measure.run(subject)
    except (ModelMismatch, StaleWeights) as refusal:
        return refused(measure.name, refusal)
    except NoSingleModel as why:
        return Outcome(measure.name, unchecked=(f"{measure.name}: {why}",))
    except TooManyHungCalls as hung:
        return _hung(measure.name, hung)
    except Exception as error:  # user code may raise anything
        return failed_measure(measure.name, error)


_OPTION = re.compile(r"\b(?:kl|loss|model|optim|reference|reward|rollout|run)(?:\.[a-z_]+)+(?:=(\S*[^\s.,;:)]))?")


def _spelled(found: Finding, subject: Subject) -> Finding:
    """The finding with Keel's options renamed to those of the subject's trainer."""

    def other(match: re.Match[str]) -> str:
        name, _, value = match.group().partition("=")
        names = subject.spelled({name: None})
        if name in names or not value:
            return match.group() if name in names else ", ".join(names)
        return " ".join(overrides(subject.spelled({name: parse(value, name)})))

    def worded(text: str) -> str:
        return _OPTION.sub(other, text)

    options = tuple(tuple(map(worded, proposal)) for proposal in found.options)
    return replace(
        found, evidence=worded(found.evidence), cause=worded(found.cause), advice=worded(found.advice), options=options
    )


def refused(name: str, refusal: KeelError) -> Outcome:
    """The outcome for an engine that refuses: a finding, and `name` as unchecked."""
    if isinstance(refusal, ModelMismatch):
        code, cause = "sampler/other-model", "the sampler was started on another model than the one that is trained"
        advice = "start the sampler on model.name of this configuration, or correct rollout.vllm.url"
    else:
        code, cause = "sampler/stale", "the sampler keeps weights of its own that a sync does not bring up to date"
        advice = "start the sampler anew, of this version of Keel; a backend of your own must load all that it is sent"
    return Outcome(name, (finding(code, str(refusal), cause, advice),), unchecked=(f"{name}: the sampler was refused",))


def _hung(name: str, hung: TooManyHungCalls) -> Outcome:
    """The outcome for rewards that do not return: a finding about the rewards."""
    failed = finding(
        "reward/failed",
        f"while the probe of {name} asked for more rewards: {first_line(hung)}",
        "a reward does not return in the time that it is given, or never",
        "raise reward.timeout_s if the reward is slow, or fix it",
    )
    return Outcome(name, (failed,), unchecked=(f"{name}: rewards did not return",))
