"""What runs on a GPU alone: flash kernels over ragged rows, the fused decode step, fused norms and activations."""

import copy
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers import models as zoo

from keel.base.types import Completion, Group, Problem
from keel.models import chunked, fuse, layer_kernels
from keel.models.chunked import StatsOptions, token_stats
from keel.models.flash_prefix import TorchKernels, flash_attend
from keel.models.fuse import fuse_modules
from keel.models.head import Head, body_of
from keel.models.layer_kernels import gated_silu
from keel.models.pack import pack
from keel.models.prefix_attention import RecomputeContext, use_prefix_attention
from keel.models.scorer import score_tokens
from keel.rollout import Request, SamplingParams
from keel.rollout.native import kernels
from keel.rollout.native.cache import Prefix, SharedPrefixCache
from keel.rollout.native.engine import NativeEngine
from keel.rollout.native.state import ENDED, DecodeState

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from rollout import torch_kernels

pytestmark = pytest.mark.gpu


SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "eos_token_id": 0}
GROUPED = {**SIZES, "intermediate_size": 96, "max_position_embeddings": 256, "num_key_value_heads": 2, "head_dim": 16}
CONFIGS = {
    "llama": lambda: zoo.llama.LlamaConfig(**GROUPED),
    "qwen2": lambda: zoo.qwen2.Qwen2Config(**GROUPED),
    "qwen3": lambda: zoo.qwen3.Qwen3Config(**GROUPED),
    "mistral": lambda: zoo.mistral.MistralConfig(**GROUPED, sliding_window=None),
    "gemma": lambda: zoo.gemma.GemmaConfig(**GROUPED),
    "gpt2": lambda: zoo.gpt2.GPT2Config(vocab_size=97, n_positions=256, n_embd=64, n_layer=3, n_head=4, eos_token_id=0),
}


class Tokens:
    """Just enough of a tokenizer."""

    eos_token_id = 0

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))


def model_of(name, dtype=torch.float32, device="cuda"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases that are all alike would hide a wrong one
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(device=device, dtype=dtype).eval()


def ragged(count, generations, prompts, lengths, seed=0):
    rng = random.Random(seed)

    def completion():
        length = rng.randint(*lengths)
        zeros = (0.0,) * length
        tokens = tuple(rng.randrange(1, 97) for _ in range(length))
        return Completion(tokens, (True,) * length, zeros, zeros, "", "length")

    return [
        Group(
            Problem(str(i), ""),
            tuple(rng.randrange(1, 97) for _ in range(rng.randint(*prompts))),
            tuple(completion() for _ in range(generations)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(12, 2, 128), (9, 3, 64), (4, 4, 80), (8, 1, 256)])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_flash_over_ragged_rows_equals_the_mask_in_fp64(heads, kv_heads, size, dtype, allowed):
    packed = pack(ragged(4, 5, (3, 90), (0, 70)), 0, max_row_tokens=500)
    rows, length = packed.input_ids.shape
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [normal(rows, count, length, size).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    real = (packed.prefix >= 0)[:, :, None, None]
    weight = normal(rows, length, heads, size) * real
    wide = [x.repeat_interleave(heads // x.shape[1], dim=1) for x in inputs]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=packed.mask_4d(), scale=size**-0.5)
    expected = expected.transpose(1, 2) * real
    gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    on_gpu = [x.detach().to("cuda", dtype).requires_grad_() for x in inputs]
    tokens = (x.transpose(1, 2).flatten(0, 1) for x in on_gpu)
    out = flash_attend(*tokens, packed.to("cuda").segments, size**-0.5).view_as(expected) * real.cuda()
    mine = torch.autograd.grad((out * weight.to("cuda", dtype)).sum(), on_gpu)
    for result, truth in zip((out, *mine), (expected, *gradients), strict=True):
        assert (result.double().cpu() - truth).norm() < allowed * truth.norm()


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(12, 2, 128), (9, 3, 64), (4, 4, 80)])
def test_what_stands_around_the_flash_calls_equals_its_formulas(heads, kv_heads, size):
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    joint = normal(501, heads + 2 * kv_heads, size)  # queries, keys and values of a token side by side
    q, k, v = joint.split([heads, kv_heads, kv_heads], dim=1)
    more_q, more_k = normal(501, heads, size), normal(501, kv_heads, size)
    cos, sin, lse, more_lse = normal(501, size), normal(501, size), normal(heads, 501), normal(heads, 501)
    in_completion = normal(501) > 0
    more_lse[:, ~in_completion] = torch.inf  # as flash kernels leave it where there is no key
    for mine, formula in (
        (layer_kernels.rotate(q, k, v, cos, sin), TorchKernels.rotate(q, k, v, cos, sin)),
        (
            layer_kernels.join(more_q, lse, q.contiguous(), more_lse, in_completion),
            TorchKernels.join(more_q, lse, q, more_lse, in_completion),
        ),
        (
            layer_kernels.add_gradients(tuple(x.contiguous() for x in (q, k, v)), (more_q, more_k, more_k), cos, sin),
            TorchKernels.add_gradients((q, k, v), (more_q, more_k, more_k), cos, sin),
        ),
    ):
        for result, expected in zip(mine, formula, strict=True):
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 7, 1536), (3, 100)])
@pytest.mark.parametrize("joint", [False, True])
def test_a_gated_activation_equals_its_formula(shape, joint):
    torch.manual_seed(0)
    gate, up, weight = (torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3))
    expected = torch.nn.functional.silu(gate) * up
    mine = gated_silu(torch.cat((gate, up), dim=-1)) if joint else gated_silu(gate, up)
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
    gradients = (torch.autograd.grad((x * weight).sum(), (gate, up)) for x in (mine, expected))
    for gradient, truth in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, truth, atol=1e-5, rtol=1e-5)


