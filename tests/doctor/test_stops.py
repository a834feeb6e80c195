"""Stop texts and limits that cut answers off are told from a model that does not know the form, or no end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from keel.base.types import Completion, Group, Problem, Reward
from keel.doctor.probes.stops import in_whole_context, parsed_without_stop
from keel.doctor.thresholds import load_thresholds
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
    ("reasons", "parsed", "turns", "turn", "context", "shares"),
    [
        (["eos"], False, 1, None, 100, (0.0, 1.0)),
        (["eos", "length", "length", "length"], False, 1, None, 100, (0.0, 0.25)),
        (["length"], True, 1, None, 100, (1.0, 0.0)),
        (["length"], False, 1, None, 100, (0.0, 0.0)),
        (["length"], False, 3, None, 100, None),
        (["length"], False, 1, 4, 100, None),
        (["length"], False, 1, None, 8, None),
        (["length"], False, 1, None, 1 << 17, None),
        (["length"], False, 1, None, None, None),
    ],
    ids=["ends", "ends at times", "is read", "goes on", "has turns", "cuts turns", "no room", "too long", "unknown"],
)
def test_the_batch_is_tried_in_the_whole_context(
    reasons: list[str],
    parsed: bool,
    turns: int,
    turn: int | None,
    context: int | None,
    shares: tuple[float, float] | None,
) -> None:
    def collect(problems: list[Problem], *, sampling: SamplingParams, judged: bool) -> list[Group]:
        assert judged
        assert (sampling.max_completion_length, sampling.num_generations) == (context, 16)
        return [group(parsed, reason) for reason in reasons]

    setup = SimpleNamespace(
        groups=[group(False, "length")],
        sampling=SamplingParams(num_generations=4, max_completion_length=8),
        policy=SimpleNamespace(context_length=None if context is None else context + 7),
        run=SimpleNamespace(engine=SimpleNamespace(context=context)),
        config=SimpleNamespace(rollout=SimpleNamespace(max_turns=turns, max_turn_length=turn)),
        collect=collect,
        built=SimpleNamespace(judge=SimpleNamespace(drain=list, remote=False)),
    )
    assert in_whole_context(setup) == shares
