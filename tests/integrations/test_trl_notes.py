"""Dropout and sampling inside TRL: what makes the measured KL another one is refused or said."""

import pytest
import torch
from peft import LoraConfig

from integrations.small_trl import build, small_model
from keel.base.errors import KeelError
from keel.integrations.trl import KeelGRPOTrainer
from keel.kl import KLOptions

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
    with pytest.raises(KeelError, match=rf"{named} goes by .*p=0\.1\).*set disable_dropout=True") as refusal:
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
        ({"top_p": 0.5}, "cut the sampled distribution"),
        ({"top_k": 3}, "cut the sampled distribution"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"generation_kwargs": {"typical_p": 0.9, "use_cache": True}}, "generation_kwargs has typical_p:"),
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