def test_mixed_precision_gradients_are_nearer_to_fp32_by_joint_products(monkeypatch):
    packed, gradients = pack(ragged(3, 4, (5, 40), (1, 30)), 0).to("cuda"), []
    for mode in ("joint", "autocast", "fp32"):
        model = model_of("qwen2")
        fuse_modules(model)
        if mode == "autocast":
            monkeypatch.setattr(fuse, "fused_linears", lambda *_: None)
        with torch.autocast("cuda", torch.bfloat16, enabled=mode != "fp32"):
            logp = score_tokens(model, packed).logp
        logp.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    joint, autocast = ((g - gradients[2]).norm() / gradients[2].norm() for g in gradients[:2])
    assert joint < 0.02
    assert joint < 1.2 * autocast


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocabulary", [97, 49152, 151936])
def test_statistics_by_one_kernel_equal_the_formulas(vocabulary, bias, monkeypatch):
    results = []
    for by_kernel in (True, False):
        torch.manual_seed(0)
        head, reference = (torch.nn.Linear(64, vocabulary, bias=bias, device="cuda") for _ in range(2))
        hidden = (20 * torch.randn(45, 64, device="cuda")).requires_grad_()
        tokens, weights = torch.randint(vocabulary, (45,), device="cuda"), torch.randn(4, 45, device="cuda")
        options = StatsOptions(0.7, True, True, Head(reference, 0.5), chunk_tokens=20, ref_policy_grad=True)
        if not by_kernel:
            monkeypatch.setattr(chunked, "fused_stats_unsupported_reason", lambda *_: "for comparison")
        stats = token_stats(hidden, Head(head, 0.5), tokens, options, hidden.detach() + 1)
        values = (stats.logp, stats.entropy, stats.kl, stats.ref_policy_kl)
        sum((w * x).sum() for w, x in zip(weights, values, strict=True)).backward()
        results.append([*values, stats.ref_logp, hidden.grad, *(p.grad for p in head.parameters())])
    for mine, formula in zip(*results, strict=True):
        assert (mine - formula).norm() < 1e-5 * formula.norm()


