"""Episodes: one a completion, stepped once a turn, side by side where they are slow, and always closed."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import keel
from keel.base.errors import KeelError
from keel.base.types import Completion, Problem, Reward
from keel.envs import Episode, Task
from keel.envs.base import play_turns
from keel.envs.calls import LOOP, HungCalls, TooManyHungCalls
from keel.envs.episode import EpisodeRunner, close_sync, step_sync
from keel.envs.judge import Judge
from keel.envs.mixture import mixture
from keel.envs.registry import build_task
from keel.envs.rewards import wrap
from keel.envs.validity import check
from keel.models.tiny import tiny_tokenizer
from keel.recipes.chess import matches
from keel.rollout.collect import Collector
from keel.rollout.engine import Engine
from keel.rollout.render import Renderer
from keel.rollout.request import Request
from keel.rollout.sampling import SamplingParams
from trainer.small import small_config

from .playing import replies

TOKENIZER = tiny_tokenizer()


class Says(Engine):
    """An engine whose completions say the next line of a script each."""

    def __init__(self, *scripts: Sequence[str]) -> None:
        self.scripts = [iter(script) for script in scripts]
        self.passes: list[list[int]] = []  # which samples share a pass

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> list[list[Completion]]:
        samples = [list(request.drawn(sampling)) for request in requests]
        self.passes.append([sample for some in samples for sample in some])
        return [[self._say(next(self.scripts[sample])) for sample in some] for some in samples]

    def _say(self, text: str) -> Completion:
        ids = (*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id)
        return Completion(ids, (True,) * len(ids), (0.0,) * len(ids), (0.0,) * len(ids), text, "eos")


class Box(Episode):
    """Holds what it was told; ends at `stop`, fails at `fail`, waits at `wait` until somebody says `go`."""

    made: ClassVar[list[Box]] = []
    go: asyncio.Event

    def __init__(self) -> None:
        self.told: list[str] = []
        self.closed = 0
        Box.made.append(self)

    async def step(self, text: str) -> str | None:
        self.told.append(text)
        if text == "fail":
            raise OSError("the box is broken")
        if text == "wait":
            await Box.go.wait()
        if text == "go":
            Box.go.set()
        return None if text == "stop" else f"{len(self.told)} told\n"

    def reward(self) -> Reward:
        return Reward(float(len(self.told)), {"first": float(self.told[0] == "a")})

    def counts(self) -> dict[str, float]:
        return {"box/told": float(len(self.told))}

    async def close(self) -> None:
        self.closed += 1


class Boxes(Task):
    name = "boxes"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [Problem(f"{step}/{i}", f"box {i}\n") for i in range(count)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [Problem(f"held/{i}", f"box -{i}\n") for i in range(count)]

    def gold(self, problem: Problem) -> str:
        return "stop"

    def start(self, problem: Problem) -> Episode:
        return Box()


@pytest.fixture(autouse=True)
def _no_boxes() -> None:
    Box.made.clear()

    async def event() -> asyncio.Event:
        return asyncio.Event()

    ((Box.go, _),) = LOOP.run([event()], None, HungCalls())


def rollout(engine: Says, task: Task | None = None, **options: Any) -> Any:
    sampling = SamplingParams(num_generations=len(engine.scripts), max_completion_length=200)
    options = {"max_turns": 3, **options}
    task = task or Boxes()
    options.setdefault("judge", Judge.of(task))
    (group,) = Collector(engine, task, Renderer(TOKENIZER), sampling, **options).collect(task.sample(1, seed=0, step=0))
    return group


def test_two_completions_of_one_problem_have_two_boxes() -> None:
    group = rollout(Says(["a", "b", "stop"], ["a", "stop"], ["a", "b", "stop"]))
    assert [box.told for box in Box.made] == [["a", "b", "stop"], ["a", "stop"], ["a", "b", "stop"]]
    assert [reward.total for reward in group.rewards] == [3.0, 2.0, 3.0]
    assert [completion.counts["box/told"] for completion in group.completions] == [3.0, 2.0, 3.0]
    assert group.completions[1].text == "a\n1 told\n\nstop"
    assert [box.closed for box in Box.made] == [1, 1, 1]


def test_every_turn_is_stepped_once_the_last_one_too() -> None:
    """One that max_turns ends, one that the budget ends, and one turn alone."""
    group = rollout(Says(["a", "b"], ["a", "stop"]), max_turns=2)
    assert [box.told for box in Box.made] == [["a", "b"], ["a", "stop"]]
    assert [completion.stop_reason for completion in group.completions] == ["turns", "eos"]
    Box.made.clear()
    rollout(Says(["x" * 199]), max_turns=3)
    rollout(Says(["a"]), max_turns=1)
    assert [len(box.told) for box in Box.made] == [1, 1]


@pytest.mark.parametrize("on_error", ["stop", "zero", "skip_group"])
def test_boxes_are_closed_where_something_fails(on_error: str) -> None:
    judge = Judge.of(Boxes(), on_error=on_error)
    engine = Says(["a", "stop"], ["fail"])
    if on_error == "zero":
        assert [reward.total for reward in rollout(engine, judge=judge).rewards] == [2.0, 0.0]
    else:
        with pytest.raises(KeelError, match=r"boxes\.step on problem '0/0', completion 1: raised OSError: the box"):
            rollout(engine, judge=judge)
    assert [box.closed for box in Box.made] == [1, 1]


def test_a_reward_that_fails_leaves_no_box_open() -> None:
    def bad(problem: Problem, text: str) -> float:
        raise ValueError("no")

    with pytest.raises(KeelError, match="raised ValueError: no"):
        rollout(Says(["stop"]), judge=Judge([wrap(bad)]))
    assert [box.closed for box in Box.made] == [1]


class Unopened(Boxes):
    def start(self, problem: Problem) -> Episode:
        raise OSError("no more boxes")


class NoEpisode(Boxes):
    def start(self, problem: Problem) -> Any:
        return "a box"


class Sticky(Boxes):
    def start(self, problem: Problem) -> Episode:
        return StickyBox()


class StickyBox(Box):
    async def close(self) -> None:
        raise OSError("it sticks")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Unopened(), r"boxes\.start on problem '0/0', completion 0: raised OSError: no more boxes"),
        (NoEpisode(), r"boxes\.start on .*: returned a str, not a keel\.envs\.Episode"),
        (Sticky(), r"boxes\.close on .*: raised OSError: it sticks"),
    ],
)
def test_what_fails_around_the_turns_is_named(task: Task, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        rollout(Says(["stop"]), task)


def test_a_reward_of_the_users_finds_the_episode() -> None:
    def inside(problem: Problem, text: str, turns: Any) -> float:
        return 10.0 * len(turns.episode.told)

    group = rollout(Says(["a", "stop"], ["stop"]), judge=Judge([wrap(inside)]))
    assert [reward.total for reward in group.rewards] == [20.0, 10.0]


@pytest.mark.parametrize("entry", [{"name": "cosine", "of": "task", "max_length": 4}, {"name": "task"}])
def test_rewards_made_of_the_tasks_own_ask_the_episode_and_play_nothing_again(entry: dict[str, Any]) -> None:
    rollout(Says(["a", "stop"]), judge=Judge.of(Boxes(), [entry]))
    assert len(Box.made) == 1


def test_coroutines_of_many_episodes_run_side_by_side() -> None:
    """The first waits for what the last one says: one after the other, none would end."""
    task = Boxes()
    problems = task.sample(4, seed=0, step=0)
    told = replies(task, list(zip(problems, ["wait", "wait", "a", "go"], strict=True)), timeout_s=20.0)
    assert told == ["1 told\n"] * 4


def test_plain_steps_run_one_episode_at_a_time_in_order() -> None:
    order: list[str] = []

    class Plain(Box):
        def step(self, text: str) -> Any:  # type: ignore[override]
            order.append(f"{text} begins")
            time.sleep(0.01)
            order.append(f"{text} ends")

    class PlainBoxes(Boxes):
        def start(self, problem: Problem) -> Episode:
            return Plain()

    task = PlainBoxes()
    problems = task.sample(6, seed=0, step=0)
    replies(task, [(problem, str(number)) for number, problem in enumerate(problems)])
    assert order == [f"{number} {what}" for number in range(6) for what in ("begins", "ends")]


@pytest.mark.parametrize("overlap", [False, True])
def test_sampling_goes_on_beside_slow_tools_only_where_that_is_asked_for(overlap: bool) -> None:
    """Sample 1 waits for what sample 0 says in its second turn: without overlap, that would be never."""
    scripts = ["a", "go", "stop"], ["wait", "stop"]
    if not overlap:
        with pytest.raises(KeelError, match=r"boxes\.step on .*completion 1: did not return"):
            rollout(Says(*scripts), judge=Judge.of(Boxes(), timeout_s=0.3))
        return
    engine = Says(*scripts)
    group = rollout(engine, overlap_tools=True)
    assert engine.passes == [[0, 1], [0], [1], [0]]
    assert [reward.total for reward in group.rewards] == [3.0, 2.0]


def test_which_episodes_share_a_pass_does_not_depend_on_the_clock() -> None:
    """Tools of very different speed: every pass has all episodes that go on."""

    class Slow(Box):
        async def step(self, text: str) -> str | None:
            await asyncio.sleep(0.05 if text == "b" else 0.0)
            return await super().step(text)

    class SlowBoxes(Boxes):
        def start(self, problem: Problem) -> Episode:
            return Slow()

    engine = Says(["b", "a", "stop"], ["a", "b", "stop"], ["b", "stop"])
    rollout(engine, SlowBoxes())
    assert engine.passes == [[0, 1, 2], [0, 1, 2], [0, 1]]


def test_a_mixture_plays_each_problem_in_its_own_task() -> None:
    task = mixture([Boxes(), build_task("arithmetic")], [0, 1])
    group = rollout(Says(["7"]), task)
    assert Box.made == []
    assert group.completions[0].counts == {"turn/count": 1.0}


@pytest.mark.parametrize(
    ("task", "turn"),
    [
        (
            {"name": "tools", "task": {"name": "arithmetic"}, "tools": [f"{__name__}:note"], "format": "tags"},
            "<note>a</note>",
        ),
        ({"name": "multihop", "retriever": "golden"}, "<retrieve> a </retrieve>"),
    ],
)
def test_what_one_episode_was_told_is_no_other_episodes(task: dict[str, Any], turn: str) -> None:
    made = build_task(**task)
    (problem,) = made.sample(1, seed=0, step=0)
    first: Any = made.start(problem)
    second: Any = made.start(problem)
    assert step_sync(first, turn) == step_sync(first, turn)
    assert (first.counts()["tool/calls"], second.counts()["tool/calls"]) == (2.0, 0.0)
    assert (len(first.turns), second.turns, second.results) == (2, [], [])


def note(text: str) -> str:
    """Note a text."""
    return text


def test_two_games_are_two_boards() -> None:
    first, second = (matches.PlayedGame(0, True, matches.random_mover(0)) for _ in range(2))
    answer = step_sync(first, "e2e4")
    assert [move.uci() for move in first.board.move_stack] == ["e2e4", answer]
    assert not second.board.move_stack
    assert step_sync(first, "e2e4") is None
    assert (first.reward(), first.reason, second.result) == (0.0, "illegal move e2e4", None)


class SlowlyMade(Boxes):
    """Boxes that take their time to be made."""

    async def start(self, problem: Problem) -> Episode:  # type: ignore[override]
        await asyncio.sleep(0)
        return Box()


def test_gold_turns_of_episodes_that_are_started_later_are_judged() -> None:
    task = SlowlyMade()
    (problem,) = task.held_out(1)
    assert task.reward(problem, ["a", "b", "stop"]).total == 3.0
    with play_turns(task, problem, ["a", "stop", "never said"]) as (_, answered):
        assert answered == ["1 told\n", None]
    assert [box.closed for box in Box.made] == [1, 1]


def environment() -> str:
    """The code that docs/environments.md shows for an environment of one's own."""
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    return next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "(Episode)" in block)


