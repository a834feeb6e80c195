"""Sampling ahead: the numbers of a plain loop that keeps old weights, beside the update, with its errors and counts."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.base.world import World, open_world
from keel.config import load_config
from keel.envs.curriculum import Curriculum
from keel.rollout import Engine
from keel.rollout.native.engine import NativeEngine
from keel.run.build import _check_ahead, build_policy, build_run
from keel.trainer.checkpoint import load_checkpoint, save_checkpoint
from keel.trainer.checkpoint_parts import PENDING
from keel.trainer.integrity import TRAINER, saved_checksums
from keel.trainer.memory import OutOfMemory
from keel.trainer.overlap import RolloutQueue, StepRollouts
from keel.trainer.state import State, TrainingRun
from keel.trainer.step import train_step
from ranks import run_ranks
from trainer.small import Letters, small_config

TIMED = ("time/", "speed/", "memory/")
LORA = "model.lora={r: 4, targets: [q_proj, v_proj]}"
DYNAMIC = ("loss.dynamic_sampling=true", "rollout.num_generations=2", "task.name=trainer.test_overlap:flat")
CURRICULUM = (*DYNAMIC[:2], "data.curriculum={candidates: 3, half_life: 2}", "task.name=trainer.test_curriculum:uneven")
LIMIT_S = 60.0


class Flat(Letters):
    """Letters that pay every problem but the first alike, so that a step draws further ones."""

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return super().reward(problem, turns) if problem.key.endswith("/0") else Reward(1.0, {"letters": 1.0})


class Skipping(Letters):
    """Letters whose first problem has no reward yet in the first round, and comes again in a further one, with others.

    The second problem pays alike, so that the further round draws two.
    """

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "failed", set())
        object.__setattr__(self, "judged", count())

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        first = [Problem(f"0/{step}/0", f"{step}:0=", "abc")]
        return first + super().sample(count, seed=seed, step=step)[1:]

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        seed, _, number = problem.key.split("/")
        if number == "0" and problem.key not in self.failed:
            self.failed.add(problem.key)
            raise ValueError("no reward yet")
        return Reward(1.0 if (seed, number) == ("0", "1") else float(next(self.judged)))


SKIPPING = ("loss.dynamic_sampling=true", "reward.on_error=skip_group")


def flat() -> Flat:
    return Flat()


def make(*overrides: str, weights: Path | None = None, task: Any = None) -> tuple[TrainingRun, State]:
    config = small_config(*overrides)
    run = build_run(config, build_policy(config, weights), task=task).run
    return run, State(kl=run.controller.init())


def steady(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(TIMED)}


def take_steps(run: TrainingRun, state: State, steps: int) -> Iterator[tuple[State, dict[str, float]]]:
    with closing(run):
        for _ in range(steps):
            state, metrics, _ = train_step(run, state)
            yield state, steady(metrics)


def plain_loop(run: TrainingRun, state: State, staleness: int, steps: int) -> list[dict[str, float]]:
    """One thread: before each step the engine is given the weights of `staleness` steps before, or of the first.

    The problems are drawn by the curriculum of that step.
    """
    run.queue, lines = None, []
    old, known = [(copy.deepcopy(run.policy.model), 0)], [state.curriculum]
    for step in range(steps):
        run.engine.sync(*old[max(0, step - staleness)])
        state, metrics, batch = train_step(run, replace(state, curriculum=known[max(0, step - staleness)]))
        old.append((copy.deepcopy(run.policy.model), state.policy_version))
        options = run.curriculum
        known.append(known[-1].observe(run.task, batch.groups, options, step) if options else state.curriculum)
        lines.append(steady(metrics))
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "more"),
    [(1, ()), (2, ()), (3, ()), (2, (LORA,)), (1, DYNAMIC), (2, CURRICULUM)],
    ids=["1", "2", "3", "lora", "dynamic", "curriculum"],
)
def test_every_number_is_that_of_a_plain_loop_which_keeps_old_weights(staleness: int, more: tuple[str, ...]) -> None:
    options = (f"rollout.max_staleness={staleness}", *more)
    lines = [metrics for _, metrics in take_steps(*make(*options), 6)]
    assert lines == plain_loop(*make(*options), staleness, 6)
    assert [line["staleness/max"] for line in lines] == [float(min(step, staleness)) for step in range(6)]
    assert all(line["staleness/mean"] == line["staleness/max"] for line in lines)


class Silent(NativeEngine):
    """Says no version, and counts its syncs."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, copy=True)
        self.version, self.synced = None, list[int | None]()

    def sync(self, policy: Any, version: int | None = None) -> None:
        super().sync(policy)
        self.synced.append(version)


