"""Measures, their results, and the function that runs them on a subject, in the given order."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from keel.base.errors import KeelError, first_line
from keel.base.yaml_text import parse
from keel.doctor.findings import Finding, finding, overrides
from keel.doctor.subject import Power, Subject
from keel.envs.calls import TooManyHungCalls
from keel.reference.weights import NoSingleModel
from keel.rollout.engine import ModelMismatch, StaleWeights
from keel.trainer.memory import is_out_of_memory


@dataclass(frozen=True)
class Verdict:
    """One decision: the codes that it is about, and the measured figures."""

    state: Literal["found", "sound", "undecided", "unchecked"]
    codes: tuple[str, ...]
    reason: str
    finding: Finding | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def found(cls, finding: Finding, **figures: float) -> Verdict:
        return cls("found", (finding.code,), finding.evidence, finding, figures)

    @classmethod
    def sound(cls, reason: str, **figures: float) -> Verdict:
        return cls("sound", (), reason, None, figures)

    @classmethod
    def undecided(cls, code: str, reason: str, **figures: float) -> Verdict:
        return cls("undecided", (code,), reason, None, figures)

    @classmethod
    def unchecked(cls, codes: Iterable[str], reason: str) -> Verdict:
        return cls("unchecked", tuple(codes), reason)

    @property
    def line(self) -> str:
        """`code, code: why`, the format of unchecked lines."""
        return f"{', '.join(self.codes)}: {self.reason}"


@dataclass(frozen=True)
class Outcome:
    """The findings of a measure, its figures, lines to print, and the codes that could not be tested.

    `undecided` are tests whose sample was too small for a decision.
    """

    name: str
    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, verdicts: Iterable[Verdict], lines: tuple[str, ...] = ()) -> Outcome:
        """Combine the verdicts of one measure."""
        given = tuple(verdicts)
        figures = {key: value for verdict in given for key, value in verdict.figures.items()}
        unchecked, undecided = (
            tuple(verdict.line for verdict in given if verdict.state == state) for state in ("unchecked", "undecided")
        )
        findings = tuple(verdict.finding for verdict in given if verdict.finding is not None)
        return cls(name, findings, figures, lines, unchecked, undecided)

    @property
    def sound(self) -> bool:
        """Whether something was tested and nothing worse than a note was found."""
        tried = not self.undecided and (bool(self.figures) or not self.unchecked)
        return tried and all(finding.severity == "note" for finding in self.findings)


def failed_measure(name: str, error: Exception) -> Outcome:
    """The outcome of a measure that raised: a finding, or an unchecked line if memory was short."""
    if is_out_of_memory(error):
        return Outcome(name, unchecked=(no_memory_for(name, error),))
    reason = _reason(error)
    failure = finding(
        "doctor/probe-failed",
        f"the probe {name!r} raised {reason}",
        "a part of the run that the probe uses raised an error; training would probably raise the same error",
        "fix this part and run the doctor again; the checks of this probe are incomplete",
    )
    return Outcome(name, (failure,), unchecked=(f"{name}: {reason}",))


def no_memory_for(what: str, error: Exception) -> str:
    return f"{what}: too little memory for this test beside the run ({_reason(error)})"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


# ------------------------------------------------------------------------ measures

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
        return lacking or (f"not tested until {unsound[0]!r} is sound" if unsound else "")


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
        code, cause = "sampler/other-model", "the sampler was started with another model than the trained one"
        advice = "start the sampler with model.name of this configuration, or correct rollout.vllm.url"
    else:
        code, cause = "sampler/stale", "a sync does not update the sampler's own copy of the weights"
        advice = (
            "restart the sampler with this version of Keel; your own backend must load every weight that it receives"
        )
    return Outcome(
        name, (finding(code, str(refusal), cause, advice),), unchecked=(f"{name}: the sampler was rejected",)
    )


def _hung(name: str, hung: TooManyHungCalls) -> Outcome:
    """The outcome for rewards that do not return: a finding about the rewards."""
    failed = finding(
        "reward/failed",
        f"while the probe {name!r} computed further rewards: {first_line(hung)}",
        "a reward function does not return within its time limit",
        "raise reward.timeout_s if the reward is slow, or fix the reward",
    )
    return Outcome(name, (failed,), unchecked=(f"{name}: rewards did not return",))
