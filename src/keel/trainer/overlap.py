"""Sampling ahead: a thread collects the rollouts of later steps while the policy is updated.

With `rollout.max_staleness` K, step m learns from rollouts of the weights that step m − K began with, or of those that
the run (or a rollback) started from where that is later. A rule of steps and never of the clock: the numbers of a run
do not depend on who was faster, and a resumed run is the run that was not interrupted.
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

from keel.base.types import Group, RewardFailure
from keel.base.world import SINGLE_PROCESS, World
from keel.rollout import Engine

GRACE_S = 5.0  # for the rollouts in flight where a run ends


@dataclass(frozen=True)
class StepRollouts:
    """What one step learns from: judged groups, what the task counted meanwhile, and which rewards failed.

    `draws` are the numbers of problems that were drawn, by round.
    """

    groups: list[Group]
    counts: Mapping[str, float]
    failures: Sequence[RewardFailure] = ()
    draws: Sequence[int] = ()


class RolloutQueue:
    """StepRollouts of the steps to come, one after the other, by one thread: it alone uses the engine until `settle`.

    `sample(attempt, step)` collects those of one step; `record` is given its failures when it is taken. Each is sampled
    with the weights at the time it was asked for: with `max_staleness` 1 the sampler has nothing to do then and takes
    them over at once; above that it is still at an earlier step, and the trained parameters are copied on the policy's
    device until it gets there. Of several processes (`world`) all sample the same steps in the same order; by their
    threads' own connections (`thread_world`) a step fails in all of them or in none.
    """

    def __init__(
        self,
        engine: Engine,
        policy: nn.Module,
        sample: Callable[[int, int], StepRollouts],
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
        self._pending: dict[int, Future[StepRollouts]] = {}  # by step; the one taken last stays until the next is taken
        self._version: int | None = None  # of the weights that the engine has once all jobs are done
        self._thread: threading.Thread | None = None
        self._twin: nn.Module | None = None
        self._error: BaseException | None = None
        self._busy_s, self._busy_since = 0.0, 0.0
        self._clock = threading.Lock()
        self._begun, self._beginning = -1, threading.Lock()  # the last step that the thread has begun with

    def take(self, attempt: int, step: int, version: int) -> StepRollouts:
        """The rollouts of this step, once they are there; what went wrong in the thread is raised here."""
        self._pending = {later: future for later, future in self._pending.items() if later >= step}
        if step not in self._pending:
            self._begin(attempt, range(step, step + 1), version)
        rollouts = self._pending[step].result()
        self.record(rollouts.failures)
        return rollouts

    def begin_next(self, attempt: int, step: int, version: int) -> None:
        """Begin with the steps after this one that the weights of now may sample."""
        steps = range(step + 1, step + self.max_staleness + 1)
        self._begin(attempt, [later for later in steps if later not in self._pending], version)

    def settle(self, version: int) -> None:
        """Wait for what has begun, which stays; then the engine has the weights of now, and is the caller's."""
        wait(self._pending.values())
        if version != self._version or self._error is not None:  # with an error nobody knows what the engine has
            self.engine.sync(self.policy, version)
            self._version = version

    def ready(self, step: int) -> dict[int, StepRollouts]:
        """The rollouts that a run which stands before `step` goes on with, up to the first that failed."""
        wait(self._pending.values())
        rollouts: dict[int, StepRollouts] = {}
        for later in range(step, step + self.max_staleness):
            future = self._pending.get(later)
            if future is None or future.exception() is not None:
                break
            rollouts[later] = future.result()
        return rollouts

    def clear(self) -> None:
        """Drop everything, once what any process has begun has ended in all; the engine is the caller's."""
        with self._beginning:
            self._drop(max(self.world.all_gather(self._begun)))
        wait(self._pending.values())
        self._pending, self._version, self._error, self._begun = {}, None, None, -1

    def restore(self, rollouts: Mapping[int, StepRollouts], version: int) -> None:
        """Go on with rollouts that were sampled before, by step, and an engine that has the weights of `version`."""
        self._version = version
        self._pending = {step: _done(value) for step, value in rollouts.items()}

    def busy_s(self) -> float:
        """Seconds in which the thread has worked so far."""
        with self._clock:
            return self._busy_s + (time.perf_counter() - self._busy_since if self._busy_since else 0.0)

    def close(self) -> bool:
        """End the thread; whether it has ended: what an engine cannot interrupt has some seconds, and then goes on."""
        self._drop(self._begun)
        if self._thread is None:
            return True
        self._jobs.put(None)
        self.engine.interrupt()
        self._thread.join(GRACE_S)
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join()

    def _drop(self, after: int) -> None:
        for step, future in self._pending.items():
            if step > after:
                future.cancel()

    def _begin(self, attempt: int, steps: Sequence[int], version: int) -> None:
        weights: list[Tensor] | None = None
        if steps and version != self._version:
            weights, self._version = self._take_over(version), version
        for step in steps:
            future: Future[StepRollouts] = Future()
            self._pending[step] = future
            self._jobs.put((step, future, partial(self._collect, weights, version, attempt, step)))
            weights = None
        if steps and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="keel-rollouts", daemon=True)
            self._thread.start()

    def _take_over(self, version: int) -> list[Tensor] | None:
        """The policy's weights into the engine where it has nothing to do, or copies for the time when it has not."""
        if self.max_staleness == 1:
            self.engine.sync(self.policy, version)
            return None
        self._twin = self._twin or _twin(self.policy)
        return [parameter.detach().clone() for parameter in _trained(self.policy)]

    def _collect(self, weights: list[Tensor] | None, version: int, attempt: int, step: int) -> StepRollouts:
        if weights is not None:
            assert self._twin is not None
            for parameter, value in zip(_trained(self._twin), weights, strict=True):
                parameter.data = value
            self.engine.sync(self._twin, version)
        rollouts = self.sample(attempt, step)
        return replace(rollouts, groups=[_of_version(group, version) for group in rollouts.groups])

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            del job  # while it waits for the next, it holds no weights and no rollouts

    def _run(self, step: int, future: Future[StepRollouts], collect: Callable[[], StepRollouts]) -> None:
        with self._beginning:
            if not future.set_running_or_notify_cancel():
                return
            self._begun = step
        with self._clock:
            self._busy_since = time.perf_counter()
        try:
            if self._error is not None:  # of an earlier step, which has to be raised first
                raise self._error
            with self.thread_world.fail_together():
                rollouts = collect()
        except BaseException as error:  # the main thread raises it
            self._error = error
            self._rest()
            future.set_exception(error)
        else:
            self._rest()
            future.set_result(rollouts)

    def _rest(self) -> None:
        with self._clock:
            self._busy_s, self._busy_since = self._busy_s + time.perf_counter() - self._busy_since, 0.0


def _of_version(group: Group, version: int) -> Group:
    return replace(group, completions=tuple(replace(c, policy_version=version) for c in group.completions))


def _done(rollouts: StepRollouts) -> Future[StepRollouts]:
    future: Future[StepRollouts] = Future()
    future.set_result(rollouts)
    return future


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _twin(policy: nn.Module) -> nn.Module:
    """The policy with trained parameters of its own; what is frozen is the same tensor in both."""
    trained = {id(parameter) for parameter in _trained(policy)}
    tensors = (*policy.parameters(), *policy.buffers())
    shared: dict[int, Any] = {id(tensor): tensor for tensor in tensors if id(tensor) not in trained}
    with torch.no_grad():
        return copy.deepcopy(policy, shared)
