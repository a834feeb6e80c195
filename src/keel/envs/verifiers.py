"""`verifiers:TASKSET`: tasksets of the package verifiers (0.4), whose programs call the model through an endpoint."""

from __future__ import annotations

import asyncio
import atexit
import importlib.metadata
import itertools
import json
import logging
import queue
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from keel.base.errors import KeelError, first_line
from keel.base.parts import add_working_folder
from keel.base.types import Completion, Message, Problem, Reward
from keel.envs.base import Task
from keel.envs.calls import LOOP, CallFailed, HungCalls
from keel.envs.dataset import Dataset, NoGrader
from keel.envs.endpoint import Endpoint, GenerateBody, ModelAccess, context_exceeded
from keel.envs.episode import ASYNC_AT_ONCE, Episode, PlayedEpisode
from keel.envs.games import LONGEST_GAME, Player, imported, need, required_player
from keel.envs.problems import HELD_OUT_FRACTION, check_split, split_held_out

if TYPE_CHECKING:
    from keel.envs.base import Play
    from keel.envs.verifiers_chat import Rendering

SUPPORTED = "0.4."
_numbers = itertools.count()


@dataclass(frozen=True)
class VerifiersTask(Dataset):
    """Tasks of a taskset. Its environment, built from `env_data`, plays an episode and calls the model."""

    env_data: Mapping[str, Any] = field(default_factory=dict)
    tasks: Mapping[str, Any] = field(default_factory=dict)
    player: Player | None = None
    success: float = 1.0

    plays = True
    trusted = False

    @property
    def prompts_repeat(self) -> bool:
        problems = (*self.train, *self.held)
        return len({json.dumps(problem.prompt) for problem in problems}) < len(problems)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Task.reward(self, problem, turns)

    def start(self, problem: Problem) -> Episode:
        """Start an episode whose model turns are passed to it one by one."""
        return Scripted(self, problem)

    def gold(self, problem: Problem) -> str:
        return self.gold_turns(problem)[-1]

    def gold_turns(self, problem: Problem) -> list[str]:
        """The turns of `player`, played on a new episode."""
        player = required_player(self.name, self.player)
        episode, observation, turns = Scripted(self, problem), _contents(problem.prompt), list[str]()
        try:
            while len(turns) < LONGEST_GAME:
                turns.append(player(self.tasks[problem.info["task"]], observation))
                reply = episode.step(turns[-1])
                if reply is None:
                    return turns
                observation = _contents(reply)
        finally:
            episode.close()
        raise KeelError(f"{self.name}: task.player did not finish its episode within {LONGEST_GAME} turns")

    @asynccontextmanager
    async def playing(self, model: ModelAccess) -> AsyncIterator[Play]:
        """Return a function that plays an episode of a problem with a model."""
        from keel.envs.verifiers_chat import KeelRendering

        async with self.served(model, KeelRendering(model.renderer, model.sampling["stop"])) as play:
            yield play

    @cached_property
    def stage(self) -> Stage:
        """The endpoint and the environment of its scripted episodes."""
        return Stage(self)

    @asynccontextmanager
    async def served(self, model: ModelAccess, rendering: Rendering) -> AsyncIterator[Play]:
        """Like `playing`, with the given renderer."""
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_environment

        from keel.envs.verifiers_chat import access, installed

        config, name, client = _config(self.env_data, model.max_turns), f"keel-{next(_numbers)}", None
        env, client = load_environment(config), access(model.url, model.secret)

        async def play(problem: Problem, sample: int) -> PlayedEpisode:
            noise = {**model.noise, "problem": problem.key, "sample": sample}
            context = vf.ModelContext(name, client, vf.SamplingConfig(**model.sampling, keel=noise))
            return self._played(await env.run_episode(self.tasks[problem.info["task"]], context))

        with installed(name, rendering):
            async with env.serving():
                yield play

    def _played(self, episode: Any) -> PlayedEpisode:
        """The trainable part of a verifiers episode."""
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if len(trained) > 1:
            names = ", ".join(trace.agent.name for trace in trained)
            raise KeelError(
                f"{self.name}: an episode has {len(trained)} agents to train ({names}), but Keel trains one: set "
                "trainable to False for the others in the environment's setup"
            )
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        failure = None
        if not episode.ok:
            failure = f"raised {errors[-1].type}: {_line(errors[-1].message)}" if errors else "did not finish"
        if not trained:
            return PlayedEpisode(failure=failure or "ran no trainable agent")
        (trace,) = trained
        branches = [branch for branch in trace.branches if branch.trainable and True in branch.sampled_mask]
        last = branches[-1].nodes if branches else []
        first_sampled = next((number for number, node in enumerate(last) if node.sampled), len(last))
        texts = [_contents([node.message.model_dump()]) for node in last]
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        correct = {"correct": float(trace.reward >= self.success - 1e-9)}
        return PlayedEpisode(
            [(branch.token_ids, branch.sampled_mask) for branch in branches],
            "\n".join(texts[first_sampled:]),
            [text for text, node in zip(texts, last, strict=True) if node.sampled],
            "turns" if trace.stop_condition == "max_turns" else None,
            Reward(float(trace.reward), {**metrics, **scores, **correct}),
            {"turn/count": float(trace.num_turns), "turn/branches": float(len(branches))},
            failure,
        )


