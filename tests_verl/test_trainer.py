"""Keel's trainer on verl's own, with stand-ins for the workers and for the TransferQueue."""

import copy
import json
import logging
from types import SimpleNamespace

import pytest
import torch
import transfer_queue
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric

from conftest import keel_config, nested, verl_config
from keel.base.errors import KeelError
from keel.integrations.verl.trainer import KeelPPOTrainerSync
from keel.kl import KLOptions, controller_from_options, measure_kl

pytestmark = pytest.mark.peers


SCORES = (1.0, 0.0, 1.0, 0.0)


class Workers:
    """The actor's workers: they keep the loss that they are given, and an update is one pass with it over all rows."""

    def __init__(self, rows, loss=None):
        self.rows, self.loss, self.fixed, self.saved = rows, loss, loss is not None, []

    def set_loss_fn(self, loss):
        self.loss = self.loss if self.fixed else loss

    def update_actor(self, batch):
        _, metrics = self.loss(*self.rows.micro(range(len(self.rows.lengths))))
        metrics = {name: [value.aggregate() if isinstance(value, Metric) else value] for name, value in metrics.items()}
        return {"metrics": {**metrics, "mfu": [0.0]}}

    def save_checkpoint(self, path, *args, **named):
        self.saved.append(path)

    def load_checkpoint(self, **named):
        pass


@pytest.fixture
def queue(monkeypatch, rows):
    """What the TransferQueue holds of the rows; what is put there afterwards is kept beside it."""
    columns = {"response_mask": rows.mask, "old_log_probs": rows.old, "ref_log_prob": rows.ref}
    columns["rm_scores"] = [torch.zeros(n, dtype=torch.float64) for n in rows.lengths]
    for values, score in zip(columns["rm_scores"], SCORES, strict=True):
        values[-1] = score
    fields = {name: nested(values) for name, values in columns.items()}
    fields["uid"] = ["a", "a", "b", "b"]

    def get(keys, partition_id, select_fields):
        return tu.get_tensordict({name: fields[name] for name in select_fields if name in fields})

    def put(keys, partition_id, fields: TensorDict):
        stored.update({name: fields[name] for name in fields.keys()})  # noqa: SIM118
        return BATCH

    stored: dict = {}
    monkeypatch.setattr(transfer_queue, "kv_batch_get", get)
    monkeypatch.setattr(transfer_queue, "kv_batch_put", put)
    return stored


BATCH = KVBatchMeta(keys=["a_0_0", "a_1_0", "b_0_0", "b_1_0"], tags=[{}] * 4, partition_id="train")


def build(rows, *overrides, folder=None, kind=KeelPPOTrainerSync, make=keel_config):
    where = () if folder is None else (f"trainer.default_local_dir={folder}",)
    trainer = kind(make(*overrides, *where))
    trainer.actor_rollout_wg, trainer.global_steps, trainer.distillation_config = Workers(rows), 1, None
    trainer.train_dataloader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    return trainer


def step(trainer):
    """verl's step from where the KL begins to matter; sampling and scoring are done."""
    metrics: dict = {}
    batch = copy.deepcopy(BATCH)
    parts = {"_compute_old_log_prob": None, "_compute_ref_log_prob": None, "_balance_batch": None}
    for name in parts:
        setattr(trainer, name, lambda batch, metrics: batch)
    trainer.replay_buffer = SimpleNamespace(sample=lambda **named: (batch, {}))
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.on_sample_end = lambda: None
    trainer._step_once(metrics, {}, 4)
    trainer.global_steps += 1
    return metrics


def test_verl_builds_keels_trainer():
    assert get_trainer_cls("keel_sync") is KeelPPOTrainerSync


def test_it_is_verls_synchronous_trainer_with_a_reference(rows):
    trainer = build(rows, "+keel.kl.beta=0.0")
    assert trainer.trainer_mode == "sync"
    assert trainer.use_reference_policy
    assert type(trainer.replay_buffer).__name__ == "ReplayBuffer"


def test_the_kl_is_measured_at_beta_0(rows, queue):
    line = step(build(rows, "+keel.kl.beta=0.0"))
    mask = rows.padded(rows.mask).bool()
    expected = measure_kl(rows.padded(rows.old), rows.padded(rows.ref), mask)
    assert {name: line[name] for name in expected} == pytest.approx(expected)
    assert line["kl/policy_ref/k3/se"] > 0
    assert line["kl/beta"] == 0.0
    assert line["loss/kl"] == 0.0


def test_it_is_measured_every_so_many_steps(rows, queue):
    trainer = build(rows, "+keel.kl.beta=0.1", "+keel.kl.measure_every=2")
    measured = ["kl/policy_ref/k3/mean" in step(trainer) for _ in range(4)]
    assert measured == [False, True, False, True]


