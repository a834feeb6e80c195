"""summary.json: which record counts as the trained task's."""

from keel.kl import KLState
from keel.trainer.state import State
from keel.trainer.summary import summarise


def record(split: str, value: float) -> dict[str, object]:
    return {"task": "countdown", "split": split, "pass@1": value, "ci95": [value, value]}


def test_a_retention_task_of_the_same_name_does_not_take_its_place() -> None:
    state = State(
        kl=KLState(beta=0.0, base=0.0),
        before=(record("trained", 0.1), record("retention", 0.7)),
        evaluated=(record("trained", 0.2), record("retention", 0.9)),
    )
    summary = summarise("countdown", state)
    assert (summary["accuracy"]["before"], summary["accuracy"]["after"]) == (0.1, 0.2)
    assert summary["retention"] == {"countdown": {"before": 0.7, "after": 0.9}}
