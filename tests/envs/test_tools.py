"""Tools made of functions, calls read out of text, and everything that goes wrong between them."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any, Literal, Optional

import pytest

from envs.playing import counts, episode_of, reply
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.registry import build_task
from keel.envs.tool_calls import ToolCall, parse_calls, write_call
from keel.envs.toolbox import MAX_CALLS, Toolbox
from keel.envs.tools import Tool, coerce, tool
from keel.envs.with_tools import tools_of

PROBLEM = Problem("p", "?")
RELEASE = threading.Event()


def search(query: str, count: int = 3, exact: bool = False, kind: Literal["web", "news"] = "web") -> str:
    """Look something up.

    More that only a reader of the code wants to know.

    Args:
        query: The words to look for,
            in any order.
        count (int): How many results.
    """
    return f"{query}/{count}/{exact}/{kind}"


def broken(x: int) -> int:
    """Always fails."""
    raise OSError("the disk is gone\nand more")


def hangs() -> None:
    """Never returns."""
    RELEASE.wait(20)


def talks(letters: int) -> str:
    """Say much."""
    return "a" * letters


def quiet() -> None:
    """Say nothing."""


def test_our_schema_is_the_one_transformers_makes() -> None:
    """Templates are written for transformers' own schemas; for a plain function ours is equal to it."""
    from transformers.utils import get_json_schema

    def weather(city: str, days: int, units: list[str]) -> str:
        """
        Tell the weather.

        Args:
            city: Where.
            days: How many days.
            units: Units to use.
        """
        return ""

    expected = get_json_schema(weather)
    expected["function"].pop("return", None)
    assert tool(weather).schema == expected


