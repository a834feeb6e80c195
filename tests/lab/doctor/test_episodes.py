"""What environments answer and how episodes end, through the probe that reads them."""

from __future__ import annotations

import json
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from keel.base.thresholds import load_thresholds
from keel.lab.doctor.findings import Finding
from keel.lab.doctor.probes import episodes
from keel.lab.doctor.probes.episodes import REPLAYED, SECONDS, episode_findings, is_useless, stands_in, unfinished
from keel.lab.doctor.setup import build_setup
from keel.models.tiny import tiny_tokenizer
from lab.doctor.schooled import schooled_config

HERE = "lab.doctor.faults_episodes"


def probed(name: str, *overrides: str) -> list[Finding]:
    task = [f"task={{name: '{HERE}:{name}'}}", "rollout.max_completion_length=60", "rollout.max_turns=2"]
    setup = build_setup(schooled_config(*task, *overrides))
    with closing(setup.run):
        return list(episode_findings(setup, load_thresholds()))


FAULTS = {
    "every call fails": ("tool/failing", "whatever it is asked", ["failing"]),
    "calls return nothing": ("tool/failing", "whatever it is asked", ["empty"]),
    "calls return what the one before should": ("tool/failing", "the result of the call before", ["late"]),
    "calls return another episode's result": ("tool/failing", "handed to another", ["swapped"]),
    "a template that drops what tools return": (
        "tool/failing",
        "the chat template or the task drops",
        ["sound", "data.chat_template=default", f"model.name={HERE}:forgetful"],
    ),
    "episodes that never end": ("output/truncated", "never ends an episode", ["endless"]),
}
HEALTHY = {
    "a tool that answers": ["sound"],
    "a tool that answers, in a template": ["sound", "data.chat_template=default"],
    "one of several lines, in a template that writes JSON": [
        "lines",
        "data.chat_template=default",
        f"model.name={HERE}:quoting",
    ],
    "the same question to all": ["again"],
    "a talk of as many turns as there are": ["interview"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_named(fault: str) -> None:
    code, cause, overrides = FAULTS[fault]
    (first,) = probed(*overrides)
    assert (first.code, first.severity) == (code, "error")
    assert cause in first.cause


@pytest.mark.parametrize("name", HEALTHY)
def test_sound_episodes_are_silent(name: str) -> None:
    assert probed(*HEALTHY[name]) == []


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "\n<result>\n\n</result>\n",
        "tool\n",
        "Error: KeyError 'x'",
        "KeyError: 'x'",
        "search timed out",
        "No results found.",
        "\n<|im_start|>user\n<tool_response>\nTool error: no such page\n</tool_response>",
        '{"error": "no such page"}',
        '{"result": null, "error": "no such page"}',
        '{"status": "error", "message": "no such page"}',
        "HTTP 404 Not Found",
        "The service is unavailable.",
        "Failed to open the page",
    ],
)
def test_a_reply_from_which_nothing_is_learned(reply: str) -> None:
    assert is_useless(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "7",
        "<result>\n0\n</result>",
        "?",
        "The trial " + "went on for many days and " * 3 + "failed.",
        "Try again.",
        '{"result": 7, "error": null}',
        '{"error": null, "result": 7}',
        '{"error": "", "result": 7}',
        "0 errors, 2 warnings",
        "Errors: 0",
        "exit code 0, no errors",
        "2 tests failed, 1 passed",
        "3 errors, 1 of them at line 7",
        "null",
        "mean squared error 0.25",
        "timeout: 30",
    ],
)
def test_one_that_says_something(reply: str) -> None:
    assert not is_useless(reply)


RESULT = 'Caf\xe9 "Nord"\n\tC:\\menu\nopens at 7'


@pytest.mark.parametrize(
    "shown",
    [
        RESULT,
        f"tool\n{json.dumps(RESULT)}\nassistant",
        f"tool\n{json.dumps(RESULT, ensure_ascii=False)}\nassistant",
        RESULT.casefold(),
        RESULT.replace("\xe9", ""),  # for which the tokenizer has no token
    ],
)
def test_a_result_that_is_written_otherwise_stands_there(shown: str) -> None:
    assert stands_in(RESULT, shown, tiny_tokenizer())


@pytest.mark.parametrize("shown", ["tool\n\nassistant", RESULT.replace("7", "8"), RESULT.partition("\n")[0]])
def test_one_that_is_dropped_changed_or_cut_does_not(shown: str) -> None:
    assert not stands_in(RESULT, shown, tiny_tokenizer())


class Answering:
    """A task whose every turn is answered, after some seconds by the probe's clock."""

    several_turns = True

    def __init__(self, seconds: float) -> None:
        self.started, self.seconds, self.now = 0, seconds, 0.0

    def start(self, problem: Any) -> Any:
        self.started += 1
        return SimpleNamespace(step=self.step, close=lambda: None)

    def step(self, text: str) -> str:
        self.now += self.seconds
        return "go on"


@pytest.mark.parametrize(("seconds", "played"), [(0.0, REPLAYED), (SECONDS / 2, 2)])
def test_single_turns_are_played_again_within_bounds(
    seconds: float, played: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Answering(seconds)
    monkeypatch.setattr(episodes, "time", SimpleNamespace(monotonic=lambda: task.now))
    config = SimpleNamespace(rollout=SimpleNamespace(max_turns=1))
    setup: Any = SimpleNamespace(config=config, run=SimpleNamespace(task=task), shared={})
    groups: list[Any] = [
        SimpleNamespace(problem=SimpleNamespace(key=str(i)), completions=[SimpleNamespace(text="?")] * 8)
        for i in range(40)
    ]
    for _ in range(2):  # what is known is not asked again
        assert [unfinished(setup, group) for group in groups] == [[True]] * played + [[]] * (40 - played)
    assert task.started == played
