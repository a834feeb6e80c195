"""Replies of environments and endings of episodes, through their probe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from doctor.faults_episodes import Calling
from doctor.schooled import schooled_config
from keel.base.types import Completion, Problem
from keel.doctor import replies
from keel.doctor.findings import Finding
from keel.doctor.keel_subject import build_subject
from keel.doctor.probes import episodes
from keel.doctor.probes.episodes import REPLAYED, SECONDS, episode_findings, rejudged_findings, unfinished
from keel.doctor.replies import (
    PLAYS,
    PLAYS_OF_SINGLE_TURNS,
    OutOfPlays,
    answers_again,
    asked_of,
    contents,
    first_turn,
    is_useless,
    replayed,
    stands_in,
)
from keel.doctor.replies import replies as read_replies
from keel.doctor.thresholds import load_thresholds
from keel.models.tiny import tiny_tokenizer

HERE = "doctor.faults_episodes"
TURNS = "rollout.max_completion_length=60", "rollout.max_turns=2"
KINDS = ("wrong", "constant", "done", "random", "clocked", "told", "found")


def probed(name: str, *overrides: str) -> list[Finding]:
    named = (
        f"{{name: '{HERE}:of_kind', kind: {name}}}" if " " in name or name in KINDS else f"{{name: '{HERE}:{name}'}}"
    )
    setup = build_subject(schooled_config(f"task={named}", *TURNS, *overrides))
    with closing(setup.run):
        return list(episode_findings(setup))


FAULTS = {
    "every call fails": ("tool/failing", "for every call", ["failing"]),
    "calls return nothing": ("tool/failing", "for every call", ["empty"]),
    "calls return what the one before should": ("tool/failing", "the previous call", ["late"]),
    "calls return another episode's result": ("tool/failing", "for itself", ["swapped"]),
    "a template that drops what tools return": (
        "tool/failing",
        "the chat template or the task drops",
        ["sound", "data.chat_template=default", f"model.name={HERE}:forgetful"],
    ),
    "the same result for every call": ("tool/failing", "the same text for every call", ["constant"]),
    "results that nobody asked for": ("tool/failing", "does not depend on the call", ["random"]),
    "results that hold those of other episodes": ("tool/failing", "requests of other episodes", ["piled up"]),
    "replies that give the answer away": ("prompt/answer-leak", "for any call", ["told"]),
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
    "a word that it was done": ["done"],
    "results with the time they took": ["clocked"],
    "the same verdict on all that is wrong": ["wrong"],
    "replies that judge what was said": ["found"],
    "a talk of as many turns as there are": ["interview"],
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_named(fault: str) -> None:
    code, cause, overrides = FAULTS[fault]
    (first,) = probed(*overrides)
    assert (first.code, first.severity) == (code, "warning" if "random" in overrides else "error")
    assert cause in first.cause


class WithoutBlanks:
    """A character tokenizer that drops spaces."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, tokens)).replace(" ", "")


def test_a_reply_has_its_own_blanks_where_the_tokenizer_loses_them() -> None:
    said = ("7", "<title>502 Bad Gateway</title>\n", "7")
    tokens = tuple(ord(sign) for text in said for sign in text if sign != " ")
    action = tuple(turn != 1 for turn, text in enumerate(said) for sign in text if sign != " ")
    zeros = (0.0,) * len(tokens)
    completion = Completion(tokens, action, zeros, zeros, "\n".join(said), "eos")
    assert read_replies(completion, WithoutBlanks()) == ["<title>502 Bad Gateway</title>"]
    changed = replace(completion, text="what a template made of it")
    assert read_replies(changed, WithoutBlanks()) == ["<title>502BadGateway</title>\n"]


def test_a_turn_that_was_cut_is_no_call() -> None:
    """A truncated call is invalid for any tool. The length limit is the cause."""
    setup = build_subject(schooled_config(f"task={{name: '{HERE}:failing'}}", *TURNS, "rollout.max_turn_length=20"))
    with closing(setup.run):
        cut = replace(
            setup, turns=tuple(replace(t, completion=replace(t.completion, stop_reason="length")) for t in setup.turns)
        )
        assert replayed(setup)
        assert not replayed(cut)


def test_an_episode_that_earns_otherwise_alone_is_nondeterministic() -> None:
    task = f"task={{name: '{HERE}:of_kind', kind: judged by the last}}"
    setup = build_subject(schooled_config(task, "rewards=[{name: task}]", *TURNS))
    with closing(setup.run):
        assert [found.code for found in rejudged_findings(setup)] == ["reward/nondeterministic"]


@pytest.mark.parametrize("kind", ["sound", "random"])
def test_a_reward_may_look_at_the_episode(kind: str) -> None:
    task = f"task={{name: '{HERE}:of_kind', kind: {kind}}}"
    setup = build_subject(schooled_config(task, f"rewards=[{{name: '{HERE}:of_the_episode'}}]", *TURNS))
    with closing(setup.run):
        assert setup.failures == ()
        assert max(reward.total for group in setup.groups for reward in group.rewards) > 0
        assert [*rejudged_findings(setup)] == []
        assert setup.shared["plays"][0] > 1


