"""Sample the rollouts of a step, within the step or ahead of it in a thread (`overlap.py`)."""

from __future__ import annotations

from dataclasses import replace

from keel.base.types import Group, Problem
from keel.base.world import World
from keel.envs.curriculum import Curriculum, Draw, describe_draws, draw, has_signal
from keel.envs.problems import seeded_rng
from keel.trainer.measure import task_counts, task_totals
from keel.trainer.overlap import StepRollouts
from keel.trainer.state import Collect, State, TrainingRun


def next_rollouts(run: TrainingRun, state: State) -> StepRollouts:
    """The rollouts of this step: sampled now, or taken from the queue."""
    if run.queue is None:
        return sample_rollouts(run, run.collect, run.world, state.attempt, state.step, state.curriculum)
    return run.queue.take(state.attempt, state.step, state.policy_version, state.curriculum)


def sample_ahead(run: TrainingRun, state: State) -> None:
    """With `rollout.max_staleness`, request rollouts of later steps with the current weights."""
    if run.queue is not None:
        run.queue.sample_ahead(state.attempt, state.step, state.policy_version, state.curriculum)


def sync_engine(run: TrainingRun, state: State) -> None:
    """Sync the updated weights to the engine, unless the queue does so."""
    if run.queue is None:
        run.engine.sync(run.policy.model, state.policy_version)


def wait_for_sampler(run: TrainingRun, state: State) -> None:
    """Wait for the sampling thread. Afterwards the main thread may use the engine, with the current weights."""
    if run.queue is not None:
        run.queue.wait_for_sampler(state.policy_version)


def sample_rollouts(
    run: TrainingRun, collect: Collect, world: World, attempt: int, step: int, curriculum: Curriculum
) -> StepRollouts:
    """The rollouts of one step, with the increase of the task's counters, summed over processes."""
    before = task_totals(run.task)
    rollouts = sample_groups(run, collect, attempt, step, curriculum)
    return replace(rollouts, counts={**rollouts.counts, **task_counts(run.task, before, world)})


def sample_groups(run: TrainingRun, collect: Collect, attempt: int, step: int, curriculum: Curriculum) -> StepRollouts:
    """Draw a step's problems and collect their rollouts. With `data.curriculum`, `counts` lists the drawn candidates.

    With `loss.dynamic_sampling`, resample zero-variance groups (DAPO): draw new problems until `prompts_per_step`
    groups have a signal or no round is left. Groups without signal are kept for the KL term.
    """
    target, options = run.rollout.prompts_per_step, run.curriculum
    groups, missing, rounds, draws, seen = list[Group](), target, list[int](), list[Draw](), set[str]()
    for resample_round in range(1 + run.loss.further_rounds):
        rounds.append(missing if options is None else missing * options.candidates)
        drawn = draw_problems(run, attempt, step, resample_round, rounds[-1])
        fresh = [problem for problem in drawn if problem.key not in seen]
        if fresh and options is not None:
            rng = seeded_rng("curriculum", problem_seed(run.seed, attempt), step, resample_round)
            draws.append(draw(curriculum, run.task, fresh, missing, options, step=step, rng=rng))
            fresh = draws[-1].problems
        if fresh or resample_round == 0:
            groups += collect(fresh, attempt=attempt, step=step)
        seen |= {group.problem.key for group in groups} if resample_round == 0 else {p.key for p in fresh}
        missing = target - sum(map(has_signal, groups))
        if missing <= 0:
            break
    return StepRollouts(groups, describe_draws(draws) if draws else {}, draws=tuple(rounds))


def draw_problems(run: TrainingRun, attempt: int, step: int, resample_round: int, count: int) -> list[Problem]:
    """The problems that the task draws in a round. Round 0 is the step's first; later rounds resample."""
    return run.task.sample(count, seed=problem_seed(run.seed, attempt) + 1_000_003 * resample_round, step=step)


def problem_seed(seed: int, attempt: int) -> int:
    """The seed of the problems. A rollback changes it, so that the same batch is not repeated."""
    return seed + 15_485_863 * attempt
