"""Checkpoints of a run of Keel's inside TRL: what is resumed, refused, replaced, and gone back to."""

import json

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model

from integrations.small_trl import gap, keel_trainer, lines, lora, small_model, weights
from keel.base.errors import KeelError
from keel.integrations.trl import KeelGRPOTrainer
from keel.integrations.trl.rundir import good_checkpoints, load_state
from keel.kl import KLOptions, KLState
from keel.loggers import RunDirectory
from keel.reference.options import ReferenceOptions
from keel.trainer.state import State

KL = KLOptions(beta=0.1)
SAVES = {"save_strategy": "steps", "save_steps": 1, "max_completion_length": 2}


def test_a_run_is_resumed_with_the_options_that_it_had(tmp_path):
    """β and the reference go on from the checkpoint: others would stand in config.yaml and not be trained."""
    keel_trainer(tmp_path, max_steps=1, **SAVES).train()
    last = str(tmp_path / "checkpoint-1")
    other = KL.model_copy(update={"beta": 5.0})
    with pytest.raises(KeelError, match=r"kl\.beta was 0\.1 in .*checkpoint-1 and is 5\.0 now: resume with"):
        keel_trainer(tmp_path, other, max_steps=2, **SAVES).train(resume_from_checkpoint=last)
    moving = {"reference": ReferenceOptions(kind="snapshot", every=2)}
    with pytest.raises(KeelError, match=r"reference\.kind was 'auto'"):
        keel_trainer(tmp_path, more=moving, max_steps=2, **SAVES).train(resume_from_checkpoint=last)
    limited = KLOptions(beta=0.1, budget={"max": 100.0})
    keel_trainer(tmp_path, limited, max_steps=2, **SAVES).train(resume_from_checkpoint=last)
    assert [line["kl/beta"] for line in lines(tmp_path)] == [0.1, 0.1]


def test_a_run_that_goes_on_keeps_its_checkpoints(tmp_path):
    """A second start with if_exists="replace" is refused by the first one's lock, and has then removed nothing."""
    keel_trainer(tmp_path, max_steps=1, **SAVES).train()
    living = RunDirectory.resume(tmp_path)
    try:
        with pytest.raises(KeelError, match="open"):
            keel_trainer(tmp_path, if_exists="replace", max_steps=1, **SAVES).train()
    finally:
        living.close()
    assert (tmp_path / "checkpoint-1" / "keel.json").is_file()


