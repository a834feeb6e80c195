"""A signal waits for the step, is known on all ranks, and counts once however often it is passed on."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from keel.base.world import World
from keel.trainer.loop import Interrupt


class Asked(World):
    """Two ranks, the other without a signal; `during` is called while this one waits for its answer."""

    def __init__(self, during: Any = lambda: None, other: int | None = None) -> None:
        super().__init__(0, 2)
        object.__setattr__(self, "answer", lambda own: (during(), [own, other])[1])

    def all_gather(self, value: Any) -> list[Any]:
        return self.answer(value)


def test_a_signal_that_comes_while_the_others_are_asked_is_not_lost() -> None:
    interrupt = Interrupt()
    assert not interrupt.on_any_rank(Asked(lambda: interrupt(signal.SIGTERM, None)))
    assert interrupt.on_any_rank(Asked())
    assert interrupt.status == 143


def test_what_another_rank_has_had_holds_here_and_its_echo_is_the_same_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt, now = Interrupt(duplicate_s=3.0), time.monotonic()
    assert interrupt.on_any_rank(Asked(other=signal.SIGINT))
    interrupt(signal.SIGTERM, None)
    assert interrupt.status == 130
    monkeypatch.setattr(time, "monotonic", lambda: now + 10.0)
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT, None)


def test_in_one_process_a_second_signal_ends_at_once() -> None:
    interrupt = Interrupt()
    interrupt(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT, None)