@pytest.mark.parametrize("staleness", [1, 2])
def test_samples_are_of_the_version_that_was_asked_for_and_each_is_sent_once(tmp_path: Path, staleness: int) -> None:
    options = (f"rollout.max_staleness={staleness}", "rollout.engine=trainer.test_overlap:Silent")
    run, state = make(*options)
    ages = []
    for later, metrics in take_steps(run, state, 3):
        ages.append(metrics["staleness/max"])
        folder = save_checkpoint(tmp_path, run, later)
    assert ages == [float(min(step, staleness)) for step in range(3)]
    assert run.engine.synced == [1, 2]  # type: ignore[attr-defined]
    other, _ = make(*options, weights=folder)
    list(take_steps(other, load_checkpoint(folder, other), 1))
    assert other.engine.synced == [3]  # type: ignore[attr-defined]


class Watched(Letters):
    """Letters that remember for which steps problems were drawn, and in which thread."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "drawn", {step: threading.Event() for step in range(10)})
        object.__setattr__(self, "threads", set())

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        self.threads.add(threading.current_thread())
        self.drawn[step].set()
        return super().sample(count, seed=seed, step=step)


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_sampler_works_on_later_steps_while_the_policy_is_updated(staleness: int) -> None:
    task = Watched()
    run, state = make(f"rollout.max_staleness={staleness}", task=task)
    update, ahead = run.optimizer.inner.step, []

    def waiting() -> None:
        ahead.append(task.drawn[len(ahead) + staleness].wait(LIMIT_S))
        update()

    run.optimizer.inner.step = waiting  # type: ignore[method-assign]
    lines = [train_step(run, state).metrics]
    run.close()
    assert ahead == [True]
    assert task.threads != {threading.main_thread()}
    assert len(task.threads) == 1
    assert 0 <= lines[0]["time/sampler_wait_s"] < lines[0]["time/total_s"]
    assert lines[0]["time/trainer_wait_s"] <= lines[0]["time/total_s"]


def test_the_thread_leaves_the_main_threads_random_numbers_alone() -> None:
    run, state = make("rollout.max_staleness=1")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with closing(run):
        train_step(run, state)
        run.queue.wait_for_sampler(1)  # type: ignore[union-attr]
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("more", [(LORA,), DYNAMIC, CURRICULUM], ids=["lora", "dynamic", "curriculum"])
def test_a_checkpoint_of_any_step_goes_on_exactly(tmp_path: Path, staleness: int, more: tuple[str, ...]) -> None:
    options, folders, lines = (f"rollout.max_staleness={staleness}", *more), [], []
    run, state = make(*options)
    for later, metrics in take_steps(run, state, 5):
        folders.append(save_checkpoint(tmp_path, run, later))
        assert f"{TRAINER}/{PENDING}" in saved_checksums(folders[-1])
        lines.append(metrics)
    for step, folder in enumerate(folders[:4], start=1):
        other, _ = make(*options, weights=folder)
        state = load_checkpoint(folder, other)
        assert state.step == step
        assert [metrics for _, metrics in take_steps(other, state, 5 - step)] == lines[step:]


def test_a_group_that_a_further_round_has_drawn_again_is_gone_on_with(tmp_path: Path) -> None:
    options, lines = ("rollout.max_staleness=1", *SKIPPING), []
    run, state = make(*options, task=Skipping())
    for later, metrics in take_steps(run, state, 2):
        save_checkpoint(tmp_path, run, later)
        lines.append(metrics)
    other, _ = make(*options, weights=tmp_path / "step-1", task=Skipping())
    state = load_checkpoint(tmp_path / "step-1", other)
    ahead = other.queue.ready(1)[1]  # type: ignore[union-attr]
    assert ahead.draws == (3, 2)
    assert [group.problem.key for group in ahead.groups] == ["0/1/1", "0/1/2", "0/1/0", "1000003/1/1"]
    assert [metrics for _, metrics in take_steps(other, state, 1)] == lines[1:]


def test_a_checkpoint_of_another_staleness_begins_with_fresh_rollouts(tmp_path: Path) -> None:
    run, state = make("rollout.max_staleness=2")
    for later, _ in take_steps(run, state, 3):
        folder = save_checkpoint(tmp_path, run, later)
    other, _ = make("rollout.max_staleness=1", weights=folder)
    lines = [metrics for _, metrics in take_steps(other, load_checkpoint(folder, other), 2)]
    assert [line["staleness/max"] for line in lines] == [0.0, 1.0]


def test_pending_rollouts_of_problems_that_are_gone_are_refused(tmp_path: Path) -> None:
    class Moved(Letters):
        def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
            return super().sample(count, seed=seed + 1, step=step)

    run, state = make("rollout.max_staleness=1")
    for later, _ in take_steps(run, state, 1):
        folder = save_checkpoint(tmp_path, run, later)
    other, _ = make("rollout.max_staleness=1", weights=folder, task=Moved())
    with pytest.raises(KeelError, match=r"step 2 are of problem '0/1/0', which the task no longer draws"):
        load_checkpoint(folder, other)


class Broken(NativeEngine):
    """Fails in the third step."""

    def __init__(self, model: Any, tokenizer: Any, memory: bool = False) -> None:
        super().__init__(model, tokenizer, copy=True)
        self.error = torch.OutOfMemoryError("out of memory") if memory else ZeroDivisionError("in the sampler")

    def generate(self, *args: Any, step: int = 0, **options: Any) -> Any:
        if step == 2:
            raise self.error
        return super().generate(*args, step=step, **options)


@pytest.mark.parametrize("staleness", [1, 2])
def test_what_goes_wrong_in_the_thread_is_raised_by_the_step_that_it_belongs_to(tmp_path: Path, staleness: int) -> None:
    run, state = make(f"rollout.max_staleness={staleness}", "rollout.engine=trainer.test_overlap:Broken")
    with closing(run):
        for _ in range(2):
            state = train_step(run, state).state
        folder = save_checkpoint(tmp_path, run, state)
        for _ in range(2):  # also when asked again, and of every later step
            with pytest.raises(ZeroDivisionError, match="in the sampler"):
                train_step(run, state)
    assert not [thread for thread in threading.enumerate() if thread.name == "keel-rollouts"]
    other, _ = make(f"rollout.max_staleness={staleness}", weights=folder)  # the rollouts before it were saved
    assert load_checkpoint(folder, other).step == 2
    assert train_step(other, state).metrics["staleness/max"] == 0.0
    other.close()


def test_after_an_error_in_the_thread_the_engine_is_given_the_weights_anew() -> None:
    """Whether the error was that of a sync, so that the engine does not have what it was to have, nobody knows."""
    policy, synced = nn.Linear(1, 1), []

    def sync(model: nn.Module, version: int) -> None:
        if model is not policy:
            raise ZeroDivisionError("in the sync")
        synced.append(version)

    engine: Any = SimpleNamespace(sync=sync, interrupt=lambda: None)
    with closing(RolloutQueue(engine, policy, lambda *request: StepRollouts([], {}), list, max_staleness=2)) as queue:
        with pytest.raises(ZeroDivisionError):
            queue.take(0, 0, 7, Curriculum())
        queue.wait_for_sampler(7)
    assert synced == [7]


@dataclass(frozen=True)
class Asked(World):
    """Says when it is asked first."""

    asked: threading.Event = field(default_factory=threading.Event)

    def all_gather(self, value: Any) -> list[Any]:
        self.asked.set()
        return super().all_gather(value)


def drop_unevenly() -> None:
    """Rank 1 drops its rollouts before its thread begins with step 1, rank 0 when that waits for rank 1's there."""
    with open_world() as opened:
        world, apart, begun = Asked(opened.rank, opened.size), opened.new_group(), threading.Event()

        def sample(attempt: int, step: int, curriculum: Curriculum) -> StepRollouts:
            if step == 1:
                begun.set()
            elif not world.is_main:
                time.sleep(0.2)  # until the main thread holds what comes after
            return StepRollouts([], {"steps": float(sum(apart.all_gather(step)))})

        engine: Any = SimpleNamespace(sync=lambda model, version: None, interrupt=lambda: None)
        queue = RolloutQueue(engine, nn.Linear(1, 1), sample, list, max_staleness=2, world=world, thread_world=apart)
        with closing(queue):
            queue.sample_ahead(0, -1, 0, Curriculum())
            if world.is_main:
                assert begun.wait(LIMIT_S)
            else:
                queue._pending[0].add_done_callback(lambda future: world.asked.wait(LIMIT_S))
            queue.clear()
            assert queue.take(0, 0, 0, Curriculum()).counts == {"steps": 0.0}