def compiled(*jitted):
    return sum(len(cache[0]) for kernel in jitted for cache in kernel.device_caches.values())


def test_new_lengths_compile_nothing_after_the_second_step():
    model = model_of("llama")
    fuse_modules(model)
    modules = (chunked._kernels(), layer_kernels)
    kernels = [x for module in modules for x in vars(module).values() if hasattr(x, "device_caches")]
    counts = []
    for step in range(6):
        groups = ragged(3, 4, (5, 40), (1, 30), seed=step)
        packed = pack(groups, 0, max_row_tokens=10**6).to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            scores = score_tokens(model, packed, entropy=True, chunk_tokens=37)
        (scores.logp.sum() + scores.entropy.sum()).backward()
        counts.append(compiled(*kernels))
    assert counts[1] > 5
    assert counts[1:] == [counts[1]] * 5


def test_recomputed_activations_attend_by_flash_too():
    packed, gradients = pack(ragged(3, 4, (5, 40), (1, 30)), 0).to("cuda"), []
    for checkpointing in (False, True):
        model = model_of("llama", torch.bfloat16)
        fuse_modules(model)
        if checkpointing:
            kwargs = {"use_reentrant": False, "context_fn": RecomputeContext()}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        model.train()
        assert use_prefix_attention(body_of(model), packed)
        score_tokens(model, packed).logp.sum().backward()
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-2 * gradients[0].norm()