def playing(start: Any) -> Any:
    """A setup in which only the task is used."""
    return SimpleNamespace(
        thresholds=load_thresholds(),
        run=SimpleNamespace(task=SimpleNamespace(start=start)),
        policy=SimpleNamespace(tokenizer=tiny_tokenizer()),
        config=SimpleNamespace(rollout=SimpleNamespace(max_turns=2)),
        shared={},
    )


def test_thoughts_make_no_other_call() -> None:
    episode = Calling("sound", Problem("0", "?"))
    said = ["<larger> 1 2 </larger>", "I wonder. <larger> 1 2 </larger>", "<larger> 2 1 </larger>"]
    first, thought, other = (asked_of(episode, text) for text in said)
    assert first == thought != other


def test_a_start_that_is_awaited_is_played() -> None:
    async def start(problem: Problem) -> Calling:
        return Calling("sound", problem)

    reply = answers_again(playing(start), Problem("0", "?"), "<larger> 1 2 </larger>")
    assert "it is 2" in contents(reply)


@pytest.mark.parametrize(
    ("max_turns", "seconds", "played"), [(2, 0.0, PLAYS), (1, 0.0, PLAYS_OF_SINGLE_TURNS), (2, 4.0, 3)]
)
def test_environments_are_played_again_within_bounds(
    max_turns: int, seconds: float, played: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Answering(seconds)
    monkeypatch.setattr(replies, "time", SimpleNamespace(monotonic=lambda: task.now))
    setup = playing(task.start)
    setup.config.rollout.max_turns = max_turns
    for _ in range(100):
        with suppress(OutOfPlays):
            answers_again(setup, Problem("0", "?"), "?")
    assert task.started == played


def test_a_first_turn_is_the_text_that_the_engine_hands_on() -> None:
    tokenizer = tiny_tokenizer()
    turn, reply = ([*tokenizer.encode(text, add_special_tokens=False)] for text in ("12;", "34"))
    tokens = (*turn, tokenizer.eos_token_id, *reply)
    action = (True,) * (len(turn) + 1) + (False,) * len(reply)
    completion = Completion(tokens, action, (0.0,) * len(tokens), (0.0,) * len(tokens), "", "eos")
    assert first_turn(completion, tokenizer) == "12;"
    assert first_turn(completion, tokenizer, [";"]) == "12"


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_sound_episodes_are_silent(name: str) -> None:
    assert probed(*HEALTHY[name]) == []


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "\n<result>\n\n</result>\n",
        "Error: KeyError 'x'",
        "No results found.",
        "0 results",
        "\n<|im_start|>user\n<tool_response>\nTool error: no such page\n</tool_response>",
        '{"error": "no such page"}',
        '{"result": null, "error": "no such page"}',
        "HTTP 404 Not Found",
        "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>",
        "<!DOCTYPE html>\n<title>504 Gateway Time-out</title>",
        '{"status": 403, "message": "Forbidden"}',
        "<result>\n<coroutine object search at 0x7f22c1d0>\n</result>",
        "<bound method Index.get of <tools.Index object at 0x7f22c1d0>>",
        "[object Object]",
        "curl: (6) Could not resolve host: index.example",
        "Process exited with code 137: memory limit exceeded",
        "Killed",
        "usage: find [-h] [--most N] QUERY\nfind: the following arguments are required: QUERY\n",
        "<result>\nmax...(truncated)\n</result>",
        "sh: larger: command not found",
        "Connection reset by peer",
    ],
)
def test_a_reply_from_which_nothing_is_learned(reply: str) -> None:
    assert is_useless(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "0 results were withheld: all 3 are shown",
        "7",
        "<result>\n0\n</result>",
        "The trial " + "went on for many days and " * 3 + "failed.",
        '{"result": 7, "error": null}',
        '{"error": "", "result": 7}',
        "0 errors, 2 warnings",
        "2 tests failed, 1 passed",
        "null",
        "<function> f(x) = 2 x </function>",
        "timeout: 30",
        "Title: Can't Buy Me Love is a song",
        "No such thing as a free lunch: 1938 proverb",
        "410 Gone with the Wind tickets",
        "404",
        "The server returned status 200: 7",
        "If a process exited with code 1, start it again.",
        "Order 17 returned, status: refunded",
        "exit code: 1\nstdout: 3 passed, 1 failed",
        "You got killed by the troll. Score: 10",
        "usage: git [--version] [--help] <command>\n\nThese are common Git commands:\n   clone     Clone a repository",
        "1 2 3 5 7 11 13 17 19 23 ... (truncated)",
        "17 (truncated)",
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
    """A task that replies to every turn, after some seconds by the probe's clock."""

    multi_turn = True

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
    setup: Any = SimpleNamespace(thresholds=load_thresholds(), config=config, run=SimpleNamespace(task=task), shared={})
    groups: list[Any] = [
        SimpleNamespace(problem=SimpleNamespace(key=str(i)), completions=[SimpleNamespace(text="?")] * 8)
        for i in range(40)
    ]
    for _ in range(2):  # what is known is not asked again
        assert [unfinished(setup, group) for group in groups] == [[True]] * played + [[]] * (40 - played)
    assert task.started == played
