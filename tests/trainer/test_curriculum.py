"""A curriculum in a run: what it draws, what it records, and exact resume with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs.curriculum import Curriculum, has_signal
from keel.envs.mixture import mixture
from keel.trainer.checkpoint import load_checkpoint, save_checkpoint
from keel.trainer.step import train_step
from trainer.small import Letters, small_config
from trainer.test_overlap import make, take_steps

OPTION = "data.curriculum={candidates: 4, half_life: 3}"


class Uneven(Letters):
    """Letters over twelve problems that return; those of the stratum `same` pay every completion alike."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        numbers = [(seed + step * count + i) % 12 for i in range(count)]
        repeats = [Counter(numbers[:i])[n] for i, n in enumerate(numbers)]
        return [Problem(f"{n}#{k}" if k else f"{n}", f"{n}=", "abc") for n, k in zip(numbers, repeats, strict=True)]

    def stratum(self, problem: Problem) -> str:
        return "same" if int(problem.key.rpartition("/")[2].partition("#")[0]) % 2 else "mixed"

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(1.0, {"letters": 1.0}) if self.stratum(problem) == "same" else super().reward(problem, turns)


def uneven() -> Uneven:
    return Uneven()


def test_problems_with_signal_are_drawn_more_often_and_all_is_recorded() -> None:
    run, state = make(OPTION, task=uneven())
    shares = []
    for _ in range(12):
        before = state.curriculum
        state, metrics, batch = train_step(run, state)
        strata = [run.task.stratum(group.problem) for group in batch.groups]
        assert metrics["data/share/letters/same"] == strata.count("same") / 3
        assert metrics["data/share_of_task/letters/same"] == metrics["data/share_of_task/letters/mixed"] == 0.5
        rates = [before.expected(run.task, g.problem, run.curriculum, state.step - 1) for g in batch.groups]  # type: ignore[arg-type]
        assert metrics["data/expected_signal"] == pytest.approx(fmean(rates))
        assert state.curriculum == before.observe(run.task, batch.groups, run.curriculum, state.step - 1)  # type: ignore[arg-type]
        assert metrics["reward/zero_variance_fraction"] == pytest.approx(1 - fmean(map(has_signal, batch.groups)))
        shares.append(metrics["data/share/letters/mixed"])
    assert fmean(shares[4:]) > 0.6
    run.close()


def test_without_it_the_task_decides_and_nothing_is_counted() -> None:
    run, state = make(task=uneven())
    state, metrics, batch = train_step(run, state)
    assert [group.problem for group in batch.groups] == run.task.sample(3, seed=0, step=0)
    assert state.curriculum == Curriculum()
    assert not [name for name in metrics if name.startswith("data/")]
    run.close()


def test_the_parts_of_a_mixture_have_figures_of_their_own() -> None:
    task = mixture([uneven(), replace(Letters(), name="plain")], [1, 2])
    run, state = make(OPTION, task=task)
    _, metrics, batch = train_step(run, state)
    for number, name in enumerate(("letters", "plain")):
        own = [group for group in batch.groups if group.problem.info["mixture"] == number]
        assert metrics[f"task/{name}/share"] == len(own) / 3
        if own:
            assert metrics[f"task/{name}/reward"] == pytest.approx(fmean(r.total for g in own for r in g.rewards))
            assert metrics[f"task/{name}/signal_fraction"] == fmean(map(has_signal, own))
    assert {"data/share_of_task/plain", "data/share_of_task/letters/same"} <= set(metrics)
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("loss.dynamic_sampling=true", "rollout.num_generations=2")])
def test_a_run_goes_on_exactly_from_any_checkpoint(tmp_path: Path, more: tuple[str, ...]) -> None:
    options, lines, folders = (OPTION, "task.name=trainer.test_curriculum:uneven", *more), [], []
    run, state = make(*options)
    for later, metrics in take_steps(run, state, 5):
        folders.append(save_checkpoint(tmp_path, run, later))
        lines.append(metrics)
    for step, folder in enumerate(folders[:4], start=1):
        other, _ = make(*options, weights=folder)
        state = load_checkpoint(folder, other)
        assert state.curriculum.problems
        assert [metrics for _, metrics in take_steps(other, state, 5 - step)] == lines[step:]


def test_a_retry_draws_other_problems_by_the_same_estimates() -> None:
    run, state = make(OPTION, "rollout.prompts_per_step=2", task=uneven())
    state = train_step(run, state).state
    drawn = [
        [group.problem.key for group in train_step(run, replace(state, attempt=attempt)).batch.groups]
        for attempt in range(6)
    ]
    assert len(set(map(tuple, drawn))) > 1
    run.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.curriculum.candidates=1"], r"data\.curriculum\.candidates"),
        (["data.curriculum.half_life=0"], r"data\.curriculum\.half_life"),
        ([OPTION, "loss.baseline=none", "loss.scale_rewards=none"], r"data\.curriculum.*loss\.baseline=none"),
        (
            [OPTION, "loss.policy_weight=0", "kl.beta=1", "reference.model=trainer.small:other_model"],
            r"data\.curriculum.*loss\.policy_weight=0",
        ),
    ],
)
def test_what_it_cannot_be_used_with_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        small_config(*overrides)