def test_the_workers_get_the_beta_of_the_step(rows, queue):
    trainer = build(rows, "+keel.kl.beta=0.1", "+keel.kl.controller={name: step, target: 0.001}")
    betas, losses = [], []
    for _ in range(3):
        losses.append(step(trainer)["loss/kl"])
        betas.append(trainer.actor_rollout_wg.loss.beta)
    assert betas == pytest.approx([0.1, 0.2, 0.4])  # the KL is far above the target: PPO's rule doubles
    assert losses == pytest.approx([losses[0], 2 * losses[0], 4 * losses[0]])


def test_beta_follows_keels_controller(rows, queue):
    """Through verl's step and on its own, on the same KL; the target is near it in the controller's unit alone."""
    given = {"name": "ziegler", "target": 0.55, "horizon": 40}
    trainer = build(rows, "+keel.kl.beta=0.1", f"+keel.kl.controller={json.dumps(given)}")
    alone = controller_from_options(KLOptions(beta=0.1, controller=given), episodes_per_step=4 * 2)
    state = alone.init()
    for _ in range(3):
        line = step(trainer)
        state = alone.update(state, line["kl/policy_ref/sequence/mean"])
        assert trainer.keel_state == state
    assert state.beta > 0.1  # by tokens the KL is far below the target, and β would fall


def test_while_the_critic_alone_is_trained_beta_is_not_steered(rows, queue):
    controller = "+keel.kl.controller={name: step, target: 0.001}"
    trainer = build(rows, "+keel.kl.beta=0.1", controller, "trainer.critic_warmup=3")
    betas = [step(trainer)["kl/beta"] for _ in range(4)]
    assert betas == pytest.approx([0.1, 0.1, 0.1, 0.2])  # steps 1 and 2 have no update of the actor; 3 steers for 4


def test_workers_that_keep_verls_loss_are_found_out(rows, queue):
    from functools import partial

    from verl.workers.utils.losses import ppo_loss

    from keel.integrations.verl.loss import policy_config

    trainer = build(rows, "+keel.kl.beta=0.1")
    verls = partial(ppo_loss, policy_config(trainer.config.actor_rollout_ref.actor))
    trainer.actor_rollout_wg = Workers(rows, loss=verls)
    with pytest.raises(KeelError, match="did not use Keel's loss"):
        step(trainer)


REWARD = ("+keel.kl.placement=reward", "+keel.kl.estimator=k1", "+keel.kl.beta=0.2")


def test_in_the_reward_it_is_verls_at_the_same_beta(rows, queue):
    """verl's own fixed controller and Keel's: the same rewards and advantages."""
    line = step_of_advantages(build(rows, *REWARD))
    ours = {name: queue[name] for name in ("token_level_rewards", "advantages")}
    assert line["actor/reward_kl_penalty_coeff"] == 0.2
    own = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.2")
    step_of_advantages(build(rows, *own, kind=get_trainer_cls("sync"), make=verl_config))
    for name, values in ours.items():
        torch.testing.assert_close(values.values(), queue[name].values(), atol=1e-12, rtol=0)
    taken = rows.padded(ours["token_level_rewards"].unbind()).sum(-1)
    kl = ((rows.padded(rows.old) - rows.padded(rows.ref)) * rows.padded(rows.mask)).sum(-1)
    torch.testing.assert_close(taken, torch.tensor(SCORES, dtype=torch.float64) - 0.2 * kl)


def step_of_advantages(trainer):
    metrics: dict = {}
    trainer._compute_advantage(copy.deepcopy(BATCH), metrics)
    return metrics


def test_in_the_reward_beta_is_steered_too(rows, queue):
    trainer = build(rows, *REWARD, "+keel.kl.controller={name: step, target: 0.001}")
    trainer.actor_rollout_wg = Workers(rows, loss=lambda output, data: (None, {}))
    coefficients = [step(trainer)["actor/reward_kl_penalty_coeff"] for _ in range(3)]
    assert coefficients == pytest.approx([0.2, 0.4, 0.8])


def test_a_controller_that_is_not_keels_is_found_out(rows, queue):
    trainer = build(rows, *REWARD)
    trainer.kl_ctrl_in_reward = SimpleNamespace(value=0.5, update=lambda current_kl, n_steps: None)
    with pytest.raises(KeelError, match="with Keel's β"):
        step_of_advantages(trainer)


# ------------------------------------------------------------------------------------------- checkpoints

DUAL = ("+keel.kl.beta=0.1", "+keel.kl.controller={name: dual, target: 0.05, smoothing: 0.9}")


