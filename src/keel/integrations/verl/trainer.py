"""verl's synchronous PPO trainer with Keel's KL term, controller of β and measurement: `trainer_mode=keel_sync`.

Keel's part of a checkpoint is `global_step_N/keel.json`, with the state of the controller of β.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.utils import need_critic
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls, register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import validate_config
from verl.workers.engine_workers import ActorRolloutRefWorker

import keel
from keel.base.errors import KeelError
from keel.base.files import write_atomic
from keel.integrations.verl import MODE, ReadsKeel
from keel.integrations.verl.loss import REPORTED, KeelLoss, policy_config
from keel.integrations.verl.settings import notes_on, settle
from keel.integrations.versions import VERL, VERL_WORKER_METHODS
from keel.kl import KLOptions, KLState, measure_kl
from keel.kl.measure import controlled_kl

STATE = "keel.json"
logger = logging.getLogger("keel")
VERL.check_version()
VERL.check_names(PPOTrainerSync)
VERL.check_names(ActorRolloutRefWorker, VERL_WORKER_METHODS)


class RewardBeta:
    """β in verl's interface for a controller of the KL in the reward.

    Keel updates β at the end of a step from the measured KL; verl's own `update` has no effect.
    """

    def __init__(self, trainer: KeelPPOTrainerSync) -> None:
        self.trainer = trainer

    @property
    def value(self) -> float:
        return self.trainer.keel_state.beta

    def update(self, current_kl: float, n_steps: int) -> None:
        pass


@register_trainer(MODE)
class KeelPPOTrainerSync(ReadsKeel, PPOTrainerSync):
    """verl's trainer with Keel's KL term; sampling, rewards and clipping are verl's."""

    def __init__(self, config: Any) -> None:
        self.keel = settle(config)
        validate_config(config=config, use_reference_policy=True, use_critic=need_critic(config))
        super().__init__(config)
        self.keel_state: KLState = self.keel.controller.init()
        if self.keel.in_reward:
            self.kl_ctrl_in_reward = RewardBeta(self)
        self._keel_actor = policy_config(config.actor_rollout_ref.actor)
        for note in notes_on(self.keel, config):
            logger.warning("%s", note)

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> Any:
        """verl's step, then β for the next one; β is unchanged while only the critic is trained."""
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        metrics["kl/beta"] = self.keel_state.beta
        if self.config.trainer.critic_warmup <= self.global_steps:
            kl = controlled_kl(metrics, self.keel.controller.unit)
            self.keel_state = self.keel.controller.update(self.keel_state, kl)
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Measure the KL of the step's initial policy on the whole batch, then compute verl's advantages."""
        if self.keel.kl.measures(self.global_steps):
            fields = ["response_mask", "old_log_probs", "ref_log_prob"]
            rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
            rows = rows.to_padded_tensor()
            mask, clamp = rows["response_mask"].bool(), self.keel.kl.log_ratio_clamp
            metrics.update(measure_kl(rows["old_log_probs"], rows["ref_log_prob"], mask, clamp=clamp))
        batch = super()._compute_advantage(batch, metrics)
        if self.keel.in_reward and metrics.get("actor/reward_kl_penalty_coeff") != self.keel_state.beta:
            raise KeelError(
                "verl did not subtract the KL from the reward with Keel's β: does another plugin replace it?"
            )
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Set Keel's loss with this step's β in the workers, update, and check that it was used."""
        if self.keel.in_reward:
            return super()._update_actor(batch, metrics)
        loss = KeelLoss(self._keel_actor, self.keel.kl, self.keel.pairing, self.keel_state.beta)
        self.actor_rollout_wg.set_loss_fn(loss)
        batch = super()._update_actor(batch, metrics)
        for name in REPORTED:
            if f"actor/{name}" not in metrics:
                raise KeelError(
                    f"verl's workers did not use Keel's loss ({name} is missing): does another plugin replace it?"
                )
            metrics[name] = metrics.pop(f"actor/{name}")
        return batch

    def _save_checkpoint(self) -> None:
        save_state(saved_folder(self.config.trainer, self.global_steps), self.keel.kl, self.keel_state)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps > 0:
            folder = resumed_folder(self.config.trainer, self.global_steps)
            self.keel_state = load_state(folder, self.keel.kl) or self.keel_state


def saved_folder(trainer: Any, step: int) -> Path:
    """The folder of verl's checkpoint of a step; `trainer` is that section of verl's configuration."""
    return Path(trainer.default_local_dir) / f"global_step_{step}"


def resumed_folder(trainer: Any, step: int) -> Path:
    """The checkpoint that verl has resumed from."""
    return Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else saved_folder(trainer, step)


def _settings(kl: KLOptions) -> dict[str, Any]:
    """The settings for which a controller's state is valid."""
    return json.loads(json.dumps({"beta": kl.beta, "controller": kl.controller.model_dump()}))


def save_state(folder: Path, kl: KLOptions, state: KLState) -> None:
    """Write keel.json before verl writes its part, so that every complete checkpoint has it."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"keel": keel.__version__, "settings": _settings(kl), "state": state.to_dict()}
    write_atomic(folder / STATE, json.dumps(record, indent=1))


def load_state(folder: Path, kl: KLOptions) -> KLState | None:
    """The controller's state; None for a checkpoint of plain verl, or if β or its controller have changed."""
    path = folder / STATE
    if not path.is_file():
        logger.warning("%s is a checkpoint of plain verl: Keel's controller of β starts from its initial state", folder)
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        settings, state = record["settings"], KLState.from_dict(record["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KeelError(f"{path} cannot be read ({error}): restore it, or resume from another checkpoint") from None
    if settings != _settings(kl):
        logger.warning("kl.beta or kl.controller differs from %s: β starts again at %g", path, kl.beta)
        return None
    return state


if get_trainer_cls(MODE) is not KeelPPOTrainerSync:
    raise KeelError(f"verl's registry does not have Keel's trainer under {MODE}: does another plugin replace it?")
