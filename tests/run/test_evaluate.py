"""How evaluation samples: as training does, except where that would depend on the clock."""

from __future__ import annotations

from typing import Any

import pytest

from keel.envs import Episode, Task
from keel.models.tiny import tiny_tokenizer
from keel.rollout.collect import Collector
from keel.run import evaluate
from trainer.small import small_config


class Plain(Task):
    """A task of one turn."""

    name = "plain"

    def held_out(self, count: int, *, seed: int = 0) -> list[Any]:
        return []


class Guess(Plain):
    """A task of several turns."""

    def start(self, problem: Any) -> Episode:
        return Episode()


@pytest.mark.parametrize(("task", "turns"), [(Guess(), 3), (Plain(), 1)])
def test_evaluation_takes_turns_as_training_does(task: Task, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Collector] = []
    monkeypatch.setattr(evaluate, "evaluate", lambda collector, *_, **__: given.append(collector))
    config = small_config("rollout.max_turns=3", "rollout.max_turn_length=2", "rollout.overlap_tools=true")
    entry = evaluate.Entry(task, "trained", None)  # type: ignore[arg-type]
    evaluate.evaluate_entry(config, None, tiny_tokenizer(), entry)  # type: ignore[arg-type]
    assert given[0].overlap_tools
    assert (given[0].max_turns, given[0].max_turn_length) == (turns, 2)
