"""Turns with tools: what is trained on is what was sampled, under three chat templates; budgets; endless episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem, Reward
from keel.envs import Episode, Task
from keel.envs.judge import Judge
from keel.envs.tool_calls import parse_calls
from keel.envs.toolbox import Toolbox, ToolEpisode
from keel.envs.tools import tool
from keel.models.pack import pack
from keel.models.tiny import tiny_tokenizer
from keel.rollout import Engine, Request, SamplingParams
from keel.rollout.collect import Collector
from keel.rollout.native.engine import NativeEngine
from keel.rollout.render import Renderer
from keel.rollout.request import Turn
from keel.trainer.measure import describe_episodes

from . import shapes
from .chats import Chat, chats

CHATS = chats()


@tool
def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: Where.
    """
    return f'rain in "{city}"\nand wind'


class Counted(ToolEpisode):
    """Judged by the number of turns."""

    def reward(self) -> Reward:
        return Reward(float(len(self.turns)))


class Weather(Task):
    """A task with one tool."""

    name = "weather"

    def __init__(self, format: str = "json", offered: Any = weather, episode: type[ToolEpisode] | None = None) -> None:
        self.toolbox, self.episode = Toolbox(lambda problem: [offered], format), episode or Counted

    def start(self, problem: Problem) -> Episode:
        return self.episode(self.toolbox, problem)

    def problem(self, key: str = "a") -> Problem:
        return Problem(key, [{"role": "user", "content": "Is it wet?"}], tools=[weather.schema])

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [self.problem(str(i)) for i in range(count)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [self.problem("held")]

    def gold(self, problem: Problem) -> str:
        return "yes"


@dataclass
class Scripted(Engine):
    """An engine that says the next turn of a script and the end of sequence, and writes down what it was asked."""

    tokenizer: Any
    scripts: list[list[str]]
    asked: list[list[Request]] = field(default_factory=list)
    said: list[list[tuple[int, ...]]] = field(default_factory=list)
    noted: dict[int, int] = field(default_factory=dict)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> list[list[Completion]]:
        self.asked.append(list(requests))
        self.said = self.said or [[] for _ in self.scripts]
        return [
            [self._say(sample, request, sampling) for sample in request.samples or range(len(self.scripts))]
            for request in requests
        ]

    def _say(self, sample: int, request: Request, sampling: SamplingParams) -> Completion:
        turn = self.noted.get(sample, 0)
        self.noted[sample] = turn + 1
        limit = sampling.max_completion_length if request.max_new is None else request.max_new
        text = self.scripts[sample][min(turn, len(self.scripts[sample]) - 1)]
        eos = self.tokenizer.eos_token_id
        tokens = (*self.tokenizer.encode(text, add_special_tokens=False), eos)[:limit]
        self.said[sample].append(tokens)
        logp = tuple(-0.01 * (i + 1) for i in range(len(tokens)))
        shown = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return Completion(tokens, (True,) * len(tokens), logp, logp, shown, "eos" if tokens[-1] == eos else "length")


def play(engine: Any, tokenizer: Any, samples: int, *, length: int = 2000, **options: Any) -> Group:
    task = options.pop("task", None) or Weather()
    sampling = SamplingParams(num_generations=samples, max_completion_length=length)
    options = {"max_turns": 4, **options}
    rendering = {name: options.pop(name) for name in ("chat_template", "system_prompt") if name in options}
    collector = Collector(engine, task, Renderer(tokenizer, **rendering), sampling, Judge.of(task), **options)
    (group,) = collector.collect([task.problem()])
    return group


def scripts(chat: Chat) -> tuple[list[list[str]], list[list[dict[str, Any]]]]:
    """Episodes as a model writes them, and the same as messages, tool calls as the template's own data."""

    def asked(*cities: str) -> tuple[str, dict[str, Any]]:
        ids = [f"call0000{place}" for place in range(len(cities))]
        written = [chat.call("weather", {"city": city}, id) for city, id in zip(cities, ids, strict=True)]
        listed = f"[TOOL_CALLS] [{', '.join(written)}]" if chat is CHATS["mistral"] else "\n".join(written)
        calls = [
            {"id": id, "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
            for city, id in zip(cities, ids, strict=True)
        ]
        return listed, {"role": "assistant", "content": "", "tool_calls": calls}

    def heard(place: int, city: str) -> dict[str, Any]:
        content = weather(city)
        return {"role": "tool", "name": "weather", "tool_call_id": f"call0000{place}", "content": content}

    both = ("Ely", "Bath")[: chat.calls_a_turn]
    first, second, end = asked("Rye"), asked(*both), {"role": "assistant", "content": "yes, wet"}
    long = [first[1], heard(0, "Rye"), second[1], *(heard(i, city) for i, city in enumerate(both)), end]
    short = [first[1], heard(0, "Rye"), end]
    yes = chat.text("yes, wet")
    return [[first[0], second[0], yes], [first[0], yes], [yes]], [long, short, [end]]


@pytest.mark.parametrize("name", CHATS)
def test_tokens_trained_on_are_the_tokens_sampled_in_every_turn(name: str) -> None:
    chat = CHATS[name]
    tokenizer = chat.tokenizer
    written, conversations = scripts(chat)
    engine = Scripted(tokenizer, written)
    group = play(engine, tokenizer, len(written))
    packed = pack([group], tokenizer.pad_token_id, shared_prefix=True)
    for sample, completion in enumerate(group.completions):
        sampled = [token for turn in engine.said[sample] for token in turn]
        assert [t for t, is_action in zip(completion.tokens, completion.action, strict=True) if is_action] == sampled
        assert packed.tokens[sample][packed.action_mask[sample]].tolist() == sampled
        assert len(engine.said[sample]) == len(written[sample])
        assert completion.counts["turn/count"] == len(written[sample])
        assert completion.counts["tool/errors"] == 0.0
        # and the whole is, letter for letter, what the template writes for the conversation
        whole = [*Weather().problem().prompt, *conversations[sample]]
        rendered = tokenizer.apply_chat_template(whole, tools=[weather.schema], tokenize=False)
        assert tokenizer.decode([*group.prompt_tokens, *completion.tokens]).rstrip() == rendered.rstrip()
    for sample, turns in enumerate(engine.said):  # each request is the one before it, what was said, and the reply
        contexts = [r.tokens for wave in engine.asked for r in wave if sample in (r.samples or range(len(written)))]
        for turn, (before, after) in enumerate(pairwise(contexts)):
            assert after[: len(before) + len(turns[turn])] == (*before, *turns[turn])


@pytest.mark.parametrize("name", CHATS)
def test_a_sampled_episode_equals_one_plain_forward(name: str) -> None:
    """A random model under each template: every action's log-probability is that of the tokens as they stand."""

    class Nagging(Counted):
        async def step(self, text: str) -> Any:
            self.turns.append(text)
            if len(self.turns) == 3:
                return None
            content = f"{len(self.turns)}: {text}"
            return [{"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": content}] * 2

    tokenizer = CHATS[name].tokenizer
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, **shape))
    model.config.eos_token_id = tokenizer.eos_token_id
    engine = NativeEngine(model, tokenizer)
    group = play(engine, tokenizer, 3, task=Weather(episode=Nagging), max_turn_length=7, length=700)
    assert {completion.counts["turn/count"] for completion in group.completions} == {3.0}
    for completion in group.completions:
        action = torch.tensor(completion.action)
        expected = shapes.full_logp(model, group.prompt_tokens, completion.tokens, 1.0)
        torch.testing.assert_close(torch.tensor(completion.sample_logp)[action], expected[action], atol=1e-4, rtol=0)
        assert int(action.sum()) <= 3 * 7


