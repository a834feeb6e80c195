"""The engine room on CUDA: the same code, the same numbers."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from keel.base.types import Completion, Group, Problem
from keel.kl import exact_kl
from keel.models import fingerprint, prefix_attention
from keel.models.head import body_of, head_of
from keel.models.load import load_model
from keel.models.pack import pack
from keel.models.probe import probe_packing
from keel.models.scorer import hidden_states, score_tokens
from keel.reference.kinds import build_reference
from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine

pytestmark = pytest.mark.gpu


SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 0}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),
    "gpt2": lambda: GPT2Config(vocab_size=97, n_positions=128, n_embd=64, n_layer=3, n_head=4, eos_token_id=0),
}
PROMPTS = [tuple(range(5, 25)), (7, 8, 9), tuple(range(30, 63))]


class Tokens:
    """Just enough of a tokenizer."""

    eos_token_id = 0

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))


def model_on(device, name, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]()).to(device=device, dtype=dtype).eval()


def groups_of(engine, temperature=1.0):
    requests = [Request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    sampling = SamplingParams(temperature=temperature, max_completion_length=12, num_generations=4)
    answers = engine.generate(requests, sampling, seed=1)
    return [Group(Problem(r.key, ""), r.tokens, tuple(done)) for r, done in zip(requests, answers, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_sampler_and_trainer_agree(name, temperature):
    model = model_on("cuda", name)
    groups = groups_of(NativeEngine(model, Tokens()), temperature)
    packed = pack(groups, 0).to("cuda")
    logp = score_tokens(model, packed, temperature=temperature).logp[packed.completion_mask]
    sampled = torch.tensor([x for group in groups for c in group.completions for x in c.sample_logp], device="cuda")
    torch.testing.assert_close(logp, sampled, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_equal_single_rows_and_the_cpu(name):
    model = model_on("cuda", name)
    assert probe_packing(model).ok
    groups = groups_of(NativeEngine(model, Tokens()))
    twin = copy.deepcopy(model).cpu()
    scores, gradients = [], []
    for one, device, shared in ((model, "cuda", True), (model, "cuda", False), (twin, "cpu", True)):
        packed = pack(groups, 0, shared_prefix=shared).to(device)
        one.zero_grad()
        logp = score_tokens(one, packed).logp
        logp.sum().backward()
        scores.append(logp.detach().cpu())
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in one.parameters()]))
    for other, gradient in zip(scores[1:], gradients[1:], strict=True):
        torch.testing.assert_close(other, scores[0], atol=1e-4, rtol=0)
        assert (gradient - gradients[0]).norm() < 1e-4 * gradients[0].norm()


def test_exact_kl_equals_full_logits():
    policy, other = model_on("cuda", "llama"), model_on("cuda", "llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    packed = pack(groups_of(NativeEngine(policy, Tokens())), 0).to("cuda")
    with torch.no_grad():
        held = hidden_states(other, packed)
        got = score_tokens(policy, packed, exact_kl=True, ref_hidden=held, ref_head=head_of(other)).exact_kl
        policy_logprobs = head_of(policy)(hidden_states(policy, packed)).log_softmax(-1)
        naive = exact_kl(policy_logprobs, head_of(other)(held).log_softmax(-1))
    torch.testing.assert_close(got[packed.completion_mask], naive, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_knows_when_it_is_stale(dtype):
    policy = model_on("cuda", "llama")
    engine = NativeEngine(policy, Tokens(), copy=True, dtype=dtype)
    assert not engine.is_stale(policy)
    with torch.no_grad():
        next(policy.parameters())[0, 0] += 1.0
    assert engine.is_stale(policy)
    engine.sync(policy, 1)
    assert not engine.is_stale(policy)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_gpu_copy_of_a_cpu_policy_samples_from_it(name):
    policy = model_on("cpu", name)
    engine = NativeEngine(policy, Tokens(), device="cuda")
    groups = groups_of(engine)
    packed = pack(groups, 0)
    logp = score_tokens(policy, packed).logp[packed.completion_mask]
    sampled = torch.tensor([x for group in groups for c in group.completions for x in c.sample_logp])
    torch.testing.assert_close(logp, sampled, atol=1e-4, rtol=0)


def test_fingerprints_agree_across_devices():
    model = model_on("cpu", "llama")
    assert fingerprint(model) == fingerprint(copy.deepcopy(model).cuda())


@pytest.mark.parametrize("lora", [None, {"r": 4, "alpha": 8}])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["auto", "ema", "snapshot", "kl_triggered"])
def test_step_zero_kl_is_zero_for_every_reference(kind, offload, lora):
    loaded = load_model("tiny", device="cuda", lora=lora)
    reference = build_reference(kind, loaded, offload=offload)
    ids = torch.randint(5, 60, (2, 17), device="cuda")
    with torch.no_grad():
        mine = loaded.model(input_ids=ids).logits
    with reference.model() as held, torch.no_grad():
        theirs = held(input_ids=ids).logits
    assert torch.equal(mine, theirs)


def test_bf16_packs_and_samples():
    model = model_on("cuda", "llama", torch.bfloat16)
    assert probe_packing(model).ok
    groups = groups_of(NativeEngine(model, Tokens()))
    packed = pack(groups, 0).to("cuda")
    logp = score_tokens(model, packed).logp[packed.completion_mask]
    sampled = torch.tensor([x for group in groups for c in group.completions for x in c.sample_logp], device="cuda")
    assert (logp - sampled).abs().mean() < 0.02


def test_prefix_attention_equals_the_mask_with_grouped_heads(monkeypatch):
    """Values and gradients of rows scored by their structure, on the device, against the dense mask's."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]()).cuda().eval()
    ones = [tuple(range(3, 3 + n)) for n in (9, 5, 1)]
    done = [Completion(one, (True,) * len(one), (0.0,) * len(one), (0.0,) * len(one), "", "length") for one in ones]
    packed = pack([Group(Problem(str(p), ""), p, tuple(done)) for p in PROMPTS], 0).to("cuda")

    def scored():
        model.zero_grad()
        logp = score_tokens(model, packed).logp
        logp.sum().backward()
        return logp.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, gradients = scored()
    monkeypatch.setattr(prefix_attention, "LONG_ROW", 1)
    assert prefix_attention.use_prefix_attention(body_of(model), packed)
    found, others = scored()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    for mine, theirs in zip(others, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