class Drifting(KeelGRPOTrainer):
    """A reference that is a nat further away every step."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        output["ref_per_token_logps"] -= self.state.global_step
        return output


def test_a_stop_keeps_its_checkpoint_where_only_the_best_one_is_kept(tmp_path):
    """transformers removes all but the best as training ends: the one that the stop goes back to is spared."""

    class Judged(Drifting):
        def evaluate(self, *args, **named):
            metrics = {"eval_reward": -self.state.global_step}  # the first is the best
            self.log(dict(metrics))
            return metrics

    rows = Dataset.from_dict({"prompt": ["w1 w2"] * 4})
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "reward", "save_total_limit": 1}
    kl = KLOptions(beta=1e-3, budget={"max": 3.5})  # k3 is 3 at step 5, where d is 4, and 4 at step 6
    changes = {**SAVES, **best, "save_steps": 2, "max_steps": 8, "learning_rate": 1e-4, "greater_is_better": True}
    changes["load_best_model_at_end"] = True
    trainer = keel_trainer(tmp_path, kl, cls=Judged, more={"eval_dataset": rows}, **changes)
    trainer.train()
    assert trainer.state.global_step == 6
    assert "checkpoint-4" in trainer.keel_stopped
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    again = keel_trainer(tmp_path / "other", kl)
    again._load_from_checkpoint(str(tmp_path / "checkpoint-4"))
    assert gap(weights(trainer), weights(again)) == 0


def test_a_checkpoint_that_was_torn_is_none_of_plain_trl(tmp_path, monkeypatch):
    """keel.json is there before the weights: killed in between, a run is not resumed with β and guards begun anew."""
    trainer = keel_trainer(tmp_path, max_steps=2, **SAVES)

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "save_model", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (tmp_path / "checkpoint-1" / "keel.json").is_file()
    assert list(good_checkpoints(tmp_path, confirmed=1)) == []
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        keel_trainer(tmp_path, max_steps=2, **SAVES).train(resume_from_checkpoint=True)


def test_a_second_run_of_one_trainer_begins_anew(tmp_path):
    """β, the guards' memory and what an interrupted run had not logged are the first run's alone."""
    kl = KLOptions(beta=0.2, controller={"name": "step", "target": 0.001})
    trainer = keel_trainer(tmp_path, kl, if_exists="replace", learning_rate=0.1, max_steps=3, logging_steps=2)
    trainer.train()
    assert trainer.keel_state.beta != 0.2
    norms = trainer.keel_state.norms
    trainer._metrics["train"]["reward"].append(1e6)  # as an interrupted run leaves it
    trainer.train()
    first = lines(tmp_path)[0]
    assert first["kl/beta"] == 0.2
    assert first["reward/mean"] <= 1
    assert len(trainer.keel_state.norms) == len(norms) == 3


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_resumed_run_is_the_run(tmp_path, adapter):
    """β of a controller with a memory, and a reference that has moved, are in TRL's checkpoint: it goes on in a new
    trainer, and in the one that was there already."""
    dual = {"name": "dual", "target": 0.001, "learning_rate": 0.5, "smoothing": 0.9}
    kl = KLOptions(beta=0.1, controller=dual)
    rate = 1.0 if adapter else 0.05

    def run(out, **changes):
        more = {
            "reference": ReferenceOptions(kind="ema", alpha=0.5, every=1),
            **({"peft_config": lora()} if adapter else {}),
        }
        return keel_trainer(out, kl, more=more, learning_rate=rate, save_strategy="steps", save_steps=2, **changes)

    whole = run(tmp_path / "whole")
    whole.train()
    before, ended = untimed(tmp_path / "whole"), weights(whole)
    state, reference = whole.keel_state.kl, whole.keel_reference.fingerprint()
    for resumed in (run(tmp_path / "whole"), whole):
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
        assert untimed(tmp_path / "whole") == before
        assert gap(ended, weights(resumed)) == 0
        assert resumed.keel_state.kl == state
        assert resumed.keel_reference.fingerprint() == reference


def untimed(out):
    """A run's metrics without times, speeds and memory."""
    timed = ("time/", "speed/", "memory/")
    return [{name: line[name] for name in line if not name.startswith(timed)} for line in lines(out)]


def test_a_run_from_a_trained_adapter_is_resumed(tmp_path):
    """Its reference is a second adapter, which no checkpoint of the policy holds."""

    def run():
        torch.manual_seed(3)
        policy = get_peft_model(small_model(), lora(init_lora_weights=False))
        return keel_trainer(tmp_path, model=policy, learning_rate=1.0, max_steps=2, **SAVES)

    whole = run()
    whole.train()
    before = untimed(tmp_path)
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert untimed(tmp_path) == before
    assert before[-1]["kl/policy_ref/k3/mean"] > 0
    assert gap(weights(whole), weights(resumed)) == 0


@pytest.mark.parametrize("beta", ["NaN", "Infinity", "-0.1"])
def test_a_checkpoint_whose_beta_is_no_number_is_refused(tmp_path, beta):
    keel_trainer(tmp_path, max_steps=1, **SAVES).train()
    path = tmp_path / "checkpoint-1" / "keel.json"
    path.write_text(path.read_text().replace('"beta": 0.1', f'"beta": {beta}'))
    with pytest.raises(KeelError, match=r"keel.json cannot be read .*beta is .*put it back") as refusal:
        keel_trainer(tmp_path, max_steps=2, **SAVES).train(resume_from_checkpoint=True)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("record", ["{", "[1]", "{}", '{"state": 1}', '{"state": {"kl": 1}}'])
def test_a_damaged_checkpoint_is_no_good_one(tmp_path, record):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    (folder / "keel.json").write_text(record)
    assert list(good_checkpoints(tmp_path, confirmed=1)) == []


@pytest.mark.parametrize("reference", [1, "frozen", [], {"kind": "frozen"}])
def test_a_record_of_the_reference_with_a_wrong_type_is_refused(tmp_path, reference):
    record = {"state": State(KLState(0.1, 0.1)).to_dict(), "batches": 1, "options": {}, "reference": reference}
    (tmp_path / "keel.json").write_text(json.dumps(record))
    with pytest.raises(KeelError, match=r"keel\.json"):
        load_state(tmp_path, None, "")


def test_a_checkpoint_is_refused_with_another_start(tmp_path):
    keel_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    other = small_model()
    with torch.no_grad():
        other.lm_head.weight.add_(0.01)
    trainer = keel_trainer(tmp_path, model=other)
    with pytest.raises(KeelError, match="build the trainer with the model that the run was started with"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