@pytest.mark.slow
def test_an_environment_of_ones_own_takes_twenty_lines_and_trains(tmp_path: Path) -> None:
    code = environment()
    written = [line for line in code.splitlines() if line.strip() and not line.startswith(("from ", "import "))]
    assert len(written) <= 20
    made: dict[str, Any] = {}
    exec(code, made)
    task = made["Guess"]()
    check(task, count=8)
    settings = [f"run.dir={tmp_path}", "run.max_steps=1", "rollout.max_turns=2", "rollout.max_completion_length=24"]
    assert keel.train(small_config(*settings), task=task).steps == 1


def eventually(happened: Callable[[], bool]) -> bool:
    """Whether something that another thread does comes about."""
    until = time.monotonic() + 10
    while not happened() and time.monotonic() < until:
        time.sleep(0.01)
    return happened()


class Awaited(Boxes):
    """Boxes that are opened when somebody says so."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def start(self, problem: Problem) -> Episode:
        self.begun.set()
        self.go.wait(20)
        return Box()


def test_a_box_that_is_opened_too_late_is_closed() -> None:
    task = Awaited()
    with pytest.raises(KeelError, match=r"boxes\.start on .*: did not return within 0\.1 s"):
        rollout(Says(["a"]), task, judge=Judge.of(task, timeout_s=0.1))
    assert Box.made == []
    task.go.set()
    assert eventually(lambda: [box.closed for box in Box.made] == [1])


@pytest.mark.parametrize("timeout_s", [20.0, None])
def test_a_box_that_is_being_opened_when_the_rollout_ends_is_closed(timeout_s: float | None) -> None:
    task = Awaited()
    runner = EpisodeRunner(task.start, timeout_s, HungCalls())
    runner.submit([((0, number), Problem("p", "?"), "a") for number in range(3)])
    assert task.begun.wait(10)
    threading.Timer(0.05, task.go.set).start()
    runner.close()
    assert eventually(lambda: [box.closed for box in Box.made] == [1])
    assert (Box.made[0].told, runner.episodes) == ([], {})


@pytest.mark.parametrize("when", ["start", "step"])
def test_ctrl_c_leaves_no_box_open(when: str) -> None:
    task, main = Awaited(), threading.get_ident()
    if when == "step":
        task.go.set()

    def interrupt() -> None:
        task.begun.wait(10)
        eventually(lambda: when == "start" or (len(Box.made) == 2 and Box.made[1].told == ["wait"]))
        threading.Timer(0.1, task.go.set).start()
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            rollout(Says(["a", "stop"], ["wait"]), task)
    finally:
        signal.signal(signal.SIGINT, before)
    assert eventually(lambda: [box.closed for box in Box.made] == ([1] if when == "start" else [1, 1]))


def test_a_step_cleans_up_before_its_box_is_closed() -> None:
    order: list[str] = []

    class Tidy(Box):
        async def step(self, text: str) -> str | None:
            try:
                await super().step(text)
            finally:
                await asyncio.sleep(0.1)
                order.append("cleaned up")
            return None

        async def close(self) -> None:
            order.append("closed")

    runner = EpisodeRunner(lambda problem: Tidy(), 20.0, HungCalls())
    runner.submit([((0, 0), Problem("p", "?"), "wait")])
    assert eventually(lambda: Box.made != [] and Box.made[0].told == ["wait"])
    runner.close()
    assert order == ["cleaned up", "closed"]


def test_plain_boxes_are_closed_one_at_a_time() -> None:
    running, most = 0, 0

    class Plain(Box):
        def close(self) -> Any:  # type: ignore[override]
            nonlocal running, most
            running += 1
            most = max(most, running)
            time.sleep(0.02)
            running -= 1
            self.closed += 1

    class PlainBoxes(Boxes):
        def start(self, problem: Problem) -> Episode:
            return Plain()

    rollout(Says(*[["stop"]] * 6), PlainBoxes())
    assert ([box.closed for box in Box.made], most) == ([1] * 6, 1)


def test_a_close_of_the_object_itself_is_called() -> None:
    closed: list[str] = []

    class Bare(Episode):
        def step(self, text: str) -> None:
            return None

        def reward(self) -> float:
            return 1.0

    class BareBoxes(Boxes):
        def start(self, problem: Problem) -> Episode:
            episode = Bare()
            episode.close = lambda: closed.append("closed")  # type: ignore[method-assign]
            return episode

    rollout(Says(["stop"]), BareBoxes())
    assert closed == ["closed"]


class Failing(Boxes):
    """Plain steps that raise, or hang until somebody says so."""

    def __init__(self, hang: bool = False) -> None:
        self.stepped, self.go, self.hang = list[str](), threading.Event(), hang

    def start(self, problem: Problem) -> Episode:
        task = self

        class Plain(Box):
            def step(self, text: str) -> Any:  # type: ignore[override]
                task.stepped.append(text)
                if task.hang:
                    task.go.wait(20)
                raise OSError("no")

        return Plain()


def test_the_first_failure_that_ends_the_run_is_the_last_step() -> None:
    task = Failing()
    with pytest.raises(KeelError, match=r"completion 0: raised OSError: no"):
        rollout(Says(*[["a"]] * 16), task, judge=Judge.of(task, timeout_s=20.0))
    assert len(task.stepped) < 16
    assert [box.closed for box in Box.made] == [1] * len(Box.made)


def test_plain_steps_that_hang_end_the_run_above_max_hung() -> None:
    task = Failing(hang=True)
    with pytest.raises(TooManyHungCalls, match="3 calls hang"):
        rollout(Says(*[["a"]] * 16), task, judge=Judge.of(task, timeout_s=0.05, on_error="zero", max_hung=2))
    task.go.set()
    assert 3 <= len(task.stepped) < 16


def test_failures_that_do_not_end_the_run_are_waited_for() -> None:
    task = Failing()
    judge = Judge.of(task, on_error="zero")
    assert [reward.total for reward in rollout(Says(*[["a"]] * 6), task, judge=judge).rewards] == [0.0] * 6
    assert (len(task.stepped), judge.counts) == (6, {"boxes.step": 6})


class Exits(Episode):
    async def step(self, text: str) -> str:
        if text == "fail":
            raise ValueError("no")
        sys.exit(3)

    async def close(self) -> None:
        sys.exit(4)


def test_a_coroutine_that_exits_does_not_take_the_loop_with_it() -> None:
    with pytest.raises(SystemExit, match="3"):
        step_sync(Exits(), "a")
    with pytest.raises(SystemExit, match="4"):
        close_sync(Exits())
    with pytest.raises(ValueError, match=r"^no$"):
        step_sync(Exits(), "fail")
    assert step_sync(Box(), "a") == "1 told\n"


def test_a_loop_that_runs_already_does_not_matter() -> None:
    """As in a notebook."""

    async def cell() -> list[float]:
        return [reward.total for reward in rollout(Says(["a", "stop"], ["stop"])).rewards]

    assert asyncio.run(cell()) == [2.0, 1.0]
    assert [box.closed for box in Box.made] == [1, 1]


class Uncounted(Boxes):
    """Boxes whose second one raises, or hangs, when it is asked for its figures."""

    def __init__(self, hang: bool) -> None:
        self.hang, self.go = hang, threading.Event()

    def start(self, problem: Problem) -> Episode:
        task = self

        class Odd(Box):
            def counts(self) -> dict[str, float]:
                if len(self.told) == 2 and task.hang:
                    task.go.wait(20)
                if len(self.told) == 2:
                    raise OSError("no figures")
                return super().counts()

        return Odd()


@pytest.mark.parametrize("hang", [False, True])
@pytest.mark.parametrize("on_error", ["stop", "zero", "skip_group"])
def test_counts_that_fail_are_failures_like_others(on_error: str, hang: bool) -> None:
    task, engine = Uncounted(hang), Says(["stop"], ["a", "stop"], ["stop"])
    judge = Judge.of(task, on_error=on_error, timeout_s=0.2 if hang else 20.0)
    cause = "did not return within" if hang else "raised OSError: no figures"
    if on_error == "zero":
        group = rollout(engine, task, judge=judge)
        assert [reward.total for reward in group.rewards] == [1.0, 0.0, 1.0]
        assert [one.counts for one in group.completions][1:] == [
            {"turn/count": 2.0},
            {"turn/count": 1.0, "box/told": 1.0},
        ]
        assert judge.counts == {"boxes.counts": 1}
    else:
        with pytest.raises(KeelError, match=rf"boxes\.counts on problem '0/0', completion 1: {cause}"):
            rollout(engine, task, judge=judge)
    task.go.set()
    assert [box.closed for box in Box.made] == [1] * 3
