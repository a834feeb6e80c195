"""What Keel refuses inside TRL, in one line each: arguments, launchers, options, versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

import keel
from integrations.small_trl import arguments, build, small_model
from keel.base.errors import KeelError
from keel.integrations import versions
from keel.integrations.trl import KeelGRPOTrainer
from keel.integrations.trl.settings import check_args, settle
from keel.integrations.versions import TRL
from keel.kl import KLOptions
from keel.trainer.options import GuardOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"optim": "adalomo"}, "^optim="),
        ({"sync_ref_model": True}, "ReferenceOptions"),
    ],
)
def test_refused_arguments(tmp_path, changes, message):
    with pytest.raises(KeelError, match=message) as refusal:
        check_args(arguments(tmp_path, **changes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("by", ["argument", "launcher"])
def test_refused_fp16(tmp_path, monkeypatch, by):
    """Its scaler leaves out updates by itself: nothing of Keel's counting of them was tried with it."""
    if by == "launcher":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    args = arguments(tmp_path, fp16=by == "argument")
    with pytest.raises(KeelError, match=r"^fp16.*set bf16=True"):
        check_args(args)


@pytest.mark.parametrize("plugin", ["DeepSpeed", "FSDP"])
def test_refused_launchers(tmp_path, monkeypatch, plugin):
    args = arguments(tmp_path)
    monkeypatch.setenv(f"ACCELERATE_USE_{plugin.upper()}", "true")
    with pytest.raises(KeelError, match=plugin):
        check_args(args)


def test_refused_deepspeed_configuration(tmp_path):
    args = arguments(tmp_path)
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(KeelError, match="DeepSpeed"):
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
        (0.0, KLOptions(controller={"name": "step", "target": 0.1}), None, "β is 0 in GRPOConfig"),
        (0.0, KLOptions(beta=0.0, measure_every=0), None, "kl.measure_every=1"),
        (0.1, KLOptions(beta=0.2), None, "beta=0.1, but kl.beta is 0.2"),
        (0.1, KLOptions(estimator="k1", gradient="plain"), None, "zero"),
        (0.1, KLOptions(placement="reward", estimator="k1"), None, "kl.placement=advantage"),
        (0.1, KLOptions(collect_max=1.0), None, "kl.collect_max"),
        (0.1, KLOptions(budget={"max": 1.0, "action": "rollback"}), None, "rollback.*TRL"),
        (0.1, None, GuardOptions(on_nans="rollback"), "rollback.*TRL"),
        (0.1, None, GuardOptions(max_rollbacks=2), "guards.max_rollbacks"),
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
    with pytest.raises(KeelError, match=rf"TRL {installed}.*1\.16"):
        TRL.check_version()


def test_a_trainer_without_what_is_overridden_is_refused():
    class Other:
        _compute_loss = None

    TRL.check_names(GRPOTrainer)
    with pytest.raises(KeelError, match=r"^Other has no _generate_and_score_completions .*pip install 'transformers=="):
        TRL.check_names(Other)


def test_without_trl(monkeypatch):
    def missing(name):
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(KeelError, match=r"pip install 'keel-rl\[trl\]'"):
        TRL.check_version()


def test_nothing_else_imports_trl_or_this_room():
    source = Path(keel.__file__).parent
    room = source / "integrations"
    imports = re.compile(r"^\s*(from|import) (trl|keel\.integrations)\b", re.MULTILINE)
    others = [path for path in source.rglob("*.py") if room not in path.parents]
    assert [path for path in others if imports.search(path.read_text()) and source / "cli" not in path.parents] == []
    assert imports.search((room / "trl" / "trainer.py").read_text())


KL = KLOptions(beta=0.1)


def notes_of(out, kl=KL, *, more=None, **changes):
    return build(KeelGRPOTrainer, out, beta=0.0, keel={"kl": kl, **(more or {})}, **changes).keel_run.notes


def dropping():
    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)


@pytest.mark.parametrize(
    ("options", "reference", "named"),
    [
        ({"budget": 0.5}, "auto", r"kl\.budget"),
        ({"controller": {"name": "step", "target": 0.1}}, "auto", r"kl\.controller\.name=step"),
        ({}, "kl_triggered", r"reference\.kind=kl_triggered"),
    ],
)
def test_a_kl_that_decides_is_not_measured_under_dropout(tmp_path, options, reference, named):
    more = {"peft_config": dropping(), "reference": {"kind": reference}}
    kl = KLOptions(beta=0.1, **options)
    with pytest.raises(KeelError, match=rf"{named} .*p=0\.1\).*set disable_dropout=True") as refusal:
        notes_of(tmp_path, kl, more=more)
    assert "\n" not in str(refusal.value)
    assert not notes_of(tmp_path, kl, more={**more, "peft_config": dropping()}, disable_dropout=True)


def test_dropout_is_said(tmp_path):
    assert any("lora_dropout" in note for note in notes_of(tmp_path, more={"peft_config": dropping()}))
    model = small_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2  # as attention applies it, out of TRL's reach
    (note,) = notes_of(tmp_path, model=model, disable_dropout=True)
    assert "attention_dropout=0.2): policy and reference differ from the first step" in note


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_p": 0.5}, "top_p, top_k or min_p"),
        ({"top_k": 3}, "top_p, top_k or min_p"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"generation_kwargs": {"typical_p": 0.9, "use_cache": True}}, "generation_kwargs has typical_p"),
    ],
)
def test_samples_that_are_not_the_policys_are_said(tmp_path, changes, words):
    (note,) = notes_of(tmp_path, **changes)
    assert words in note


def test_nothing_is_said_of_the_policys_own_samples(tmp_path):
    assert notes_of(tmp_path) == []


def test_a_copy_has_a_head_of_its_own_in_fp32(tmp_path):
    keel = {"kl": KL, "reference": {"kind": "frozen"}}
    trainer = build(KeelGRPOTrainer, tmp_path, beta=0.0, keel=keel, cast_lm_head_to_fp32=True)
    hidden = torch.randn(3, 16)
    with torch.no_grad(), trainer.keel_reference.model() as copy:
        before = copy.lm_head(hidden)
        trainer.model.lm_head.weight.add_(1.0)
        assert torch.equal(copy.lm_head(hidden), before)


def test_that_truncated_completions_have_no_kl_is_said(tmp_path):
    assert not any("truncated" in note for note in notes_of(tmp_path))
    (note,) = [note for note in notes_of(tmp_path, mask_truncated_completions=True) if "truncated" in note]
    assert "KL" in note
    assert "loss.mask_truncated_completions" in note
