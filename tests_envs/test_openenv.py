"""openenv itself: what a rollout sees and earns is what its server gives; a server that fails is recorded."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openenv.core import EnvClient, GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State
from openenv_digits import Digits, Guess, Serving, Told
from short_runs import lines, small

import keel
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.cli import main
from keel.envs.base import Task, play_turns
from keel.envs.calls import CallFailed, HungCalls
from keel.envs.episode import EpisodeRunner, step_sync
from keel.envs.registry import build_task
from keel.envs.validity import check

PLAYER = "openenv_digits:player"


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    """Starts servers, and ends them."""
    started: list[Serving] = []

    def start(*args: Any, **more: Any) -> Serving:
        started.append(Serving(*args, **more))
        return started[-1]

    yield start
    for server in started:
        server.end()


def spec(server: Serving, **more: Any) -> dict[str, Any]:
    return {"name": "openenv", "url": server.url, "action": "digit", "observation": "text", "player": PLAYER, **more}


def first(task: Task) -> Problem:
    return task.sample(1, seed=0, step=0)[0]


def failure(task: Task, *turns: str) -> str:
    """Why the last of these turns fails in a rollout."""
    runner = EpisodeRunner(task.start, 10.0, HungCalls())
    for turn in turns:
        runner.submit([((0, 0), first(task), turn)])
        reply = runner.ready()[0, 0]
    runner.close()
    assert isinstance(reply, CallFailed), reply
    return str(reply)


def test_it_says_and_pays_what_the_client_says_and_pays(serve: Callable[..., Serving]) -> None:
    server = serve()
    task = build_task(**spec(server))

    async def played(seed: int) -> list[tuple[str, float, bool]]:
        async with GenericEnvClient(base_url=server.url) as client:
            results = [await client.reset(seed=seed)]
            while not results[-1].done:
                results.append(await client.step({"digit": 5}))
        return [(r.observation["text"], r.reward or 0.0, r.done) for r in results]

    for problem in task.sample(6, seed=3, step=0):
        (opening, _, _), *expected = asyncio.run(played(problem.info["seed"]))
        assert problem.prompt == [{"role": "user", "content": opening}]
        with play_turns(task, problem, ["5"] * len(expected)) as (episode, replies):
            assert episode.reward().total == sum(reward for _, reward, _ in expected)
        told = [[{"role": "user", "content": text}] for text, _, done in expected if not done]
        assert replies == [*told, None]


def test_it_is_a_sound_task_and_closes_its_sessions(serve: Callable[..., Serving]) -> None:
    server = serve(sessions=4)  # check has few at a time
    check(build_task(**spec(server)), count=2)


def test_the_model_reads_all_fields_unless_one_is_named(serve: Callable[..., Serving]) -> None:
    server = serve()
    (message,) = first(build_task("openenv", url=server.url, action="digit")).prompt
    assert json.loads(message["content"]) == {"text": "guess a digit", "low": 0, "high": 9}
    with pytest.raises(KeelError, match=r"task\.observation is 'txt': .*text, low, high"):
        build_task("openenv", url=server.url, action="digit", observation="txt")


def test_an_action_that_is_none_is_told_and_counted(serve: Callable[..., Serving]) -> None:
    task = build_task(**spec(serve()))
    with play_turns(task, first(task), ["five", "4"]) as (episode, replies):
        assert replies[0] == [{"role": "user", "content": "invalid action"}]
        assert episode.counts() == {"env/invalid_actions": 1.0}


class DigitsClient(EnvClient[Guess, Told, State]):
    """An environment's own client, with its own classes."""

    def _step_payload(self, action: Guess) -> dict[str, Any]:
        return {"digit": action.digit}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Told]:
        seen = Told(**payload["observation"])
        return StepResult(observation=seen, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


def guess(text: str) -> Guess:
    return Guess(digit=int(text))


def shout(told: Told) -> str:
    return told.text.upper()


def test_an_environments_own_client_and_functions(serve: Callable[..., Serving]) -> None:
    own = {"client": f"{__name__}:DigitsClient", "action": f"{__name__}:guess"}
    server = serve()
    typed = build_task(**spec(server, **own, observation=f"{__name__}:shout", player=None))
    assert first(typed).prompt == [{"role": "user", "content": "GUESS A DIGIT"}]
    plain, by_field = build_task(**spec(server)), build_task(**spec(server, **own))
    turns = plain.gold_turns(first(plain))
    assert {task.reward(first(task), turns).total for task in (typed, by_field, plain)} == {1.0}


# ------------------------------------------------------------------------------------------------ failures


class Breaks(Digits):
    """Raises in the second turn, where its seed is a multiple of three."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Told:
        self.breaks = (seed or 0) % 3 == 0
        return super().reset(seed)

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Told:
        told = super().step(action)
        if self.turns == 2 and self.breaks:
            raise ValueError("out of digits")
        return told


class Slow(Digits):
    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Told:
        time.sleep(0.6)
        return super().step(action)


class Long(Digits):
    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Told:
        return Told(text="x" * (1 << 20))


class Restless(Digits):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Told:
        super().reset(seed)
        return Told(text=str(time.perf_counter()))


class Eager(Digits):
    """Plays before it was reset."""

    digit, low, high, turns = 0, 0, 9, 0


def test_a_server_that_restarts_does_not_go_on_with_another_environment(serve: Callable[..., Serving]) -> None:
    """The client connects again by itself, and its next step would be one in a new environment, which pays for it."""
    server = serve(Eager)
    task = build_task(**spec(server))
    episode = task.start(first(task))
    step_sync(episode, "0")
    server.end()
    serve(Eager, port=server.port)
    with pytest.raises(ConnectionError, match="connection to the server"):
        step_sync(episode, "0")
    assert step_sync(task.start(first(task)), "0") == [{"role": "user", "content": "higher"}]


@pytest.mark.parametrize(
    ("environment", "options", "names"),
    [
        (Slow, {"timeout_s": 0.2}, r"0\.2 s \(task\.timeout_s\)"),
        (Long, {}, "1009|too big|exceeds"),
        (Breaks, {}, "out of digits"),
    ],
)
def test_a_failure_in_an_episode_is_one_line(
    serve: Callable[..., Serving], environment: type[Digits], options: dict[str, Any], names: str
) -> None:
    task = build_task(**spec(serve(environment), **options))
    if environment is Breaks:
        problem = next(p for p in task.sample(40, seed=0, step=0) if p.info["seed"] % 3 == 0)
        episode = task.start(problem)
        step_sync(episode, "-1")
        with pytest.raises(RuntimeError, match=names):
            step_sync(episode, "-1")
        return
    said = failure(task, "-1")
    assert re.search(names, said), said
    assert "\n" not in said


def test_a_full_server_says_so(serve: Callable[..., Serving]) -> None:
    task = build_task(**spec(serve(sessions=1)))
    problem, held = first(task), []
    time.sleep(0.2)  # the session of the check ends
    held.append(task.start(problem))
    step_sync(held[0], "-1")
    with pytest.raises(RuntimeError, match="CAPACITY"):
        step_sync(task.start(problem), "-1")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"url": "localhost"}, "task.url"),
        ({"url": "http://127.0.0.1:1"}, "task.url"),
        ({"action": None}, "action"),
        ({"client": "openenv_digits:nothing"}, "task.client"),
        ({"action": "openenv_digits:nothing"}, "task.action"),
        ({"headers": {"Authorization": "$NOWHERE_AT_ALL"}}, "NOWHERE_AT_ALL"),
    ],
    ids=str,
)
def test_what_cannot_be_made_is_one_line(serve: Callable[..., Serving], more: dict[str, Any], names: str) -> None:
    with pytest.raises(KeelError) as refused:
        build_task(**spec(serve(), **more))
    assert names in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_environment_that_does_not_repeat_is_refused(serve: Callable[..., Serving]) -> None:
    with pytest.raises(KeelError, match="same seed"):
        build_task(**spec(serve(Restless)))


def test_the_package_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(KeelError, match=r"needs openenv\.core: pip install 'keel-rl\[openenv\]'"):
        build_task("openenv", url="http://127.0.0.1:1", action="digit")


def test_the_secret_is_sent_and_shown_nowhere(serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    from openenv.core.env_server.http_server import create_fastapi_app

    app, seen = create_fastapi_app(Digits, Guess, Told, max_concurrent_envs=8), list[str]()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            seen.append(dict(scope["headers"]).get(b"authorization", b"").decode())
            if seen[-1] != "Bearer right-one-1":
                await send({"type": "websocket.close", "code": 1008})
                return
        await app(scope, receive, send)

    server = serve(app=guarded)
    headers = {"Authorization": "Bearer $ENV_TOKEN"}
    monkeypatch.setenv("ENV_TOKEN", "right-one-1")
    build_task(**spec(server, headers=headers))
    monkeypatch.setenv("ENV_TOKEN", "wrong-one-2")
    with pytest.raises(KeelError, match="403") as refused:
        build_task(**spec(server, headers=headers))
    assert "wrong-one-2" not in str(refused.value)
    assert set(seen) == {"Bearer right-one-1", "Bearer wrong-one-2"}


# ------------------------------------------------------------------------------------------------ runs


def test_check_task_runs(serve: Callable[..., Serving], capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"task.{name}={value}" for name, value in spec(serve()).items() if name != "name"]
    assert main(["check-task", "openenv", *options, "--samples", "2"]) == 0, capsys.readouterr().out


def test_a_resumed_run_is_the_run_in_one_go(serve: Callable[..., Serving], tmp_path: Path) -> None:
    start = {"steps": 4, "batch_size": 4}
    server = serve()
    whole = keel.train(small(tmp_path / "whole", spec(server), warmstart=start)).directory
    part = small(tmp_path / "part", spec(server), warmstart=start)
    keel.train(part, overrides=["run.max_steps=2"])
    resumed = keel.train(part, overrides=[f"task.url={serve().url}"], resume=True).directory
    assert lines(resumed, "metrics.jsonl") == lines(whole, "metrics.jsonl")
    assert lines(whole, "metrics.jsonl")[-1]["turn/count_mean"] >= 1


def any_digit(text: str) -> dict[str, int]:
    return {"digit": sum(map(ord, text)) % 10}


def test_an_environment_that_breaks_is_recorded_and_the_run_goes_on(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    breaks = spec(serve(Breaks), action=f"{__name__}:any_digit")
    config = small(tmp_path, breaks, reward={"on_error": "skip_group"})
    config["run"]["max_steps"], config["rollout"]["prompts_per_step"] = 2, 8
    run = keel.train(config).directory
    assert len(lines(run, "metrics.jsonl")) == 2
    failed = [event["message"] for event in lines(run, "events.jsonl") if event["kind"] == "reward/failed"]
    assert failed
    assert all("out of digits" in message for message in failed)