@pytest.mark.parametrize(
    ("value", "hint", "made"),
    [
        ("3", int, 3),
        (3.0, int, 3),
        (3, str, "3"),
        (True, str, "true"),
        ("TRUE", bool, True),
        ("2.5", float, 2.5),
        ([1, "2"], list[int], [1, 2]),
        (["1"], tuple[int, ...], (1,)),
        ("2", Literal[1, 2], 2),
        (None, Optional[int], None),  # noqa: UP045
        ("x", str | list[str], "x"),
        ([1], str | list[str], ["1"]),
        ({"a": "1"}, dict[str, int], {"a": 1}),
    ],
)
def test_arguments_take_the_types_of_the_signature(value: Any, hint: Any, made: Any) -> None:
    got = coerce(value, hint)
    assert got == made
    assert type(got) is type(made)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("three", int),
        (3.5, int),
        (True, int),
        (["a"], str),
        ({}, str),
        (None, str),
        ("no", bool),
        ("a", list[str]),
        ([["a"]], list[str]),
        ([], dict),
        ("c", Literal["a", "b"]),
        (1e400, int),
        ("x", int | float),
    ],
)
def test_values_of_another_type_are_refused(value: Any, hint: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        coerce(value, hint)


def no_docstring(x: int) -> int:
    return x


def no_hint(x) -> int:  # type: ignore[no-untyped-def]
    """Something."""
    return 0


def any_arguments(*args: int) -> int:
    """Something."""
    return 0


def odd_type(x: threading.Event) -> int:
    """Something."""
    return 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "has no docstring"),
        (no_hint, "'x' needs a type hint"),
        (any_arguments, r"\*args"),
        (odd_type, "JSON cannot represent"),
        (lambda: None, "'<lambda>' is not a valid tool name"),
    ],
)
def test_functions_that_make_no_tool(function: Any, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        tool(function)


def test_a_decorated_function_can_still_be_called() -> None:
    @tool(timeout_s=1.0, name="twice")
    def double(x: int) -> int:
        """Twice a number."""
        return 2 * x

    assert isinstance(double, Tool)
    assert (double(4), double.name, double.timeout_s) == (8, "twice", 1.0)


def test_tools_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("mytools")
    module.search, module.number = search, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mytools", module)
    assert [made.name for made in tools_of(["mytools:search", quiet])] == ["search", "quiet"]
    for wrong, message in (
        (["search"], "module:attr"),
        (["mytools:serch"], "cannot import tool"),
        (["mytools:number"], "must be a function"),
        (["mytools:search", search], "two tools have the name 'search'"),
        ("mytools:search", "give a list"),
    ):
        with pytest.raises(KeelError, match=message):
            tools_of(wrong)


TOOLS = tuple(map(tool, (search, broken, quiet, talks)))
ASKED = ToolCall("search", {"query": "x"})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>', [ASKED]),
        ('I look.\n<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>' * 2, [ASKED, ASKED]),
        ('<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}</tool_call>', [ASKED]),
        ('<tool_call>{"name": "search", "arguments": {"query": "x"}}', [ASKED]),
        ('{"name": "search", "parameters": {"query": "x"}}', [ASKED]),
        ('<|python_tag|>{"name": "search", "parameters": {"query": "x"}}', [ASKED]),
        ('{"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}', [ASKED]),
        ('{"name": "search", "parameters": {"query": "x"}}; {"name": "quiet"}', [ASKED, ToolCall("quiet", {})]),
        (
            '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "x"}, "id": "abcdef123"}]',
            [ToolCall("search", {"query": "x"}, "abcdef123")],
        ),
        (' [{"name": "search", "arguments": {"query": "x"}}]', [ASKED]),
        ("The answer is 4.", []),
        ('{"answer": 4}', []),
        ("{4}", []),
        ("", []),
    ],
)
def test_calls_as_templates_write_them(text: str, calls: list[ToolCall]) -> None:
    assert parse_calls(text, "json", TOOLS) == calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "search", "arguments": {"query": "x"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": [1]}</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>" + "[" * 100_000,
        "[TOOL_CALLS] search",
        '{"name": "search", "parameters": {"query": ',
    ],
)
def test_malformed_json_is_a_call_with_a_fault(text: str) -> None:
    (call,) = parse_calls(text, "json", TOOLS)
    assert call.fault
    assert len(call.fault) < 120


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<search> x </search>", [ASKED]),
        ('<search>{"query": "x"}</search>', [ASKED]),
        ("first <search>x</search> then <quiet></quiet>", [ASKED, ToolCall("quiet", {})]),
        ('<tool>search("x")</tool>', [ASKED]),
        ('<tool>search(query="x", count=2)</tool>', [ToolCall("search", {"query": "x", "count": 2})]),
        ("<tool>nothing()</tool>", [ToolCall("nothing", {})]),
        ("<other>x</other>", []),
    ],
)
def test_calls_in_tags(text: str, calls: list[ToolCall]) -> None:
    assert parse_calls(text, "tags", TOOLS) == calls


@pytest.mark.parametrize(
    "text",
    [
        "<search> x",
        "<search>{x</search>",
        "<tool>search</tool>",
        "<tool>search(__import__('os').getcwd())</tool>",
        "<tool>search(1, 2, 3, 4, 5)</tool>",
        "<tool>search(*[1])</tool>",
    ],
)
def test_malformed_tags_are_calls_with_a_fault_and_nothing_is_run(text: str) -> None:
    (call,) = parse_calls(text, "tags", TOOLS)
    assert call.fault


@pytest.mark.parametrize("format", ["json", "tags"])
@pytest.mark.parametrize("arguments", [{"query": "x"}, {"query": "x", "count": 2}, {"count": 2}])
def test_what_is_written_is_what_is_read(format: str, arguments: dict[str, Any]) -> None:
    text = write_call("search", arguments, format, TOOLS)
    assert parse_calls(text, format, TOOLS) == [ToolCall("search", arguments)]


def box(*tools: Any, format: str = "json") -> Toolbox:
    offered = [tool(one) for one in tools]
    return Toolbox(lambda problem: offered, format)


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def said(toolbox: Toolbox, *turns: str) -> list[str]:
    messages = reply(toolbox, PROBLEM, turns)
    assert isinstance(messages, list)
    return [message["content"] for message in messages]


def counted(toolbox: Toolbox, *turns: str) -> dict[str, float]:
    return {name: count for name, count in counts(toolbox, PROBLEM, turns).items() if count}