def resumed(rows, folder, *overrides):
    trainer = build(rows, *overrides, folder=folder)
    trainer._load_checkpoint()
    trainer.global_steps += 1
    return trainer


def saved(rows, folder, *overrides, steps=3):
    trainer = build(rows, *overrides, folder=folder)
    for _ in range(steps):
        step(trainer)
    trainer.global_steps -= 1  # verl saves before it counts on
    trainer._save_checkpoint()
    trainer.global_steps += 1
    return trainer


def test_the_controllers_state_is_in_the_checkpoint(rows, queue, tmp_path):
    """A resumed run steers as one that was left alone; the smoothed KL is part of that."""
    alone = saved(rows, tmp_path, *DUAL)
    other = resumed(rows, tmp_path, *DUAL)
    assert other.global_steps == alone.global_steps == 4
    assert other.keel_state == alone.keel_state
    assert other.keel_state.smoothed is not None
    assert step(other)["kl/beta"] == step(alone)["kl/beta"] != 0.1
    assert other.keel_state == alone.keel_state


def test_it_resumes_from_a_path(rows, queue, tmp_path):
    alone = saved(rows, tmp_path / "first", *DUAL)
    path = tmp_path / "first" / "global_step_3"
    other = resumed(
        rows, tmp_path / "second", *DUAL, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"
    )
    assert other.keel_state == alone.keel_state


def test_keels_part_is_there_before_verl_calls_a_checkpoint_complete(rows, queue, tmp_path, monkeypatch):
    trainer = build(rows, *DUAL, folder=tmp_path)

    def dies(*args, **named):
        raise OSError("disk full")

    monkeypatch.setattr(trainer.actor_rollout_wg, "save_checkpoint", dies)
    with pytest.raises(OSError, match="disk full"):
        trainer._save_checkpoint()
    assert (tmp_path / "global_step_1" / "keel.json").is_file()
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()


def test_without_a_checkpoint_it_begins_at_beta(rows, queue, tmp_path):
    trainer = resumed(rows, tmp_path, *DUAL)
    assert trainer.keel_state.beta == 0.1


def test_a_checkpoint_of_plain_verl_is_said(rows, queue, tmp_path, caplog):
    saved(rows, tmp_path, *DUAL)
    (tmp_path / "global_step_3" / "keel.json").unlink()
    with caplog.at_level(logging.WARNING, "keel"):
        trainer = resumed(rows, tmp_path, *DUAL)
    assert "a checkpoint of plain verl" in caplog.text
    assert trainer.keel_state.beta == 0.1


def test_another_beta_begins_anew_and_is_said(rows, queue, tmp_path, caplog):
    saved(rows, tmp_path, *DUAL)
    with caplog.at_level(logging.WARNING, "keel"):
        trainer = resumed(rows, tmp_path, "+keel.kl.beta=0.3", DUAL[1])
    assert "at 0.3" in caplog.text
    assert trainer.keel_state.beta == 0.3


@pytest.mark.parametrize("text", ["{", "[]", '{"state": {}}', '{"settings": {}, "state": {}}'])
def test_a_broken_file_is_refused(rows, queue, tmp_path, text):
    saved(rows, tmp_path, *DUAL)
    (tmp_path / "global_step_3" / "keel.json").write_text(text)
    with pytest.raises(KeelError, match=r"keel.json cannot be read"):
        resumed(rows, tmp_path, *DUAL)


@pytest.mark.parametrize("beta", ["NaN", "Infinity", "-Infinity", "-0.1"])
def test_a_beta_that_is_no_number_is_refused(rows, queue, tmp_path, beta):
    """It would be in the loss of every step after the resume."""
    trainer = saved(rows, tmp_path, *DUAL)
    path = tmp_path / "global_step_3" / "keel.json"
    record = json.loads(path.read_text())
    record["state"]["beta"] = float(beta)
    path.write_text(json.dumps(record))
    with pytest.raises(KeelError, match=r"keel.json cannot be read \(.*beta is .*\)") as refused:
        resumed(rows, tmp_path, *DUAL)
    assert "\n" not in str(refused.value)
    record["state"]["beta"] = trainer.keel_state.beta
    path.write_text(json.dumps(record))
    assert resumed(rows, tmp_path, *DUAL).keel_state == trainer.keel_state


def test_verls_adaptive_controller_is_not_in_verls_checkpoint(rows, queue, tmp_path):
    """What Keel's file is for: verl's own coefficient is back at its start after a resume."""
    own = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.2")

    def trainer():
        return build(rows, *own, folder=tmp_path, kind=get_trainer_cls("sync"), make=verl_config)

    first = trainer()
    step_of_advantages(first)
    assert first.kl_ctrl_in_reward.value != 0.2
    first._save_checkpoint()
    second = trainer()
    second._load_checkpoint()
    assert second.global_steps == 1
    assert second.kl_ctrl_in_reward.value == 0.2


