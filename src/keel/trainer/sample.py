"""Sample the rollouts of a step: in the step, or ahead of it in a thread (`overlap.py`)."""

from __future__ import annotations

from keel.base.types import Group, Problem
from keel.base.world import World
from keel.trainer.measure import task_counts, task_totals
from keel.trainer.overlap import StepRollouts
from keel.trainer.state import Collect, State, TrainingRun


def next_rollouts(run: TrainingRun, state: State) -> StepRollouts:
    """The rollouts of this step: sampled now, or taken from the queue."""
    if run.queue is None:
        return sample_rollouts(run, run.collect, run.world, state.attempt, state.step)
    return run.queue.take(state.attempt, state.step, state.policy_version)


def sample_ahead(run: TrainingRun, state: State) -> None:
    """With `rollout.max_staleness`, let the sampler start later steps with the current weights."""
    if run.queue is not None:
        run.queue.sample_ahead(state.attempt, state.step, state.policy_version)


def sync_engine(run: TrainingRun, state: State) -> None:
    """Sync the updated weights to the engine, unless the queue does so."""
    if run.queue is None:
        run.engine.sync(run.policy.model, state.policy_version)


def wait_for_sampler(run: TrainingRun, state: State) -> None:
    """Wait for the sampling thread; the main thread may then use the engine, which has the current weights."""
    if run.queue is not None:
        run.queue.wait_for_sampler(state.policy_version)


def sample_rollouts(run: TrainingRun, collect: Collect, world: World, attempt: int, step: int) -> StepRollouts:
    """The groups of one step, and the increase of the task's counters, summed over processes."""
    before = task_totals(run.task)
    groups, draws = sample_groups(run, collect, attempt, step)
    return StepRollouts(groups, task_counts(run.task, before, world), draws=draws)


def sample_groups(run: TrainingRun, collect: Collect, attempt: int, step: int) -> tuple[list[Group], tuple[int, ...]]:
    """Collect a step's problems; returns the groups and the number of problems drawn in each round.

    With `loss.dynamic_sampling`, resample for zero-variance groups (DAPO): new problems are added until
    `prompts_per_step` groups have a signal or the rounds are used up. Groups without signal stay for the KL term.
    """
    target = run.rollout.prompts_per_step
    groups, draws = collect(draw_problems(run, attempt, step, 0, target), attempt=attempt, step=step), [target]
    seen = {group.problem.key for group in groups}
    for resample_round in range(1, run.loss.further_rounds + 1):
        missing = target - sum(has_signal(group) for group in groups)
        if missing <= 0:
            break
        draws.append(missing)
        more = draw_problems(run, attempt, step, resample_round, missing)
        fresh: list[Problem] = [problem for problem in more if problem.key not in seen]
        seen |= {problem.key for problem in fresh}
        if fresh:
            groups += collect(fresh, attempt=attempt, step=step)
    return groups, tuple(draws)


def draw_problems(run: TrainingRun, attempt: int, step: int, resample_round: int, count: int) -> list[Problem]:
    """The problems of a round: 0 is the step's first, later ones are resampling rounds."""
    return run.task.sample(count, seed=problem_seed(run.seed, attempt) + 1_000_003 * resample_round, step=step)


def problem_seed(seed: int, attempt: int) -> int:
    """The seed of the problems; it changes after a rollback, so that the same batch does not return."""
    return seed + 15_485_863 * attempt


def has_signal(group: Group) -> bool:
    """Whether the rewards of a group differ."""
    return len({reward.total for reward in group.rewards}) > 1
