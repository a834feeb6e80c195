"""Digests of a policy against a sampler that lies as vLLM's: every kind of adapter, and what cannot be compared."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from integrations.fused import Fused
from keel.base.errors import KeelError
from keel.integrations.sync import Sampler, SyncLedger, _SyncWorker


def llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, **shape))


def colocated(model, dtype=torch.bfloat16):
    """A sampler of the model's weights, and the runner that holds them."""
    runner = SimpleNamespace(model=Fused(model, dtype), get_model=lambda: runner.model)
    worker = SimpleNamespace(model_runner=runner)
    executor = SimpleNamespace(driver_worker=worker)
    return runner, Sampler.colocated(SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor)))


KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_merged_as_trl_merges_them(kind):
    """A sampler of the base alone differs where the adapter acts; one that got TRL's merged weights does not."""
    options = {"r": 4, "target_modules": "all-linear", **KINDS[kind]}
    policy = get_peft_model(llama(), LoraConfig(**options))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    runner, sampler = colocated(plain := llama())
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    ledger = SyncLedger(sampler, policy)
    ledger.note(0)
    assert all(torch.equal(tensor, policy.state_dict()[name]) for name, tensor in before.items())
    assert len(ledger.compare(0).wrong) == (3 if "modules_to_save" in options else 14)
    policy.merge_adapter()
    sent = {
        name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".modules_to_save.default", ""): value
        for name, value in policy.state_dict().items()
        if "lora_" not in name and "original_module" not in name
    }
    plain.load_state_dict(sent)
    runner.model = Fused(plain, torch.bfloat16)
    assert not ledger.compare(0).wrong


def test_a_tensor_of_another_type_is_seen_through():
    policy = llama()
    with torch.no_grad():
        policy.model.norm.weight.mul_(1.001)
    runner, sampler = colocated(policy)
    norm = runner.model.get_submodule("model.norm")
    norm.weight = nn.Parameter(policy.model.norm.weight.detach().clone())  # fp32 in a sampler of bfloat16
    ledger = SyncLedger(sampler, policy)
    ledger.note(0)
    assert not ledger.compare(0).wrong
    norm.weight.data.mul_(2)
    assert ledger.compare(0).wrong == ("model.norm.weight",)


def test_what_one_side_lacks_is_named():
    """A head that the sampler ties to its embedding is never sampled from."""
    policy = llama()
    runner, sampler = colocated(policy)
    del runner.model._modules["lm_head"]
    with pytest.raises(KeelError, match=r"the policy has .*lm_head\.weight"):
        SyncLedger(sampler, policy).note(0)
    _, sampler = colocated(llama())
    policy.model.layers = policy.model.layers[:1]
    with pytest.raises(KeelError, match=r"the sampler has .*model\.layers\.1\."):
        SyncLedger(sampler, policy).note(0)


def test_weights_that_deepspeed_shards_are_refused():
    policy = llama()
    policy.model.norm.weight.ds_id = 0
    with pytest.raises(KeelError, match="ZeRO-3"):
        SyncLedger(colocated(policy)[1], policy).note(0)


def test_each_of_several_servers_must_agree():
    """One of two that is stale, or that lost its adapter, makes those tensors wrong."""
    policy = llama()
    runner, _ = colocated(policy)
    stale, _ = colocated(policy)
    stale.model.get_submodule("model.norm").weight.data.add_(1)

    def sampler(*runners):
        return Sampler(lambda method, *args: [getattr(_SyncWorker(runner), method)(*args) for runner in runners])

    for runners, wrong in (((runner, runner), ()), ((runner, stale), ("model.norm.weight",))):
        ledger = SyncLedger(sampler(*runners), policy)
        ledger.note(0)
        assert ledger.compare(0).wrong == wrong
    answers = [{"layer.A": "1"}, {}]
    lost = Sampler(lambda method, *args: ["float32"] if method == "keel_dtype" else answers)
    assert lost.adapter(1, {"layer": 2}) == {}
