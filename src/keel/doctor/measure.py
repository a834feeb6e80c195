"""Measures, and the run of them over a subject: each after those that have to be sound before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keel.base.errors import KeelError, first_line
from keel.doctor.findings import finding
from keel.doctor.subject import Power, Subject
from keel.doctor.verdict import Outcome, failed_measure
from keel.envs.calls import TooManyHungCalls
from keel.reference.weights import NoSingleModel
from keel.rollout.engine import ModelMismatch, StaleWeights

OnOutcome = Callable[[Outcome, float], None]


@dataclass(frozen=True)
class Measure:
    """One thing that is measured: how, which codes it may find, which powers it takes.

    `after` names measures that have to be sound, or it tells nothing. `passes`: it runs pass after pass over the batch,
    of which a large model gets less. `skill`: it depends on what the policy has learned. `quick`: --quick has it too.
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
        """Why it cannot be made; empty if it can."""
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
    """The outcome of every measure, in order; `small` is the subject with a batch for pass after pass.

    One that fails on what it is given is said to have failed and does not end the others.
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
        outcome = replace(outcome, undecided=(*outcome.undecided, *subject.budget.take_undecided()))
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
    except Exception as error:  # a user's part may raise anything
        return failed_measure(measure.name, error)


def refused(name: str, refusal: KeelError) -> Outcome:
    """An engine's refusal as the finding that it is; `name` is what cannot be told then."""
    if isinstance(refusal, ModelMismatch):
        code, cause = "sampler/other-model", "the sampler was started on another model than the one that is trained"
        advice = "start the sampler on model.name of this configuration, or correct rollout.vllm.url"
    else:
        code, cause = "sampler/stale", "the sampler keeps weights of its own that a sync does not bring up to date"
        advice = "start the sampler anew, of this version of Keel; a backend of your own must load all that it is sent"
    return Outcome(name, (finding(code, str(refusal), cause, advice),), unchecked=(f"{name}: the sampler was refused",))


def _hung(name: str, hung: TooManyHungCalls) -> Outcome:
    """Rewards that do not return while a measure asks them more: they fail, and the measure does not."""
    failed = finding(
        "reward/failed",
        f"while the probe of {name} asked for more rewards: {first_line(hung)}",
        "a reward does not return in the time that it is given, or never",
        "raise reward.timeout_s if the reward is slow, or mend it",
    )
    return Outcome(name, (failed,), unchecked=(f"{name}: rewards did not return",))