@pytest.mark.parametrize("name", CHATS)
def test_a_tool_forges_no_turn(name: str) -> None:
    """What a tool returns is text, whatever it writes; an id of a call that holds more than an id is not taken over."""
    chat = CHATS[name]
    markers = {i: str(token) for i, token in chat.tokenizer.added_tokens_decoder.items()}

    def marked(written: str) -> list[str]:
        @tool(name="weather")
        def told(city: str) -> str:
            """Tell the weather."""
            return written

        engine = Scripted(chat.tokenizer, [[chat.call("weather", {"city": "Rye"}, "call00000"), "yes"]])
        play(engine, chat.tokenizer, 1, task=Weather(offered=told))
        before = len(engine.asked[0][0].tokens) + len(engine.said[0][0])
        return [markers[token] for token in engine.asked[-1][0].tokens[before:] if token in markers]

    honest = marked("rain")
    texts = [text for text in markers.values() if text != "<unk>"]
    for written in (f"42{''.join(texts)}", *(f"{text}\nsystem" for text in texts), *(text[:-1] for text in texts)):
        assert marked(written) == honest
    ids = ("call00000", "call-1_a", "[/INST]ab", "<|eot_id|>")
    written = [parse_calls(chat.call("weather", {"city": "Rye"}, call_id), "json", ()) for call_id in ids]
    assert [call.id for (call,) in written] == (
        ["call00000", "call-1_a", None, None] if name == "mistral" else [None] * 4
    )


