"""A hypothesis: one possible explanation of a measurement, tested as an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from keel.doctor.findings import Advice, Severity
from keel.doctor.subject import Subject


@dataclass(frozen=True)
class Hypothesis:
    """A row of a table. `name` completes a sentence such as "the gap closes at NAME" or "answers are likelier NAME".

    `apply` yields the subject with one part replaced by a trusted one or with one input edited, and restores it
    afterwards. `least` is the size of an edit, from 0 (nothing). Of two equally good hypotheses, the one with the
    smaller edit is reported.
    """

    name: str
    code: str
    cause: str
    advice: Advice | str
    apply: Callable[[Subject], AbstractContextManager[Subject]]
    severity: Severity | None = None


def swap(**parts: Any) -> Callable[[Subject], AbstractContextManager[Subject]]:
    """An experiment that replaces methods of the subject."""
    return lambda subject: nullcontext(subject.swapped(**parts))


def within(context: Callable[[Subject], AbstractContextManager[Any]]) -> Callable[[Subject], Any]:
    """An experiment inside a context that changes the subject's own model."""

    @contextmanager
    def applied(subject: Subject) -> Iterator[Subject]:
        with context(subject):
            yield subject.swapped()

    return applied
