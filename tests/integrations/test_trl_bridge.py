"""Keel's options inside TRL: guards, budget, controllers, references, checkpoints, and what is refused."""

import contextlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer

import keel
from integrations.small_trl import TRLS_OWN, arguments, build, gap, small_model, weights
from keel.base.errors import KeelError
from keel.integrations.trl import KeelGRPOTrainer, KeelRunCallback, versions
from keel.integrations.trl.settings import check_args, settle
from keel.kl import KLOptions, controller_of
from keel.reference.options import ReferenceOptions
from keel.trainer.options import GuardOptions

STEADY = KLOptions(beta=0.1)


def trainer_of(out, kl=STEADY, cls=KeelGRPOTrainer, *, more=None, **changes):
    keel = {"kl": kl, "callbacks": [KeelRunCallback(report=False)], **(more or {})}
    return build(cls, out, beta=0.0, keel=keel, **changes)


def lines(out, name="metrics.jsonl"):
    return [json.loads(line) for line in (Path(out) / name).read_text().splitlines()]


def lora():
    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def with_nan_at(step, cls):
    class Poisoned(cls):
        def _compute_loss(self, model, inputs):
            bad = {"advantages": inputs["advantages"] * math.nan} if self.state.global_step == step - 1 else {}
            return super()._compute_loss(model, {**inputs, **bad})

    return Poisoned


# ------------------------------------------------------------------------------------------------- guards


def test_a_nan_poisons_trl_and_not_keel(tmp_path):
    theirs = build(with_nan_at(3, GRPOTrainer), tmp_path / "trl", max_steps=5)
    with contextlib.suppress(RuntimeError):  # it cannot sample from what is no number
        theirs.train()
    assert not all(tensor.isfinite().all() for tensor in weights(theirs).values())

    ours = trainer_of(
        tmp_path / "keel",
        cls=with_nan_at(3, KeelGRPOTrainer),
        max_steps=5,
        lr_scheduler_type="linear",
        optim="adamw_torch",
    )
    ours.train()
    assert ours.state.global_step == 5
    assert all(tensor.isfinite().all() for tensor in weights(ours).values())
    log = lines(tmp_path / "keel")
    assert [line["guard/skipped"] for line in log] == [0, 0, 1, 0, 0]
    rates = [line["optim/learning_rate"] for line in log]
    assert rates[3] == rates[2] < rates[1]  # the schedule waits for an update that is made
    (skip,) = [event for event in lines(tmp_path / "keel", "events.jsonl") if event["kind"] == "guard/skipped"]
    record = json.loads((tmp_path / "keel" / skip["batch"]).read_text())
    assert skip["nonfinite"] == record["first_nonfinite"] == "advantage"
    assert len(record["completions"]) == 8
    assert all(len(row["logp"]) == len(row["tokens"]) > 0 for row in record["completions"])


def test_a_skipped_update_changes_no_weight(tmp_path):
    poisoned = trainer_of(
        tmp_path / "keel", cls=with_nan_at(2, KeelGRPOTrainer), max_steps=2, optim="adamw_torch", weight_decay=0.1
    )
    poisoned.train()
    short = trainer_of(tmp_path / "short", max_steps=1, optim="adamw_torch", weight_decay=0.1)
    short.train()
    assert gap(weights(poisoned), weights(short)) == 0


