"""Batches of rollouts that are not updates: TRL generates more often than it updates, or inside of an update."""

import pytest
from trl import GRPOTrainer

from integrations.small_trl import STEADY, WORDS, build, keel_trainer, lines
from keel.base.errors import KeelError
from keel.config import load_config
from keel.integrations.trl import KeelRunCallback
from keel.integrations.trl.window import problem_key
from keel.kl import KLOptions
from keel.reference.options import ReferenceOptions


def trainer_of(out, kl=STEADY, *, reference=None, **changes):
    shape = {"per_device_train_batch_size": 4, "max_completion_length": 3}
    return keel_trainer(out, kl, more={"reference": reference}, **{**shape, **changes})


def test_rollouts_have_the_prompt_and_the_reward_of_their_own_batch(tmp_path):
    """Two batches an update: each row belongs to the one that it was generated in."""
    trainer_of(tmp_path, steps_per_generation=1, gradient_accumulation_steps=2, max_steps=3).train()
    rows = lines(tmp_path, "rollouts.jsonl")
    assert len(rows) == 3 * 8
    for row in rows:
        ids = [WORDS.index(token.strip()) for token in row["tokens"]]
        assert row["reward"] == pytest.approx(sum(token % 2 == 0 for token in ids) / len(ids), abs=1e-6)
        assert row["messages"] == [{"role": "user", "content": row["prompt"]}]
        assert row["problem"] == problem_key(row["prompt"])
    groups = {(row["step"], row["group"], row["problem"]) for row in rows}
    assert len(groups) == 6  # one problem a group
    for step, group, _ in groups:
        advantages = [row["advantage"] for row in rows if (row["step"], row["group"]) == (step, group)]
        assert sum(advantages) == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "per_generation", "accumulated", "steps", "moves"),
    [(3, 1, 2, 6, 4), (1, 3, 2, 6, 4), (2, 2, 1, 8, 2)],
    ids=["several batches an update", "batches that end inside of updates", "several updates a batch"],
)
def test_a_reference_moves_between_batches_whatever_updates_are(
    tmp_path, every, per_generation, accumulated, steps, moves
):
    shape = {"steps_per_generation": per_generation, "gradient_accumulation_steps": accumulated, "max_steps": steps}
    trainer = trainer_of(tmp_path, reference=ReferenceOptions(kind="snapshot", every=every), **shape)
    trainer.train()
    assert trainer._batches == steps * accumulated // per_generation
    assert trainer.keel_reference.moves == moves


def test_an_update_that_is_due_is_measured_wherever_its_batches_begin(tmp_path):
    """Batches of 3 passes, updates of 2: the second batch begins inside of update 2 and ends with update 3."""
    shape = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 6, "learning_rate": 0.1}
    trainer_of(tmp_path, KLOptions(beta=0.0, measure_every=2), **shape).train()
    assert all("kl/policy_ref/k3/mean" in line for line in lines(tmp_path)[::2])


def test_a_batch_is_shown_once_however_often_it_is_trained_on(tmp_path):
    """Two microbatches, each a step, and two passes: steps 1 and 2 show a batch, 3 and 4 train on it again."""
    shape = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 8}
    trainer_of(tmp_path / "all", **shape).train()
    assert [row["step"] for row in lines(tmp_path / "all", "rollouts.jsonl")] == [
        step for step in (1, 2, 5, 6) for _ in range(4)
    ]
    trainer_of(tmp_path / "some", rollouts_every=2, **{**shape, "max_steps": 12}).train()
    assert {row["step"] for row in lines(tmp_path / "some", "rollouts.jsonl")} == {1, 2, 9, 10}
    assert load_config(tmp_path / "some" / "config.yaml").log.rollouts_every == 2


def test_rollouts_may_be_left_out(tmp_path):
    trainer_of(tmp_path, rollouts_every=0, max_steps=1).train()
    assert not (tmp_path / "rollouts.jsonl").exists()
    with pytest.raises(KeelError, match="rollouts_every is -1: use 0"):
        KeelRunCallback(rollouts_every=-1)


def test_a_plain_trainer_shows_no_rollouts(tmp_path):
    with pytest.raises(KeelError, match=r"rollouts_every is for KeelGRPOTrainer.*leave it out"):
        build(GRPOTrainer, tmp_path, keel={"callbacks": [KeelRunCallback(rollouts_every=2)]}).train()
