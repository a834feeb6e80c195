"""Stop texts that cut answers are distinguished from a model that does not know the format."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from keel.base.types import Completion, Group, Problem, Reward
from keel.doctor.probes.misfit import parsed_without_stop
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
        thresholds=load_thresholds(),
        groups=[group(parsed, reason)],
        sampling=SamplingParams(num_generations=4, max_completion_length=8, stop=("<call>",)),
        of_batch={},
        collect=collect,
        built=SimpleNamespace(judge=SimpleNamespace(drain=list, remote=False)),
    )
    assert parsed_without_stop(setup) == share