def test_several_calls_of_a_turn_run_in_order_and_are_answered_together() -> None:
    order: list[int] = []

    def note(number: int) -> str:
        """Note a number."""
        order.append(number)
        return f"noted {number}"

    toolbox = box(note)
    turn = f"<tool_call>{call('note', number=2)}</tool_call><tool_call>{call('note', number=1)}</tool_call>"
    messages = reply(toolbox, PROBLEM, [turn])
    assert isinstance(messages, list)
    assert [(m["role"], m["name"], m["content"]) for m in messages] == [
        ("tool", "note", "noted 2"),
        ("tool", "note", "noted 1"),
    ]
    ids = [m["tool_call_id"] for m in messages]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert order == [2, 1]
    assert counted(toolbox, turn, call("note", number=3)) == {"tool/calls": 3.0}
    assert order == [2, 1, 2, 1, 3]  # another episode makes its own calls


@pytest.mark.parametrize(
    ("turn", "kind", "message"),
    [
        ("<tool_call>{oops</tool_call>", "malformed", "error: the call is not valid JSON"),
        (call("serch"), "unknown_tool", "error: there is no tool 'serch'; use search, broken, quiet, talks"),
        (call("search"), "bad_arguments", "error: search: the parameter 'query' is missing"),
        (call("search", query=["a"]), "bad_arguments", "error: search: 'query' must be str, not ['a']"),
        (call("search", query="x", page=2), "bad_arguments", "error: search: unknown parameter 'page'"),
        (call("broken", x="1"), "failed", "error: broken raised OSError: the disk is gone"),
    ],
)
def test_what_goes_wrong_is_told_in_a_line_and_counted(turn: str, kind: str, message: str) -> None:
    toolbox = box(search, broken, quiet, talks)
    (content,) = said(toolbox, turn)
    assert content.startswith(message)
    assert "\n" not in content
    assert counted(toolbox, turn) == {"tool/calls": 1.0, "tool/errors": 1.0, f"tool/{kind}": 1.0}


def test_a_long_result_is_cut_with_a_mark_and_counted() -> None:
    toolbox = box(tool(talks, max_characters=10))
    assert said(toolbox, call("talks", letters=10)) == ["a" * 10]
    assert said(toolbox, call("talks", letters=25)) == ["a" * 10 + "\n[cut: 15 characters more]"]
    assert counted(toolbox, call("talks", letters=25)) == {"tool/calls": 1.0, "tool/too_long": 1.0}


def test_a_tool_that_hangs_is_an_error_and_at_last_stops_the_run() -> None:
    toolbox = box(tool(hangs, timeout_s=0.02))
    try:
        assert said(toolbox, call("hangs")) == ["error: hangs took too long"]
        assert counted(toolbox, call("hangs"))["tool/timeout"] == 1.0
        with pytest.raises(KeelError, match="tool 'hangs' hangs"):
            reply(toolbox, PROBLEM, [call("hangs")] * 20)
    finally:
        RELEASE.set()


def test_too_many_calls_of_a_turn_are_not_answered() -> None:
    toolbox = box(quiet)
    turn = f"<tool_call>{call('quiet')}</tool_call>" * (MAX_CALLS + 5)
    assert len(said(toolbox, turn)) == MAX_CALLS + 1
    assert counted(toolbox, turn) == {"tool/calls": MAX_CALLS + 1, "tool/errors": 1.0, "tool/too_many": 1.0}


def test_a_turn_without_a_call_and_a_tool_that_ends_end_the_episode() -> None:
    def stop(why: str) -> str:
        """Stop."""
        return why

    toolbox = box(tool(stop, ends=True), quiet)
    assert reply(toolbox, PROBLEM, ["I am done"]) is None
    assert reply(toolbox, PROBLEM, [call("stop", why="x")]) is None
    assert reply(toolbox, PROBLEM, [call("stop")]) is not None  # a call that failed ends nothing
    episode, _ = episode_of(toolbox, PROBLEM, [call("stop", why="x"), call("quiet")])
    assert episode.is_over
    assert [result.value for result in episode.every_result] == ["x"]


