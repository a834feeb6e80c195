"""Sampling ahead: a thread collects the rollouts of later steps while the policy is updated.

With `rollout.max_staleness` K, the weights at the start of step m − K sample the rollouts of step m. In the first K
steps of a run or after a rollback, the initial weights sample them. The lag is counted in steps, not in time, so
results do not depend on speed, and a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.types import Completion, Group, RewardFailure
from keel.base.world import SINGLE_PROCESS, World
from keel.envs.curriculum import Curriculum
from keel.rollout import Engine

GRACE_S = 5.0  # seconds to wait for running rollouts when a run ends


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of one step: judged groups, the task's counters and failed rewards.

    `draws` is the number of problems that the task drew in each round.
    """

    groups: list[Group]
    counts: Mapping[str, float]
    failures: Sequence[RewardFailure] = ()
    draws: Sequence[int] = ()


class RolloutQueue:
    """Samples the rollouts of later steps in one thread. Until `wait_for_sampler`, only this thread uses the engine.

    `sample(attempt, step, curriculum)` collects the rollouts of one step; `take` passes their failures to `record`. A
    step is sampled with the weights and the curriculum at the time of its request. With `max_staleness` 1 the thread
    is idle at that time, and the engine is synced at once. Above 1 the thread may still sample an earlier step, so the
    trained parameters are copied on the policy's device.

    All processes of `world` sample the same steps in the same order. The threads use their own process group
    (`thread_world`). A step that fails on one process fails on all.
    """

    def __init__(
        self,
        engine: Engine,
        policy: nn.Module,
        sample: Callable[[int, int, Curriculum], StepRollouts],
        record: Callable[[Sequence[RewardFailure]], None],
        *,
        max_staleness: int,
        world: World = SINGLE_PROCESS,
        thread_world: World = SINGLE_PROCESS,
    ) -> None:
        self.world, self.thread_world = world, thread_world
        self.engine, self.policy, self.max_staleness = engine, policy, max_staleness
        self.sample, self.record = sample, record
        self._jobs: SimpleQueue[tuple[int, Future[StepRollouts], Callable[[], StepRollouts]] | None] = SimpleQueue()
        self._pending: dict[int, Future[StepRollouts]] = {}  # per step; a taken step stays until the next is taken
        self._version: int | None = None  # version of the engine's weights after all queued jobs
        self._thread: threading.Thread | None = None
        self._policy_copy: nn.Module | None = None
        self._error: BaseException | None = None
        self._busy_s, self._busy_since = 0.0, 0.0
        self._clock = threading.Lock()
        self._last_started, self._start_lock = -1, threading.Lock()  # the last step that the thread started

    def take(self, attempt: int, step: int, version: int, curriculum: Curriculum) -> StepRollouts:
        """Wait for the rollouts of this step. Errors of the thread are raised here."""
        self._pending = {later: future for later, future in self._pending.items() if later >= step}
        if step not in self._pending:
            self._submit(attempt, range(step, step + 1), version, curriculum)
        rollouts = self._pending[step].result()
        self.record(rollouts.failures)
        return rollouts

    def sample_ahead(self, attempt: int, step: int, version: int, curriculum: Curriculum) -> None:
        """Request the rollouts of the later steps that the current weights may sample."""
        steps = range(step + 1, step + self.max_staleness + 1)
        self._submit(attempt, [later for later in steps if later not in self._pending], version, curriculum)

    def wait_for_sampler(self, version: int) -> None:
        """Wait for all requested steps and sync the engine. Afterwards the caller may use the engine."""
        wait(self._pending.values())
        if version != self._version or self._error is not None:  # an error leaves the engine with unknown weights
            self.engine.sync(self.policy, version)
            self._version = version

    def ready(self, step: int) -> dict[int, StepRollouts]:
        """The finished rollouts from `step` on, up to the first failure, to be saved in a checkpoint."""
        wait(self._pending.values())
        rollouts: dict[int, StepRollouts] = {}
        for later in range(step, step + self.max_staleness):
            future = self._pending.get(later)
            if future is None or future.exception() is not None:
                break
            rollouts[later] = future.result()
        return rollouts

    def clear(self) -> None:
        """Wait until all started steps have ended on all processes, then drop all rollouts. The engine is then free."""
        with self._start_lock:
            self._drop(max(self.world.all_gather(self._last_started)))
        wait(self._pending.values())
        self._pending, self._version, self._error, self._last_started = {}, None, None, -1

    def restore(self, rollouts: Mapping[int, StepRollouts], version: int) -> None:
        """Continue with saved rollouts, given by step. The engine has the weights of `version`."""
        self._version = version
        self._pending = {step: _done(value) for step, value in rollouts.items()}

    def busy_s(self) -> float:
        """Seconds that the thread has spent sampling."""
        with self._clock:
            return self._busy_s + (time.perf_counter() - self._busy_since if self._busy_since else 0.0)

    def close(self) -> bool:
        """Stop the thread; False if it is still sampling after `GRACE_S`."""
        self._drop(self._last_started)
        if self._thread is None:
            return True
        self._jobs.put(None)
        self.engine.interrupt()
        self._thread.join(GRACE_S)
        return not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _drop(self, after: int) -> None:
        for step, future in self._pending.items():
            if step > after:
                future.cancel()

    def _submit(self, attempt: int, steps: Sequence[int], version: int, curriculum: Curriculum) -> None:
        weights: list[Tensor] | None = None
        if steps and version != self._version:
            weights, self._version = self._weights_for_thread(version), version
        for step in steps:
            future: Future[StepRollouts] = Future()
            self._pending[step] = future
            self._jobs.put((step, future, partial(self._collect, weights, version, attempt, step, curriculum)))
            weights = None
        if steps and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="keel-rollouts", daemon=True)
            self._thread.start()

    def _weights_for_thread(self, version: int) -> list[Tensor] | None:
        """Sync the engine if it is idle. Otherwise return copies of the weights, to sync later."""
        if self.max_staleness == 1:
            self.engine.sync(self.policy, version)
            return None
        self._policy_copy = self._policy_copy or _copy_policy(self.policy)
        return [parameter.detach().clone() for parameter in _trained(self.policy)]

    def _collect(
        self, weights: list[Tensor] | None, version: int, attempt: int, step: int, curriculum: Curriculum
    ) -> StepRollouts:
        if weights is not None:
            assert self._policy_copy is not None
            for parameter, value in zip(_trained(self._policy_copy), weights, strict=True):
                parameter.data = value
            self.engine.sync(self._policy_copy, version)
        rollouts = self.sample(attempt, step, curriculum)
        return replace(rollouts, groups=[_of_version(group, version) for group in rollouts.groups])

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            del job  # free weights and rollouts while waiting for the next job

    def _run(self, step: int, future: Future[StepRollouts], collect: Callable[[], StepRollouts]) -> None:
        with self._start_lock:
            if not future.set_running_or_notify_cancel():
                return
            self._last_started = step
        with self._clock:
            self._busy_since = time.perf_counter()
        try:
            if self._error is not None:  # raise the error of an earlier step first
                raise self._error
            with self.thread_world.fail_together():
                rollouts = collect()
        except BaseException as error:  # the main thread raises it
            self._error = error
            self._stop_clock()
            future.set_exception(error)
        else:
            self._stop_clock()
            future.set_result(rollouts)

    def _stop_clock(self) -> None:
        with self._clock:
            self._busy_s, self._busy_since = self._busy_s + time.perf_counter() - self._busy_since, 0.0


def _of_version(group: Group, version: int) -> Group:
    def of_version(completion: Completion) -> Completion:
        return replace(completion, policy_version=version, branches=tuple(map(of_version, completion.branches)))

    return replace(group, completions=tuple(map(of_version, group.completions)))


def _done(rollouts: StepRollouts) -> Future[StepRollouts]:
    future: Future[StepRollouts] = Future()
    future.set_result(rollouts)
    return future


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _copy_policy(policy: nn.Module) -> nn.Module:
    """A copy of the policy with copied trained parameters and shared frozen tensors."""
    trained = {id(parameter) for parameter in _trained(policy)}
    tensors = (*policy.parameters(), *policy.buffers())
    shared: dict[int, Any] = {id(tensor): tensor for tensor in tensors if id(tensor) not in trained}
    with torch.no_grad():
        return copy.deepcopy(policy, shared)
