"""Tokens that are left out, through whole runs: completions that were cut off, and what an environment has said."""

from functools import partial

import pytest
from trl import GRPOTrainer

from integrations.small_trl import TRLS_OWN, build, gap, keel_trainer, lines, scripted, weights
from keel.kl import KLOptions

OUTSIDE = {"rollout_func": partial(scripted, outside=True)}
MASKS = {
    "cut off": ({}, {"mask_truncated_completions": True, "max_completion_length": 12}),
    "an environment's": (OUTSIDE, {}),
    "both": (OUTSIDE, {"mask_truncated_completions": True}),
}
KL = TRLS_OWN.model_copy(update={"beta": 0.2})


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("case", MASKS)
def test_what_is_masked_is_neither_trained_nor_measured(tmp_path, case, loss_type):
    """TRL's weights and TRL's own KL: a mean over the tokens that are left."""
    more, changes = MASKS[case]
    changes = {**changes, "loss_type": loss_type, "max_steps": 3}
    theirs = build(GRPOTrainer, tmp_path / "trl", keel=more, **changes)
    theirs.train()
    ours = keel_trainer(tmp_path / "keel", KL, more=more, **changes)
    ours.train()
    assert gap(weights(theirs), weights(ours)) < 1e-6
    logged = [line["kl"] for line in theirs.state.log_history if "kl" in line]
    measured = [line.get("kl/policy_ref/k3/mean", 0.0) for line in lines(tmp_path / "keel")]  # none where TRL has a 0
    assert measured == pytest.approx(logged, abs=1e-6)
    assert max(measured) > 1e-4


def test_rollouts_show_whose_a_token_was(tmp_path):
    keel_trainer(tmp_path, more=OUTSIDE, max_steps=1).train()
    rows = lines(tmp_path, "rollouts.jsonl")
    assert all(row["action"] == [place != 1 for place in range(len(row["tokens"]))] for row in rows)
    assert all(row["kl"][1] == 0 for row in rows)


def test_a_batch_whose_completions_were_all_cut_off_changes_nothing(tmp_path):
    def endless(prompts, trainer):
        output = scripted(prompts, trainer)
        return {**output, "completion_ids": [[1, 2, 3] for _ in prompts]}

    kl = KLOptions(beta=0.1, estimator="exact", controller={"name": "step", "target": 1.0})
    more = {"rollout_func": endless}
    trainer = keel_trainer(tmp_path, kl, more=more, max_steps=1, mask_truncated_completions=True)
    before = weights(trainer)
    trainer.train()
    assert gap(before, weights(trainer)) == 0
    (line,) = lines(tmp_path)
    assert line["guard/skipped"] == 0
    assert "kl/policy_ref/exact/mean" not in line  # of no token there is none, and β is not steered by a 0
    assert trainer.keel_state.beta == 0.1
