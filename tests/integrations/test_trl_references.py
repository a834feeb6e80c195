"""References inside TRL: frozen, moving, of adapters, and a base that vLLM's sync leaves as it was."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from integrations.small_trl import TRLS_OWN, build, gap, keel_trainer, lines, lora, small_model, weights
from keel.base.errors import KeelError
from keel.integrations.trl.scoring import keeping_base
from keel.reference.options import ReferenceOptions


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["auto", "ema", "snapshot", "kl_triggered"])
def test_references(tmp_path, kind, adapter):
    params = {"ema": {"alpha": 0.5, "every": 1}, "snapshot": {"every": 1}, "kl_triggered": {"threshold": 1e-9}}
    reference = ReferenceOptions(kind=kind, **params.get(kind, {}))
    more = {"reference": reference, **({"peft_config": lora()} if adapter else {})}
    rate = 2.0 if adapter else 0.1
    trainer = keel_trainer(tmp_path, more=more, learning_rate=rate, max_steps=4)
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
    ours = keel_trainer(
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
    trainer = keel_trainer(tmp_path, model=policy, learning_rate=1.0, save_strategy="steps", save_steps=2)
    trainer.train()
    kls = [line["kl/policy_ref/k3/mean"] for line in lines(tmp_path)]
    assert kls[0] == 0.0
    assert kls[-1] > 0
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").is_file()
    assert not list((tmp_path / "checkpoint-4").glob("reference*"))


class Server:
    """Takes TRL's weights as its server of vLLM does."""

    def update_named_params(self, metadata, named):
        self.weights = {name: weight.clone() for name, weight in named}

    def reset_prefix_cache(self):
        pass


def sampler_of(model):
    """TRL's own generation over a server, as far as its weights go."""
    sampler = VLLMGeneration.__new__(VLLMGeneration)
    sampler.mode, sampler.model, sampler._weight_metadata, sampler.vllm_client = "server", model, None, Server()
    sampler.accelerator = SimpleNamespace(is_main_process=True)
    sampler._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: contextlib.nullcontext())
    return sampler


def test_the_base_under_lora_is_the_same_after_the_sampler_has_the_merged_weights():
    torch.manual_seed(0)
    policy = get_peft_model(small_model(), lora())
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    sampler = sampler_of(policy)
    keeping_base(policy, sampler.sync_weights)()
    assert gap(before, policy.state_dict()) == 0
    merged = {name: tensor.clone() for name, tensor in sampler.vllm_client.weights.items()}
    expected = copy.deepcopy(policy).merge_and_unload().state_dict()
    assert gap({name: expected[name] for name in merged}, merged) < 1e-6
    sampler.sync_weights()
    assert gap(before, policy.state_dict()) > 0  # as TRL leaves it: the reference has moved


def test_a_trainer_with_vllm_keeps_the_base(tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", lambda model, **_: sampler_of(model))
    kept = keel_trainer(tmp_path, more={"peft_config": lora()}, use_vllm=True, vllm_mode="colocate")
    assert kept.vllm_generation.sync_weights.__wrapped__.__func__ is VLLMGeneration.sync_weights
    free = keel_trainer(tmp_path / "full", use_vllm=True, vllm_mode="colocate")
    assert free.vllm_generation.sync_weights.__func__ is VLLMGeneration.sync_weights


def test_a_quantized_base_that_would_be_merged_is_refused():
    policy = get_peft_model(small_model(), lora())
    layer = policy.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(KeelError, match="load the base in bfloat16"):
        keeping_base(policy, lambda: None)
