"""What verl would leave unread is refused: the section `keel` without `keel_sync`, by each of verl's own trainers."""

import pytest
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import get_trainer_cls

from conftest import keel_config, verl_config
from keel.base.errors import KeelError

pytestmark = pytest.mark.peers


BETA = "+keel.kl.beta=0.1"
# what verl asks of separate_async first
SEPARATE = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_section_that_a_mode_of_verls_would_not_read_is_refused(mode):
    config = verl_config(BETA, f"trainer.v1.trainer_mode={mode}", *SEPARATE)
    line = rf"^trainer.v1.trainer_mode={mode} does not read the section keel.*set trainer.v1.trainer_mode=keel_sync"
    with pytest.raises(KeelError, match=line) as refused:
        get_trainer_cls(mode)(config=config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "unread"),
    [(verl_config(BETA), "the section keel"), (keel_config(), "trainer.v1.trainer_mode=keel_sync")],
)
def test_the_legacy_trainer_refuses_what_it_would_not_read(config, unread):
    config.trainer.use_v1 = False
    line = rf"^trainer.use_v1=False does not read {unread}, .*: set trainer.use_v1=True trainer.v1.trainer_mode=keel_s"
    with pytest.raises(KeelError, match=line):
        RayPPOTrainer(config=config, tokenizer=None, role_worker_mapping={}, resource_pool_manager=None)


def test_without_keels_section_verls_trainers_are_built_as_ever():
    assert get_trainer_cls("sync")(config=verl_config()).trainer_mode == "sync"
    legacy = verl_config()
    legacy.trainer.use_v1 = False
    with pytest.raises(AssertionError, match="role_worker_mapping"):  # verl's own first check
        RayPPOTrainer(legacy, None, {}, None)