# ---------------------------------------------------------------------------------------------- refusals

AGGREGATE = "actor_rollout_ref.actor.loss_agg_mode"
REFUSED = {
    "no beta": ((), r"kl.beta is not given"),
    "nothing to do": (("+keel.kl.beta=0.0", "+keel.kl.measure_every=0"), r"kl.measure_every=1"),
    "a section": (("+keel.guards.on_nans=stop", "+keel.kl.beta=0.1"), r"^keel.guards .*verl.*leave"),
    "no section": (("+keel=0.1",), r"^keel is 0.1: expected a section"),
    "no section kl": (("+keel.kl=0.1",), r"^keel.kl is 0.1: expected a section"),
    "a sum of sequences": (
        ("+keel.kl.beta=0.1", "+keel.kl.estimator=k1", "+keel.kl.level=sequence", f"{AGGREGATE}=token-sum"),
        r"kl.level=sequence is a mean .* use kl.level=token",
    ),
    "an option": (("+keel.kl.beta=0.1", "+keel.kl.estimater=k3"), r"unknown option kl.estimater: did you mean"),
    "a value": (("+keel.kl.beta=-1",), r"kl.beta"),
    "a pairing": (("+keel.kl.beta=0.1", "+keel.kl.estimator=k1", "+keel.kl.gradient=plain"), r"regularises nothing"),
    "k3 in the advantage": (("+keel.kl.beta=0.1", "+keel.kl.placement=advantage"), r"use estimator=k1"),
    "k3 in the reward": (("+keel.kl.beta=0.1", "+keel.kl.placement=reward"), r"kl.estimator=k1"),
    "a clamp in the reward": ((*REWARD, "+keel.kl.log_ratio_clamp=5"), r"kl.log_ratio_clamp"),
    "exact": (("+keel.kl.beta=0.1", "+keel.kl.estimator=exact"), r"kl.estimator=k3 and kl.exact=false"),
    "a budget": (("+keel.kl.beta=0.1", "+keel.kl.budget=0.5"), r"kl.budget .*verl"),
    "collect_max": (("+keel.kl.beta=0.1", "+keel.kl.collect_max=0.5"), r"kl.collect_max .*verl"),
    "verl's loss": (("+keel.kl.beta=0.1", "actor_rollout_ref.actor.use_kl_loss=True"), r"use_kl_loss=False"),
    "verl's reward": (("+keel.kl.beta=0.1", "algorithm.use_kl_in_reward=True"), r"\+keel.kl.placement=reward"),
    "distillation": (("+keel.kl.beta=0.1", "distillation.enabled=True"), r"distillation .*False"),
    "a reduction": (("+keel.kl.beta=0.1", f"{AGGREGATE}=mean"), r"loss_agg_mode=mean"),
    "a mode": (("+keel.kl.beta=0.1", "trainer.v1.trainer_mode=sync"), r"set keel_sync"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(case):
    overrides, line = REFUSED[case]
    with pytest.raises(KeelError, match=line) as refused:
        KeelPPOTrainerSync(keel_config(*overrides))
    assert "\n" not in str(refused.value)


SAID = {
    "forward": (("+keel.kl.beta=0.1", "+keel.kl.gradient=plain"), "∇KL(ref‖policy)"),
    "by length": (
        ("+keel.kl.beta=0.1", "+keel.kl.reduction=loss", f"{AGGREGATE}=seq-mean-token-mean"),
        "1/length",
    ),
    "deviation": (REWARD, "norm_adv_by_std_in_grpo"),
    "bypass": (("+keel.kl.beta=0.1", "algorithm.rollout_correction.bypass_mode=True"), "bypass_mode"),
    "rejection": (("+keel.kl.beta=0.1", "algorithm.rollout_correction.rollout_rs=token_k1"), "rejected tokens"),
    "filters": (("+keel.kl.beta=0.1", "actor_rollout_ref.rollout.top_p=0.9"), "top_p"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_may_surprise_is_said(case, caplog):
    overrides, part = SAID[case]
    with caplog.at_level(logging.WARNING, "keel"):
        KeelPPOTrainerSync(keel_config(*overrides))
    assert part in caplog.text


def test_a_right_choice_says_nothing(caplog):
    with caplog.at_level(logging.WARNING, "keel"):
        KeelPPOTrainerSync(keel_config("+keel.kl.beta=0.1"))
    assert not [record for record in caplog.records if record.name == "keel"]