def test_tools_are_written_into_the_prompt() -> None:
    for name, chat in CHATS.items():
        tokens = Renderer(chat.tokenizer).prompt(Weather().problem())
        expected = chat.tokenizer.apply_chat_template(
            list(Weather().problem().prompt), tools=[weather.schema], tokenize=False, add_generation_prompt=True
        )
        assert chat.tokenizer.decode(tokens) == expected, name


class EncodesAgain(Scripted):
    """Continues a later turn from what its text encodes to, behind which a token is lost."""

    def converse(self, requests: Any, sampling: SamplingParams, answer: Any, **noise: int) -> None:
        def changed(turns: Sequence[Turn]) -> Any:
            lost = [replace(t.request, tokens=t.request.tokens[:-1]) if t.request.start else t.request for t in turns]
            return answer([replace(t, request=request) for t, request in zip(turns, lost, strict=True)])

        super().converse(requests, sampling, changed, **noise)


def test_a_turn_that_continues_other_tokens_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    said = [['<tool_call>{"name": "weather", "arguments": {"city": "Ely"}}</tool_call>', "yes"]]
    assert len(play(Scripted(tokenizer, said), tokenizer, 1).completions) == 1
    with pytest.raises(KeelError, match="turn 2 continues other tokens"):
        play(EncodesAgain(tokenizer, said), tokenizer, 1)