def test_nans_in_a_row_stop_the_run(tmp_path):
    class Broken(KeelGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * math.inf

    trainer = trainer_of(tmp_path, cls=Broken, max_steps=5, more={"guards": GuardOptions(max_consecutive_nans=2)})
    trainer.train()
    assert trainer.state.global_step == 2
    assert "2 updates in a row were skipped" in trainer.keel_stopped


def test_a_spike_is_skipped(tmp_path):
    class Spiking(KeelGRPOTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            return loss * 1e4 if self.state.global_step == 11 else loss

    more = {"guards": GuardOptions(on_spike="skip")}
    trainer = trainer_of(tmp_path, cls=Spiking, max_steps=12, max_completion_length=2, learning_rate=1e-3, more=more)
    trainer.train()
    log = lines(tmp_path)
    assert [line["guard/skipped"] for line in log] == [0] * 11 + [1]
    assert log[-1]["guard/spike"] == 1
    assert log[-1]["guard/nonfinite"] == 0
    kinds = [event["kind"] for event in lines(tmp_path, "events.jsonl")]
    assert "guard/spike" in kinds
    assert (tmp_path / "skipped" / "step-12.json").is_file()


def test_rewards_that_are_all_alike_are_said_once(tmp_path):
    """Two updates a batch: the third batch is the first of step 5."""
    more = {"guards": GuardOptions(constant_steps=3)}
    trainer_of(
        tmp_path, more=more, num_iterations=2, max_steps=6, reward=lambda completions, **_: [1.0] * len(completions)
    ).train()
    steps = [event["step"] for event in lines(tmp_path, "events.jsonl") if event["kind"] == "reward/constant"]
    assert steps == [5]


# ------------------------------------------------------------------------------- controller and budget


@pytest.mark.parametrize(
    "controller",
    [
        {"name": "step", "target": 0.01},
        {"name": "ziegler", "target": 0.05, "horizon": 100},
        {"name": "warmup", "steps": 3},
    ],
    ids=lambda controller: controller["name"],
)
def test_beta_is_what_keels_controller_makes_of_the_measured_kl(tmp_path, controller):
    kl = KLOptions(beta=0.2, controller=controller)
    trainer_of(tmp_path, kl, learning_rate=0.1, gradient_accumulation_steps=2, per_device_train_batch_size=4).train()
    by_hand = controller_of(kl, episodes_per_step=8)
    state, name = by_hand.init(), "sequence" if by_hand.unit == "per_sequence" else "k3"
    for line in lines(tmp_path):
        assert line["kl/beta"] == pytest.approx(state.beta)
        state = by_hand.update(state, line[f"kl/policy_ref/{name}/mean"])
    assert len({line["kl/beta"] for line in lines(tmp_path)}) > 2


def test_the_kl_is_measured_without_a_penalty(tmp_path):
    trainer_of(tmp_path, KLOptions(beta=0.0, measure_every=2), learning_rate=0.1).train()
    measured = [line.get("kl/policy_ref/k3/mean") for line in lines(tmp_path)]
    assert measured[1] is measured[3] is None
    assert measured[0] == 0.0
    assert measured[2] > 0
    assert all(line["kl/policy_ref/k3/se"] >= 0 for line in lines(tmp_path)[::2])


def test_a_budget_stops_at_the_last_good_checkpoint(tmp_path, capsys):
    """The numbers of step 3 are those of the weights after update 2: checkpoint 1 is the last that was seen fine."""

    class Drifting(KeelGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["ref_per_token_logps"] -= self.state.global_step  # a nat further away every step
            return output

    def run(out, most, **changes):
        kl = KLOptions(beta=1e-3, budget={"max": most, "unit": "per_sequence"})
        return trainer_of(
            out, kl, cls=Drifting, save_strategy="steps", save_steps=1, max_completion_length=2, **changes
        )

    held = run(tmp_path, 3.0)
    held.train()
    assert held.state.global_step == 3
    assert [line["guard/over_budget"] for line in lines(tmp_path)] == [0, 0, 1]
    good = str(tmp_path / "checkpoint-1")
    assert f"trainer.train(resume_from_checkpoint={good!r})" in capsys.readouterr().out
    assert not (tmp_path / "checkpoint-3").exists()
    (stop,) = [event for event in lines(tmp_path, "events.jsonl") if event["kind"] == "stop"]
    assert stop["code"] == "kl/over-budget"
    saved = run(tmp_path / "other", 3.0)
    saved._load_from_checkpoint(good)
    assert gap(weights(held), weights(saved)) == 0

    further = run(tmp_path, 100.0)
    further.train(resume_from_checkpoint=good)
    assert further.keel_stopped is None
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert len(lines(tmp_path / "abandoned" / "attempt-0")) == 2


def test_what_a_budget_has_stopped_is_not_saved_at_the_end_of_the_epoch(tmp_path):
    kl = KLOptions(beta=0.1, budget={"max": 1e-9})
    trainer = trainer_of(tmp_path, kl, save_strategy="epoch")
    trainer.train()
    assert trainer.keel_stopped is not None
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_budget_that_breaks_before_the_first_checkpoint(tmp_path):
    kl = KLOptions(beta=0.1, budget={"max": 1e-9})
    trainer = trainer_of(tmp_path, kl)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "without a good checkpoint to go back to: lower save_steps" in trainer.keel_stopped


# --------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["auto", "ema", "snapshot", "kl_triggered"])
def test_references(tmp_path, kind, adapter):
    params = {"ema": {"alpha": 0.5, "every": 1}, "snapshot": {"every": 1}, "kl_triggered": {"threshold": 1e-9}}
    reference = ReferenceOptions(kind=kind, **params.get(kind, {}))
    more = {"reference": reference, **({"peft_config": lora()} if adapter else {})}
    rate = 2.0 if adapter else 0.1
    trainer = trainer_of(tmp_path, more=more, learning_rate=rate, max_steps=4)
    trainer.train()
    k2 = [line["kl/policy_ref/k2/mean"] for line in lines(tmp_path)]
    drifted = [value > 1e-8 for value in k2]
    if kind == "snapshot":  # scored with the reference that it has just become
        assert drifted == [False] * 4
    elif kind == "kl_triggered":
        assert drifted == [False, True, False, True]
    else:
        assert drifted == [False, True, True, True]
    assert (trainer.keel_reference.fingerprint() == trainer._start) == (kind == "auto")


def test_lora_is_trls_too(tmp_path):
    theirs = build(GRPOTrainer, tmp_path / "trl", learning_rate=0.1, keel={"peft_config": lora()})
    theirs.train()
    ours = trainer_of(
        tmp_path / "keel", TRLS_OWN.model_copy(update={"beta": 0.2}), learning_rate=0.1, more={"peft_config": lora()}
    )
    ours.train()
    assert gap(weights(theirs), weights(ours)) < 1e-6


def test_the_reference_of_a_trained_adapter_is_that_adapter(tmp_path):
    torch.manual_seed(3)
    policy = get_peft_model(small_model(), lora())
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    trainer = trainer_of(tmp_path, model=policy, learning_rate=1.0, save_strategy="steps", save_steps=2)
    trainer.train()
    kls = [line["kl/policy_ref/k3/mean"] for line in lines(tmp_path)]
    assert kls[0] == 0.0
    assert kls[-1] > 0
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").is_file()
    assert not list((tmp_path / "checkpoint-4").glob("reference*"))


# -------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_resumed_run_is_the_run(tmp_path, adapter):
    """β of a controller with a memory, and a reference that has moved, are in TRL's checkpoint."""
    kl = KLOptions(beta=0.1, controller={"name": "dual", "target": 0.001, "learning_rate": 0.5})
    rate = 1.0 if adapter else 0.05

    def run(out, **changes):
        more = {
            "reference": ReferenceOptions(kind="ema", alpha=0.5, every=1),
            **({"peft_config": lora()} if adapter else {}),
        }
        return trainer_of(out, kl, more=more, learning_rate=rate, save_strategy="steps", save_steps=2, **changes)

    whole = run(tmp_path / "whole")
    whole.train()
    resumed = run(tmp_path / "whole")
    for path in ("metrics.jsonl", "summary.json"):
        assert (tmp_path / "whole" / path).is_file()
    before = lines(tmp_path / "whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    after = lines(tmp_path / "whole")
    timed = ("time/", "speed/", "memory/")
    same = [{k: v for k, v in line.items() if not k.startswith(timed)} for line in before]
    assert [{k: v for k, v in line.items() if not k.startswith(timed)} for line in after] == same
    assert gap(weights(whole), weights(resumed)) == 0
    assert whole.keel_state.kl == resumed.keel_state.kl
    assert whole.keel_reference.fingerprint() == resumed.keel_reference.fingerprint()


def test_a_checkpoint_is_refused_with_another_start(tmp_path):
    trainer_of(tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    other = small_model()
    with torch.no_grad():
        other.lm_head.weight.add_(0.01)
    trainer = trainer_of(tmp_path, model=other)
    with pytest.raises(KeelError, match="build the trainer with the model that the run was started with"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# ----------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"optim": "adalomo"}, "no update could be skipped"),
        ({"sync_ref_model": True}, "ReferenceOptions"),
    ],
)
def test_refused_arguments(tmp_path, changes, message):
    with pytest.raises(KeelError, match=message):
        check_args(arguments(tmp_path, **changes))


@pytest.mark.parametrize("plugin", ["DeepSpeed", "FSDP"])
def test_refused_launchers(tmp_path, monkeypatch, plugin):
    args = arguments(tmp_path)
    monkeypatch.setenv(f"ACCELERATE_USE_{plugin.upper()}", "true")
    with pytest.raises(KeelError, match=plugin):
        check_args(args)


def test_refused_deepspeed_configuration(tmp_path):
    args = arguments(tmp_path)
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(KeelError, match="DeepSpeed owns its gradients"):
        check_args(args)


def test_refused_async(tmp_path):
    from trl.experimental.async_grpo import AsyncGRPOConfig

    with pytest.raises(KeelError, match="AsyncGRPO"):
        check_args(AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none"))


@pytest.mark.parametrize(
    ("beta", "kl", "guards", "message"),
    [
        (0.0, None, None, "β is 0 in GRPOConfig"),
        (0.0, KLOptions(estimator="k2"), None, "β is 0 in GRPOConfig"),
        (0.0, KLOptions(beta=0.0, measure_every=0), None, "no reference and no KL"),
        (0.1, KLOptions(beta=0.2), None, "disagree"),
        (0.1, KLOptions(estimator="k1", gradient="plain"), None, "zero"),
        (0.1, KLOptions(placement="reward", estimator="k1"), None, "kl.placement=advantage"),
        (0.1, KLOptions(collect_max=1.0), None, "kl.collect_max"),
        (0.1, KLOptions(budget={"max": 1.0, "action": "rollback"}), None, "rollback is not done inside TRL"),
        (0.1, None, GuardOptions(on_nans="rollback"), "rollback is not done inside TRL"),
        (0.1, None, GuardOptions(max_rollbacks=2), "guards.max_rollbacks is of rollbacks"),
        (0.1, {"estimater": "k2"}, None, "kl.estimater.*kl.estimator"),
        (0.1, {"beta": -1}, None, "kl.beta"),
        (0.1, 0.04, None, "kl is a float: give a KLOptions"),
    ],
)
def test_refused_options(beta, kl, guards, message):
    with pytest.raises(KeelError, match=message) as refusal:
        settle(beta, kl, guards, None)
    assert "\n" not in str(refusal.value)


def test_beta_comes_from_either_place():
    assert settle(0.1, None, None, None).kl.beta == 0.1
    assert settle(0.0, KLOptions(beta=0.2), None, None).kl.beta == 0.2
    assert settle(0.2, KLOptions(beta=0.2), None, None).kl.beta == 0.2
    assert settle(0.0, {"beta": 0.2}, None, None).kl == KLOptions(beta=0.2)
    assert settle(0.1, None, GuardOptions(grad_spike=5.0), None).guards.on_nans == "stop"


@pytest.mark.parametrize("installed", ["1.15.2", "1.17.0", "2.0.0"])
def test_an_untested_version_is_refused(monkeypatch, installed):
    monkeypatch.setattr(versions, "version", lambda name: installed)
    with pytest.raises(KeelError, match=rf"TRL {installed} .*tested with \(1\.16\)"):
        versions.check_trl()


def test_a_trainer_without_what_is_overridden_is_refused():
    class Other:
        _compute_loss = None

    versions.check_names(GRPOTrainer)
    with pytest.raises(KeelError, match=r"has no _generate_and_score_completions.*pip install 'transformers=="):
        versions.check_names(Other)


def test_without_trl(monkeypatch):
    def missing(name):
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(KeelError, match=r"pip install 'keel-rl\[trl\]'"):
        versions.check_trl()


def test_nothing_else_imports_trl_or_this_room():
    source = Path(keel.__file__).parent
    room = source / "integrations"
    imports = re.compile(r"^\s*(from|import) (trl|keel\.integrations)\b", re.MULTILINE)
    others = [path for path in source.rglob("*.py") if room not in path.parents]
    assert [path for path in others if imports.search(path.read_text()) and source / "cli" not in path.parents] == []
    assert imports.search((room / "trl" / "trainer.py").read_text())