class Stage:
    """One endpoint and one environment for the scripted episodes of a task, until the process ends."""

    def __init__(self, task: VerifiersTask) -> None:
        self.scripts: dict[str, Scripted] = {}
        self.over, self.play = asyncio.Event(), Future[Any]()
        self.running = LOOP.submit(self._run(task))
        atexit.register(self.close)

    def close(self) -> None:
        async def end() -> None:
            self.over.set()

        LOOP.submit(end())
        LOOP.wait([self.running], 5.0, HungCalls())

    async def _run(self, task: VerifiersTask) -> None:
        from keel.envs.verifiers_chat import TextRendering

        async def answer(body: GenerateBody) -> Completion:
            return await self.scripts[body.sampling_params.noise.problem].answer(body)

        try:
            async with Endpoint(answer, secret := secrets.token_urlsafe(24)).serving() as url:
                model = ModelAccess(url, secret, None, {}, {}, LONGEST_GAME)
                async with task.served(model, TextRendering()) as play:
                    self.play.set_result(play)
                    await self.over.wait()
        except Exception as error:
            self.play.set_exception(error)


class Scripted(Episode):
    """A verifiers episode whose model turns are the texts passed to `step`.

    The episode runs on the event loop, and its model calls wait here for their text.
    """

    at_once = ASYNC_AT_ONCE

    def __init__(self, task: VerifiersTask, problem: Problem) -> None:
        self.task, self.problem = task, problem
        self.calls: queue.SimpleQueue[tuple[list[Message], Future[Completion]] | None] = queue.SimpleQueue()
        self.pending_call: tuple[list[Message], Future[Completion]] | None = None
        self.running = LOOP.submit(self._play())
        self.running.future.add_done_callback(lambda _: self.calls.put(None))

    def step(self, text: str) -> list[Message] | None:
        before, done = self._next() or self._over()
        tokens = tuple(text.encode())
        zeros = (0.0,) * len(tokens)
        done.set_result(Completion(tokens, (True,) * len(tokens), zeros, zeros, text, "eos"))
        self.pending_call = None
        if (call := self._next()) is None:
            self._result()  # raises if the episode failed
            return None
        messages = call[0]
        if messages[: len(before)] != before or messages[len(before)]["role"] != "assistant":
            raise CallFailed("invalid", "changed earlier messages, which scripted turns do not support")
        return messages[len(before) + 1 :]

    def reward(self) -> Reward:
        if (call := self._next()) is not None:  # more turns could follow: treat the context as full
            call[1].set_exception(context_exceeded(0, 0))
            self.pending_call = None
            while (call := self._next()) is not None:
                call[1].set_exception(context_exceeded(0, 0))
                self.pending_call = None
        return self._result().earned

    def close(self) -> None:
        self.running.future.cancel()
        LOOP.wait([self.running], None, HungCalls())

    def _next(self) -> tuple[list[Message], Future[Completion]] | None:
        """The model call that waits for a text; None if the episode is over."""
        if self.pending_call is None and not (self.running.future.done() and self.calls.empty()):
            self.pending_call = self.calls.get()
        return self.pending_call

    def _over(self) -> Any:
        self._result()
        raise CallFailed("invalid", "got a turn after it had ended")

    def _result(self) -> PlayedEpisode:
        played: PlayedEpisode = self.running.result(None)
        if played.failure is not None:
            raise CallFailed("raised", played.failure)
        return played

    async def answer(self, body: GenerateBody) -> Completion:
        """The text of the next step, as the completion of a request."""
        done: Future[Completion] = Future()
        self.calls.put((json.loads(bytes(body.token_ids)), done))
        return await asyncio.wrap_future(done)

    async def _play(self) -> PlayedEpisode:
        name, stage = f"script {next(_numbers)}", self.task.stage
        stage.scripts[name] = self
        try:
            play = await asyncio.wrap_future(stage.play)
            return await play(replace(self.problem, key=name), 0)
        finally:
            del stage.scripts[name]