def test_tags_are_answered_in_tags() -> None:
    toolbox = box(search, format="tags")
    turns: Sequence[str] = ["<search> x </search> <search>"]
    assert reply(toolbox, PROBLEM, turns) == (
        "\n<result>\nx/3/False/web\n</result>\n"
        "<result>\nerror: <search> is not closed: write <search>…</search>\n</result>\n"
    )


def test_any_task_of_one_turn_can_have_tools() -> None:
    task: Any = build_task("tools", task={"name": "arithmetic", "style": "words"}, tools=[double])
    (problem,) = task.sample(1, seed=0, step=0)
    assert [offered["function"]["name"] for offered in problem.tools] == ["double"]
    turns = [call("double", number=4), f"It is {problem.answer}."]
    (message,) = reply(task, problem, turns[:1])
    assert message["content"] == "8"
    assert reply(task, problem, turns) is None
    assert task.reward(problem, turns).total == 1.0
    assert task.reward(problem, turns[:1]).total == 0.0  # a call is no answer, whatever numbers are in it
    assert counts(task, problem, turns)["tool/calls"] == 1.0
    tags: Any = build_task("tools", task={"name": "arithmetic"}, tools=[double], format="tags")
    (problem,) = tags.sample(1, seed=0, step=0)
    assert "<double> number </double> Twice a number." in problem.prompt
    assert reply(tags, problem, ["<double>2</double>"]) == "\n<result>\n4\n</result>\n"


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": {"name": "arithmetic"}, "tools": []}, "needs tools"),
        ({"task": "arithmetic", "tools": [double]}, "tools.task.*mapping such as .name"),
        ({"task": {"name": "multihop"}, "tools": [double]}, "is a multi-turn task"),
        ({"task": {"name": "arithmetic"}, "tools": [double], "format": "xml"}, "tool format"),
    ],
)
def test_tools_around_a_task_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        build_task("tools", **options)


CALL = '{"name": "search", "arguments": {"query": "x"}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # words before a bare call, in a fence too
        (f"Let me look.\n{CALL}", [ASKED]),
        (f"Let me look: {CALL}; {CALL}", [ASKED, ASKED]),
        (f"I look.\n```json\n{CALL}\n```", [ASKED]),
        (f"I look. [{CALL}]", [ASKED]),
        ('The capital is {"name": "Rome"}', []),
        ('She is {"name": "Ann"} and that is that', []),
        # what is thought is no call, and does not spoil the one that follows
        (f"<think>I could write <tool_call> here</think>\n<tool_call>{CALL}</tool_call>", [ASKED]),
        (f"so a <tool_call> would do</think><tool_call>{CALL}</tool_call>", [ASKED]),
        (f"<think>maybe <tool_call>{CALL}</tool_call></think> It is Rome.", []),
        (f"<think>{CALL}</think> It is Rome.", []),
        # a mark that is only mentioned, and calls that are not closed
        (f"A <tool_call> it is: <tool_call>{CALL}</tool_call>", [ASKED]),
        (f"<tool_call>{CALL}\n<tool_call>{CALL}</tool_call>", [ASKED, ASKED]),
        (
            '<tool_call>{"name": "search", "arguments": {"query": "<tool_call>"}}</tool_call>',
            [ToolCall("search", {"query": "<tool_call>"})],
        ),
    ],
)
def test_calls_among_words_and_thoughts(text: str, calls: list[ToolCall]) -> None:
    assert parse_calls(text, "json", TOOLS) == calls


@pytest.mark.parametrize(
    "text",
    [
        'Let me look. {"name": "search", "arguments": {"query": "x"',
        f"Let me look. {CALL} and then?",
        "<tool_call>{oops <tool_call>",
        "I could use <tool_call>",
    ],
)
def test_attempts_among_words_are_malformed(text: str) -> None:
    calls = parse_calls(text, "json", TOOLS)
    assert calls
    assert all(call.fault for call in calls)