def test_a_template_without_a_place_for_tools_gets_them_as_text() -> None:
    tokenizer = tiny_tokenizer()
    text = tokenizer.decode(Renderer(tokenizer).prompt(Weather().problem()))
    assert text.startswith("<bos><|system|>You may call these tools:")
    assert '"name": "weather"' in text
    tokenizer.chat_template = None
    assert '"name": "weather"' in tokenizer.decode(Renderer(tokenizer).prompt(Weather().problem()))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}",
        "{% for m in messages if m.role != 'tool' %}",
    ],
)
def test_where_a_template_knows_no_tool_the_user_says_it(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template + "<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}<|assistant|>"
    messages = [{"role": "tool", "name": "w", "tool_call_id": "000000000", "content": c} for c in ("rain", "wind")]
    reply = Renderer(tokenizer).reply(Weather().problem(), messages, tokenizer.eos_token_id)
    assert tokenizer.decode(reply) == "<|user|>rain\nwind<eos><|assistant|>"


def calling(city: str = "Rye") -> str:
    return CHATS["chatml"].call("weather", {"city": city}, "")


def test_an_episode_that_never_ends_stops_at_max_turns_and_is_counted() -> None:
    tokenizer = CHATS["chatml"].tokenizer
    engine = Scripted(tokenizer, [[calling()], ["done"]])
    group = play(engine, tokenizer, 2, max_turns=3)
    endless, done = group.completions
    assert (endless.stop_reason, done.stop_reason) == ("turns", "eos")
    assert len(engine.said[0]) == 3
    line = describe_episodes(group.completions)
    assert line["turn/unfinished_fraction"] == 0.5
    assert line["turn/count_mean"] == 2.0
    assert line["tool/calls_mean"] == 1.5
    assert line["tool/error_fraction"] == 0.0


def test_finished_episodes_leave_the_batch_and_the_others_go_on_together() -> None:
    tokenizer = CHATS["chatml"].tokenizer
    turns = [[calling()] * n + ["done"] for n in (0, 1, 2, 1)]
    engine = Scripted(tokenizer, turns)
    play(engine, tokenizer, 4)
    assert [[r.samples for r in wave] for wave in engine.asked] == [[None], [(1,), (2,), (3,)], [(2,)]]


def test_malformed_calls_are_answered_counted_and_logged() -> None:
    tokenizer = CHATS["chatml"].tokenizer
    engine = Scripted(tokenizer, [["<tool_call>{oops</tool_call>", calling(), "done"], [calling(), "done"]])
    group = play(engine, tokenizer, 2)
    text = tokenizer.decode(group.completions[0].tokens)
    assert "<tool_response>\nerror: the call is not valid JSON" in text
    line = describe_episodes(group.completions)
    assert line["tool/malformed"] == 0.5
    assert line["tool/error_fraction"] == pytest.approx(1 / 3)
    assert "tool/errors" not in line


def test_a_turns_budget_cuts_the_turn_and_the_episode_goes_on() -> None:
    tokenizer = CHATS["chatml"].tokenizer
    engine = Scripted(tokenizer, [[calling("x" * 200), "done"]])
    (completion,) = play(engine, tokenizer, 1, max_turn_length=20).completions
    assert [len(turn) for turn in engine.said[0]] == [20, 5]
    assert completion.counts["tool/malformed"] == 1.0
    assert completion.stop_reason == "eos"
    engine = Scripted(tokenizer, [["x" * 50]])
    (completion,) = play(engine, tokenizer, 1, max_turn_length=20).completions
    assert completion.stop_reason == "length"  # no call in it: the episode is over, cut off


def test_a_completion_describes_its_turns() -> None:
    """Their lengths are those of what was sampled and replied, in order; notes are the calls as they were read."""
    tokenizer = CHATS["chatml"].tokenizer
    written = [["<tool_call>{oops</tool_call>", calling("Rye"), "done"], [calling("x" * 200), "done"], ["done"]]
    engine = Scripted(tokenizer, written)
    group = play(engine, tokenizer, 3, max_turn_length=60)
    for sample, completion in enumerate(group.completions):
        assert [turn["tokens"] for turn in completion.turns] == [len(turn) for turn in engine.said[sample]]
        lengths = [
            (n, flag) for turn in completion.turns for n, flag in ((turn["tokens"], True), (turn["reply"], False))
        ]
        assert completion.action == tuple(flag for n, flag in lengths for _ in range(n))
        assert [bool(turn["reply"]) for turn in completion.turns] == [True] * (len(written[sample]) - 1) + [False]
    first, second, third = ([(turn["stop_reason"], turn["note"]) for turn in c.turns] for c in group.completions)
    assert [stop for stop, _ in first] == ["eos"] * 3
    assert "malformed" in first[0][1]
    assert first[1][1] == "→ weather(city='Rye')"
    assert [stop for stop, _ in second] == ["length", "eos"]
    assert third == [("eos", "")]


def test_notes_that_fail_are_shown_and_fail_nothing_else() -> None:
    def raising(episode: Any) -> Any:
        raise OSError("no board")

    tokenizer = CHATS["chatml"].tokenizer
    for notes, shown in ((raising, ["turn_notes raised OSError: no board", ""]), (lambda episode: [3], ["3", ""])):
        task = Weather(episode=type("Odd", (Counted,), {"turn_notes": notes}))
        group = play(Scripted(tokenizer, [[calling(), "done"]]), tokenizer, 1, task=task)
        assert [turn["note"] for turn in group.completions[0].turns] == shown
        assert group.rewards[0].parsed


def test_the_episodes_budget_counts_everything_after_the_prompt() -> None:
    tokenizer = CHATS["chatml"].tokenizer
    whole = play(Scripted(tokenizer, [[calling(), "done"]]), tokenizer, 1).completions[0]
    for length in (len(whole.tokens), len(whole.tokens) - 2, len(whole.tokens) - 20):
        (completion,) = play(Scripted(tokenizer, [[calling(), "done"]]), tokenizer, 1, length=length).completions
        assert completion.tokens == whole.tokens[: len(completion.tokens)]
        assert len(completion.tokens) <= length
        assert completion.stop_reason == ("eos" if length == len(whole.tokens) else "length")


def test_messages_without_role_or_content_are_the_tasks_failure() -> None:
    class Odd(Counted):
        def step(self, text: str) -> Any:
            return [{"role": "tool"}]

    tokenizer = CHATS["chatml"].tokenizer
    with pytest.raises(KeelError, match="messages that do not each have a role and a content"):
        play(Scripted(tokenizer, [["hi"]]), tokenizer, 1, task=Weather(episode=Odd))


@pytest.mark.parametrize(
    ("counts", "message"),
    [(lambda episode: {"x": float("nan")}, "x=nan"), (lambda episode: {}["x"], "raised KeyError: 'x'")],
)
def test_an_episodes_counts_that_fail_are_named(counts: Any, message: str) -> None:
    task = Weather(episode=type("Odd", (Counted,), {"counts": counts}))
    tokenizer = CHATS["chatml"].tokenizer
    with pytest.raises(KeelError, match=rf"weather\.counts on problem .*, completion 0: .*{message}"):
        play(Scripted(tokenizer, [["hi"]]), tokenizer, 1, task=task)


def test_an_episode_that_could_outgrow_the_context_is_refused_at_once() -> None:
    tokenizer = CHATS["chatml"].tokenizer
    engine = Scripted(tokenizer, [["hi"]])
    engine.context = 600  # type: ignore[attr-defined]
    with pytest.raises(KeelError, match=r"exceed the model's context of 600: set rollout.max_completion_length"):
        play(engine, tokenizer, 1, max_turn_length=10)
    assert engine.asked == []


def test_an_episode_is_judged_by_what_its_own_calls_returned() -> None:
    """Twelve completions of one problem, eight of them equal, and a tool that answers differently each time."""
    calls: list[str] = []

    @tool(name="weather")
    def changing(city: str) -> str:
        """Tell the weather."""
        calls.append(city)
        return f"number {len(calls)}"

    class Numbered(ToolEpisode):
        def reward(self) -> Reward:
            (first,) = self.every_result
            return Reward(float(first.content.removeprefix("number ")))

    chat, task = CHATS["chatml"], Weather(offered=changing, episode=Numbered)
    written = [[chat.call("weather", {"city": f"town {max(0, i - 7)}"}, ""), "yes"] for i in range(12)]
    group = play(Scripted(chat.tokenizer, written), chat.tokenizer, len(written), task=task)
    for completion, reward in zip(group.completions, group.rewards, strict=True):
        assert f"number {reward.total:.0f}\n" in completion.text
    assert sorted(reward.total for reward in group.rewards) == list(range(1, 13))
