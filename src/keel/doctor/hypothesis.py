"""A hypothesis: one explanation of what was measured, tried as an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from keel.doctor.findings import Advice, Severity
from keel.doctor.subject import Subject


@dataclass(frozen=True)
class Hypothesis:
    """A row of a table. `name` continues a sentence: "the gap closes at NAME", "answers are likelier NAME".

    `apply` gives the subject with one part swapped for a trusted one, or one input edited; afterwards all is as it was.
    `least` is what an edit leaves out or adds, from 0 (nothing) on: of two that explain as much the smaller is named.
    """

    name: str
    code: str
    cause: str
    advice: Advice | str
    apply: Callable[[Subject], AbstractContextManager[Subject]]
    severity: Severity | None = None


def swap(**parts: Any) -> Callable[[Subject], AbstractContextManager[Subject]]:
    """An experiment in which methods of the subject are these: what a part says in place of what was measured."""
    return lambda subject: nullcontext(subject.swapped(**parts))


def within(context: Callable[[Subject], AbstractContextManager[Any]]) -> Callable[[Subject], Any]:
    """An experiment inside a context that changes the subject's own model."""

    @contextmanager
    def applied(subject: Subject) -> Iterator[Subject]:
        with context(subject):
            yield subject.swapped()

    return applied
