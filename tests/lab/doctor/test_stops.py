"""Stop texts and limits that cut answers off are told from a model that does not know the form, or no end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from keel.base.thresholds import load_thresholds
from keel.base.types import Completion, Group, Problem, Reward
from keel.lab.doctor.probes.stops import ROOM, ends_with_room, parsed_without_stop
from keel.rollout import SamplingParams


def group(parsed: bool, reason: str) -> Group:
    completion = Completion((1,), (True,), (0.0,), (0.0,), "", reason)
    return Group(Problem("0", ""), (), (completion,) * 4, (Reward(0.0, parsed=parsed),) * 4)


@pytest.mark.parametrize(
    ("parsed", "reason", "readable", "share"),
    [(False, "stop", True, 1.0), (False, "stop", False, None), (False, "eos", True, None), (True, "stop", True, None)],
    ids=["cut off", "unreadable without it too", "ends by itself", "read as it is"],
)
def test_the_batch_is_read_without_stop_texts(parsed: bool, reason: str, readable: bool, share: float | None) -> None:
    def collect(problems: list[Problem], *, sampling: SamplingParams, judged: bool) -> list[Group]:
        assert judged
        assert not sampling.stop
        return [group(readable, "eos")]

    setup = SimpleNamespace(
        groups=[group(parsed, reason)],
        sampling=SamplingParams(num_generations=4, max_completion_length=8, stop=("<call>",)),
        of_batch={},
        collect=collect,
        built=SimpleNamespace(judge=SimpleNamespace(drain=list, remote=False)),
    )
    assert parsed_without_stop(setup, load_thresholds()) == share


@pytest.mark.parametrize(
    ("reason", "parsed", "turns", "context", "ends"),
    [
        ("eos", False, 1, None, True),
        ("length", True, 1, None, True),
        ("length", False, 1, None, False),
        ("length", False, 3, None, None),
        ("length", False, 1, 20, None),
    ],
    ids=["ends with more room", "is read with more room", "goes on", "has turns", "has no room"],
)
def test_the_batch_is_tried_with_more_room(
    reason: str, parsed: bool, turns: int, context: int | None, ends: bool | None
) -> None:
    def collect(problems: list[Problem], *, sampling: SamplingParams, judged: bool) -> list[Group]:
        assert judged
        assert (sampling.max_completion_length, sampling.num_generations) == (ROOM * 8, 1)
        return [group(parsed, reason)]

    setup = SimpleNamespace(
        groups=[group(False, "length")],
        sampling=SamplingParams(num_generations=4, max_completion_length=8),
        policy=SimpleNamespace(context_length=context),
        config=SimpleNamespace(rollout=SimpleNamespace(max_turns=turns)),
        collect=collect,
        built=SimpleNamespace(judge=SimpleNamespace(drain=list, remote=False)),
    )
    assert ends_with_room(setup, load_thresholds()) is ends