def test_processes_drop_the_same_rollouts() -> None:
    assert [rank.status for rank in run_ranks(drop_unevenly)] == [0, 0]


def test_memory_that_runs_out_in_the_thread_is_said_of_the_rollout() -> None:
    engine = "rollout.engine={name: trainer.test_overlap:Broken, memory: true}"
    run, state = make("rollout.max_staleness=1", engine)
    with pytest.raises(OutOfMemory, match=r"the rollout of step 3 .*: rollout\.max_batch is null"):
        list(take_steps(run, state, 3))


def test_a_run_that_fails_in_the_update_goes_on_with_the_rollouts_it_had(tmp_path: Path) -> None:
    """The step's own rollouts are taken, and still saved with the state before it."""
    run, state = make("rollout.max_staleness=2")
    expected = [metrics for _, metrics in take_steps(*make("rollout.max_staleness=2"), 4)]
    with closing(run):
        for _ in range(2):
            state = train_step(run, state).state
        run.optimizer.inner.step = lambda: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            train_step(run, state)
        folder = save_checkpoint(tmp_path, run, state)
    other, _ = make("rollout.max_staleness=2", weights=folder)
    assert [metrics for _, metrics in take_steps(other, load_checkpoint(folder, other), 2)] == expected[2:]


class Sharing(Engine):
    shares_weights = True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        pass

    def generate(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


def test_what_cannot_sample_beside_the_update_is_refused_in_one_line() -> None:
    with pytest.raises(KeelError, match=r"test_overlap:Sharing samples with the policy's own weights"):
        make("rollout.max_staleness=1", "rollout.engine=trainer.test_overlap:Sharing")
    engine: Any = SimpleNamespace(shares_weights=False)
    gpu, cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda", "cpu"))
    one, two = (load_config({}, [f"rollout.max_staleness={staleness}"]) for staleness in (1, 2))
    with pytest.raises(KeelError, match=r"max_staleness=1 with rollout\.engine=native would sample on the GPU that"):
        _check_ahead(one, engine, gpu, False)  # type: ignore[arg-type]
    with pytest.raises(KeelError, match=r"max_staleness=2 keeps copies of the weights.*max_staleness=1, or parallel"):
        _check_ahead(two, engine, cpu, True)  # type: ignore[arg-type]
    _check_ahead(one, engine, cpu, True)  # type: ignore[arg-type]