@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_scores_and_gradients_are_near_fp32_on_the_cpu(name):
    groups = ragged(3, 4, (5, 40), (1, 30))
    scores, gradients = [], []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        model = model_of(name, dtype, device)
        fuse_modules(model)
        logp = score_tokens(model, pack(groups, 0).to(device)).logp
        logp.sum().backward()
        scores.append(logp.detach().float().cpu())
        gradients.append(torch.cat([p.grad.float().flatten().cpu() for p in model.parameters()]))
    assert (scores[0] - scores[1]).abs().max() < 0.1
    assert (gradients[0] - gradients[1]).norm() < 0.03 * gradients[1].norm()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_modules_are_exact_in_fp32(name):
    model = model_of(name)
    twin = copy.deepcopy(model)
    assert fuse_modules(model) >= 4 * 3 + 1
    packed = pack(ragged(2, 3, (5, 20), (1, 12)), 0).to("cuda")
    results = []
    for one in (model, twin):
        logp = score_tokens(one, packed).logp
        logp.sum().backward()
        results.append((logp.detach(), [p.grad for p in one.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
    for mine, theirs in zip(results[0][1], results[1][1], strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm() + 1e-7


@pytest.mark.parametrize("name", CONFIGS)
def test_the_fused_step_draws_what_the_cpu_draws(name):
    """In fp32, by the same noise: rows of several lengths that end one after the other, prompts longer than a block."""
    model = model_of(name)
    engine, plain = NativeEngine(model, Tokens()), NativeEngine(copy.deepcopy(model).cpu(), Tokens())
    assert engine._new_decoder().traits.graphed
    rng = random.Random(2)
    requests = [
        Request(str(i), tuple(rng.randrange(1, 97) for _ in range(length))) for i, length in enumerate((3, 150, 70))
    ]
    sampling = SamplingParams(max_completion_length=60, num_generations=9)
    mine, theirs = (e.generate(requests, sampling, seed=1) for e in (engine, plain))
    pairs = [(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    same = [(a, b) for a, b in pairs if a.tokens == b.tokens]
    assert len(same) >= len(pairs) - 1  # rounding may turn one draw, and all that follows it
    for a, b in same:
        torch.testing.assert_close(torch.tensor(a.sample_logp), torch.tensor(b.sample_logp), atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_half_precision_copy_samples_what_half_precision_passes_score(name):
    model = model_of(name)
    engine = NativeEngine(model, Tokens(), dtype=torch.bfloat16)
    assert engine._new_decoder().traits.graphed
    requests = [Request(str(i), tuple(range(1 + i, 30 + i))) for i in range(4)]
    sampling = SamplingParams(max_completion_length=40, num_generations=8)
    answers = engine.generate(requests, sampling, seed=1)
    groups = [Group(Problem(r.key, ""), r.tokens, tuple(done)) for r, done in zip(requests, answers, strict=True)]
    packed = pack(groups, 0).to("cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        logp = score_tokens(model, packed).logp[packed.completion_mask]
    sampled = torch.tensor([x for group in groups for c in group.completions for x in c.sample_logp], device="cuda")
    d = logp - sampled
    assert (d.exp() - 1 - d).mean() < 1e-3
    assert d.abs().max() < 0.2


@pytest.mark.parametrize("vocabulary", [97, 49152, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_draws_what_torch_draws(vocabulary, dtype):
    rows, states = 37, []
    kv = (torch.zeros(1, 1, 1, 16, device="cuda", dtype=dtype),)
    cache = SharedPrefixCache(Prefix(((1,),), kv, kv), [0] * rows, 8)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator).tolist()
    for _ in range(2):
        state = DecodeState(40, vocabulary, cache)
        state.restart(rows, 0)
        state.begin(
            logits.to("cuda", dtype), keys, list(range(rows)), [1, 2, *[9] * (rows - 2)], range(vocabulary // 4)
        )
        states.append(state)
    for _ in range(3):
        kernels.draw(states[0], rows, 0.8)
        states[1].draw(rows, SamplingParams(temperature=0.8))
    mine, theirs = states
    same = mine.numbers[0, :rows] == theirs.numbers[0, :rows]
    assert same.float().mean() > 0.9
    logp = torch.log_softmax(mine.logits[:rows].float() / 0.8, -1)
    expected = logp.gather(-1, mine.numbers[0, :rows, None].long()).squeeze(-1)
    torch.testing.assert_close(mine.numbers[1, :rows].float(), expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(mine.numbers[1], mine.numbers[2])
    for table in ("tokens", "lengths", "left", "positions"):
        assert torch.equal(getattr(mine, table)[:rows][same], getattr(theirs, table)[:rows][same])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(12, 2, 128), (9, 3, 64), (4, 4, 80), (8, 1, 16)])
@pytest.mark.parametrize("norms", [False, True])
def test_attention_of_a_step_is_that_of_plain_torch(heads, kv_heads, size, norms):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    prompts, layers, rows = (5, 700, 64), 2, 9
    kv = [tuple(normal(3, kv_heads, max(prompts), size) for _ in range(layers)) for _ in range(2)]
    qkv, tables = normal(12, (heads + 2 * kv_heads) * size), (normal(12, size), normal(12, size))
    weights = (normal(size), normal(size), 1e-5, 0.5) if norms else None
    own, results = normal(layers, 2, rows, kv_heads, 270, size), []
    for device, module in (("cuda", kernels), ("cpu", torch_kernels)):

        def on(x, device=device):
            return tuple(y.to(device, copy=True) if torch.is_tensor(y) else y for y in x)

        prefix = Prefix(tuple(tuple(range(n)) for n in prompts), on(kv[0]), on(kv[1]))
        cache = SharedPrefixCache(prefix, [0, 1, 1, 2, 1, 0, 2, 1, 1], 8, [0, 3, 262, 9, 70, 64, 65, 1, 128])
        cache.suffix_kv.copy_(own)
        state = DecodeState(12, 97, cache)
        state.load(cache, heads // kv_heads)
        state.restart(rows, cache.past)
        state.lengths[4] = ENDED
        state.feed(torch.zeros(rows, dtype=torch.int64, device=device))
        (x,), t = on([qkv]), on(tables)
        w = on(weights) if norms else None
        out = [module.attend(x.clone(), t, w, state, i, 0.1, heads, kv_heads, state.tile).cpu() for i in range(layers)]
        results.append((torch.stack(out), cache.suffix_kv.cpu()))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