def verifiers(
    taskset: str,
    env: Mapping[str, Any] | None = None,
    take: int | None = None,
    held_out: int | float = HELD_OUT_FRACTION,
    player: str | None = None,
    success: float = 1.0,
    **params: Any,
) -> VerifiersTask:
    """A taskset of verifiers 0.4. The other parameters are the taskset's.

    `env` are options of its environment, as in verifiers' `[env]`. `take` limits the number of tasks; it is required
    for an endless taskset. `player(task, observation)`, `module:attr`, gives the next turn of a demonstration. A reward
    of at least `success` counts as correct.
    """
    _need(taskset)
    add_working_folder()
    from verifiers.v1.utils.loaders import load_environment

    data = {**(env or {}), "taskset": {"id": taskset, **params}}
    loaded = load_environment(_config(data, None)).taskset
    if not loaded.bounded and take is None:
        raise KeelError(f"verifiers:{taskset} has endless tasks: give their number as task.take")
    try:
        tasks = list(itertools.islice(loaded, take))
    except Exception as error:  # tasksets may raise anything
        raise KeelError(f"verifiers:{taskset} does not load: {type(error).__name__}: {first_line(error)}") from error
    problems = [_problem(taskset, number, task) for number, task in enumerate(tasks)]
    prompts = {problem.key: json.dumps(problem.prompt) for problem in problems}
    identities = prompts if len(set(prompts.values())) > 1 else {key: key for key in prompts}
    chosen = split_held_out(identities.values(), held_out)
    train = tuple(problem for problem in problems if identities[problem.key] not in chosen)
    held = tuple(problem for problem in problems if identities[problem.key] in chosen)
    check_split(f"verifiers:{taskset}", len(problems), len(train), len(held), distinct=len(set(identities.values())))
    by_number = {str(number): task for number, task in enumerate(tasks)}
    return VerifiersTask(
        f"verifiers:{taskset}", train, held, NoGrader(), (), data, by_number, imported("player", player), success
    )


def _problem(taskset: str, number: int, task: Any) -> Problem:
    prompt, system = task.data.prompt, task.data.system_prompt
    if prompt is None:
        raise KeelError(f"verifiers:{taskset}, task {number}: it has no prompt, which Keel's episodes need")
    opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [m.model_dump() for m in prompt]
    messages = [{"role": m["role"], "content": _contents([m])} for m in opening]
    system_message = [{"role": "system", "content": system}] if system else []
    return Problem(f"{number}-{task.hash[:8]}", [*system_message, *messages], info={"task": str(number)})


def _need(taskset: str) -> None:
    need("verifiers", f"verifiers:{taskset}", "verifiers")
    version = importlib.metadata.version("verifiers")
    if not version.startswith(SUPPORTED):
        raise KeelError(
            f"verifiers:{taskset} needs verifiers {SUPPORTED}x, and {version} is installed: pip install "
            "'keel-rl[verifiers]'"
        )
    need("verifiers.v1.clients.train", f"verifiers:{taskset}", "verifiers")
    logger = logging.getLogger("verifiers")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)  # its warnings repeat the recorded failures of episodes


def _config(data: Mapping[str, Any], max_turns: int | None) -> Any:
    """The environment's configuration: by default agents run in this process, with at most `max_turns`."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, harness_class, resolve_env_config

    from keel.envs.verifiers_chat import HARNESS

    taskset, env = data["taskset"]["id"], data.get("id", "")
    what = f"verifiers:{taskset}"
    try:
        fields = env_config_type(taskset, env).model_fields
        bundled = default_harness_id(taskset)
        agents = {}
        for name, field in fields.items():
            if isinstance(field.default, AgentConfig):
                given, own = dict(data.get(name) or {}), field.default
                if own.harness is None and bundled == "bash":
                    given = {"harness": {"id": HARNESS}, **given}
                if "runtime" not in own.model_fields_set:
                    given = {"runtime": {"type": "subprocess"}, **given}
                if max_turns is not None and own.max_turns is None:
                    given = {"max_turns": max_turns, **given}
                agents[name] = given
        config = resolve_env_config({**data, **agents})
        for name, harness in config.agent_harnesses().items():
            kind = harness_class(harness.id)
            if kind.__module__.startswith("verifiers.v1.harnesses.") or kind.NEEDS_CONTAINER:
                raise KeelError(
                    f"{what}: the agent {name} has the harness {harness.id}, which installs or starts other "
                    f"programs: leave task.env.{name}.harness out for a chat loop in this process, or name your own"
                )
    except KeelError:
        raise
    except ModuleNotFoundError as error:
        raise KeelError(f"{what} is not installed: {_line(str(error))}") from error
    except Exception as error:
        raise KeelError(f"{what} cannot be configured: {type(error).__name__}: {_line(str(error))}") from error
    return config


def _contents(messages: Any) -> str:
    parts = [message.get("content") or "" for message in messages]
    return "\n".join(p if isinstance(p, str) else "\n".join(x.get("text", "") for x in p) for p in parts)


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
