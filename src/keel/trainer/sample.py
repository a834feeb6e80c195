"""What a step samples, and when: at its begin, or ahead of it by a thread (`overlap.py`)."""

from __future__ import annotations

from keel.base.types import Group, Problem
from keel.base.world import World
from keel.trainer.measure import counted, task_totals
from keel.trainer.overlap import StepRollouts
from keel.trainer.state import Collect, State, TrainingRun


def next_rollouts(run: TrainingRun, state: State) -> StepRollouts:
    """The rollouts of this step: sampled now, or ahead of it and waited for."""
    if run.queue is None:
        return sample_rollouts(run, run.collect, run.world, state.attempt, state.step)
    return run.queue.take(state.attempt, state.step, state.policy_version)


def begin_next(run: TrainingRun, state: State) -> None:
    """With `rollout.max_staleness` the sampler goes on with the weights that this step begins with."""
    if run.queue is not None:
        run.queue.begin_next(state.attempt, state.step, state.policy_version)


def sync_engine(run: TrainingRun, state: State) -> None:
    """The updated weights to the engine, unless it samples ahead and takes them over when it gets there."""
    if run.queue is None:
        run.engine.sync(run.policy.model, state.policy_version)


def settle(run: TrainingRun, state: State) -> None:
    """From here on the main thread may sample by the run's engine, with the weights of now."""
    if run.queue is not None:
        run.queue.settle(state.policy_version)


def sample_rollouts(run: TrainingRun, collect: Collect, world: World, attempt: int, step: int) -> StepRollouts:
    """The groups of one step, and what the task has counted while they were collected, in all processes."""
    before = task_totals(run.task)
    groups, draws = sample_groups(run, collect, attempt, step)
    return StepRollouts(groups, counted(run.task, before, world), draws=draws)


def sample_groups(run: TrainingRun, collect: Collect, attempt: int, step: int) -> tuple[list[Group], tuple[int, ...]]:
    """A step's problems, collected, and how many were drawn in each round.

    Zero-variance groups get company if `loss.dynamic_sampling` allows: the groups without signal stay, because their KL
    counts; new problems are added until `prompts_per_step` groups have a signal or the tries are spent.
    """
    target = run.rollout.prompts_per_step
    groups, draws = collect(draw(run, attempt, step, 0, target), attempt=attempt, step=step), [target]
    seen = {group.problem.key for group in groups}
    for further in range(1, run.loss.further_rounds + 1):
        missing = target - sum(has_signal(group) for group in groups)
        if missing <= 0:
            break
        draws.append(missing)
        more = draw(run, attempt, step, further, missing)
        fresh: list[Problem] = [problem for problem in more if problem.key not in seen]
        seen |= {problem.key for problem in fresh}
        if fresh:
            groups += collect(fresh, attempt=attempt, step=step)
    return groups, tuple(draws)


def draw(run: TrainingRun, attempt: int, step: int, further: int, count: int) -> list[Problem]:
    """The problems of a step's first round, or of a further one."""
    return run.task.sample(count, seed=problem_seed(run.seed, attempt) + 1_000_003 * further, step=step)


def problem_seed(seed: int, attempt: int) -> int:
    """The seed of the problems: another one after a rollback, so that the batch that broke the run does not return."""
    return seed + 15_485_863 * attempt


def has_signal(group: Group) -> bool:
    """Whether the rewards of a group differ."""
    return len({reward.total for reward in group.rewards}) > 1
