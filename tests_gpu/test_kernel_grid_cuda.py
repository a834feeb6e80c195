"""Every Triton kernel in the shapes that people train: 20 draws against the plain formula, and 20 equal repetitions.

A race shows in some shapes and in some runs only, and a memory checker that looks at shared memory does not see one in
global memory. So each kernel runs at every shape with 1, 4 and 8 warps, on many programs at once, and again.
"""

from __future__ import annotations

import pytest
import racing
import torch
import triton

from keel.models import flash_prefix, layer_kernels, vocab_kernels
from keel.models.flash_prefix import TorchKernels
from keel.models.head import Head
from keel.models.pack import pack
from keel.rollout import SamplingParams
from keel.rollout.native import kernels
from keel.rollout.native.cache import Prefix, SharedPrefixCache
from keel.rollout.native.state import DecodeState

import sys  # isort: skip
from pathlib import Path  # isort: skip

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from test_fast_cuda import ragged

from rollout import torch_kernels

pytestmark = pytest.mark.gpu


HEADS = [(8, 1), (9, 3), (12, 2), (14, 2), (15, 5), (16, 2), (16, 8), (24, 8), (28, 4), (32, 8), (32, 32), (40, 8)]
HEADS += [(40, 40), (64, 8)]
SIZES = [64, 80, 96, 128, 256]
HIDDEN = [576, 896, 960, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 8192]
VOCABULARIES = [32000, 49152, 128256, 151936, 256000]
WARPS = [1, 4, 8]
DRAWS, REPEATS = 20, 20
TOKENS = 2048
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5}


class WithWarps:
    """A kernel that is launched with so many warps."""

    def __init__(self, kernel, warps):
        self.kernel, self.warps = kernel, warps

    def __getitem__(self, grid):
        launch = self.kernel[grid]
        return lambda *args, **options: launch(*args, **{**options, "num_warps": self.warps})


@pytest.fixture(params=WARPS, ids=lambda warps: f"{warps}-warps")
def warps(request, monkeypatch):
    """All kernels with so many warps."""
    for module in (layer_kernels, vocab_kernels, kernels):
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel") and isinstance(value, triton.JITFunction):
                monkeypatch.setattr(module, name, WithWarps(value, request.param))
    return request.param


def normal(generator, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def wrong(mine, truth):
    """How many cells of a result are further from the fp32 formula than one rounding, and a NaN."""
    limit = ROUNDING[mine.dtype] * truth.float().abs() + 1e-4 * (mine.dtype != torch.float32) + 1e-5
    return int((~((mine.float() - truth.float()).abs() <= limit)).sum())


def check(compute, truth, draw):
    """`compute` against `truth` on fresh draws, and bit for bit against itself."""
    for seed in range(DRAWS):
        inputs = draw(torch.Generator("cuda").manual_seed(seed))
        for mine, expected in zip(compute(*inputs), truth(*inputs), strict=True):
            assert wrong(mine, expected) == 0, f"draw {seed}"
    first = [x.clone() for x in compute(*inputs)]
    for _ in range(REPEATS):
        assert all(torch.equal(x, y) for x, y in zip(compute(*inputs), first, strict=True))


def parts_of_attention(heads, size, dtype):
    def draw(generator):
        out, more = (normal(generator, TOKENS, heads, size, dtype=dtype) for _ in range(2))
        lse, more_lse = (3 * normal(generator, heads, TOKENS) for _ in range(2))
        in_completion = torch.rand(TOKENS, generator=generator, device="cuda") > 0.2
        more_lse[:, ~in_completion] = torch.inf  # as flash kernels leave it where there is no key
        return out, lse, more, more_lse, in_completion

    return draw


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_parts_of_a_softmax_are_joined(heads, kv_heads, size, warps):
    def truth(out, lse, more, more_lse, in_completion):
        return TorchKernels.join(out.float(), lse, more.float(), more_lse, in_completion)

    check(layer_kernels.join, truth, parts_of_attention(heads, size, torch.bfloat16))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_queries_and_keys_are_rotated_and_their_gradients_back(heads, kv_heads, size, warps):
    def draw(generator):
        counts = (heads, kv_heads, kv_heads)
        joint = normal(generator, TOKENS, sum(counts), size, dtype=torch.bfloat16)
        more = tuple(normal(generator, TOKENS, count, size, dtype=torch.bfloat16) for count in counts)
        tables = [normal(generator, TOKENS, size) for _ in range(2)]
        return joint.split(counts, dim=1), more, *tables

    def forward(parts, more, cos, sin):
        return layer_kernels.rotate(*parts, cos, sin)

    def forward_truth(parts, more, cos, sin):
        return TorchKernels.rotate(*(x.float() for x in parts), cos, sin)

    check(forward, forward_truth, draw)
    for adds, rotates in ((True, True), (True, False), (False, True)):

        def backward(parts, more, cos, sin, adds=adds, rotates=rotates):
            tables = (cos, sin) if rotates else (None, None)
            whole = tuple(x.contiguous() for x in parts)
            return layer_kernels.add_gradients(whole, more if adds else None, *tables)

        def backward_truth(parts, more, cos, sin, adds=adds, rotates=rotates):
            tables = (cos, sin) if rotates else (None, None)
            others = tuple(x.float() for x in more) if adds else None
            return TorchKernels.add_gradients(tuple(x.float() for x in parts), others, *tables)

        check(backward, backward_truth, draw)


@pytest.mark.parametrize("warps", [4, 8])
def test_the_grid_finds_a_kernel_that_stores_where_it_loads(warps):
    """The join as it was in 0.2, in the shapes of 7B and 8B models; one warp alone has no race."""

    def compute(out, lse, more, more_lse, in_completion):
        (tokens, heads, size), out, lse = out.shape, out.clone(), lse.clone()
        blocks = {"HEAD_BLOCK": triton.next_power_of_2(heads), "SIZE_BLOCK": triton.next_power_of_2(size)}
        inputs = (out, lse, more, more_lse, in_completion, tokens)
        WithWarps(racing.join_in_place, warps)[(tokens,)](*inputs, HEADS=heads, SIZE=size, **blocks)
        return out, lse

    found = {}
    for heads, kv_heads in HEADS:
        draw, cells = parts_of_attention(heads, 128, torch.bfloat16), 0
        for seed in range(DRAWS):
            out, lse, more, more_lse, in_completion = draw(torch.Generator("cuda").manual_seed(seed))
            truth = TorchKernels.join(out.float(), lse, more.float(), more_lse, in_completion)
            cells += wrong(compute(out, lse, more, more_lse, in_completion)[0], truth[0])
        found[f"{heads}/{kv_heads}"] = cells
    print(f"\ncells that the racing kernel gets wrong with {warps} warps, by heads:", found)
    assert found["28/4"] > 0
    assert found["32/8"] > 0


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [16, 64, *HIDDEN])  # those under 128 have fewer cells than a program has threads
def test_norms(width, dtype, centred, warps):
    def draw(generator):
        return (
            normal(generator, 256, width, dtype=dtype),
            normal(generator, 256, width, dtype=dtype),
            normal(generator, width, dtype=dtype),
            normal(generator, width, dtype=dtype),
        )

    def compute(x, residual, weight, bias):
        return kernels.norm(x, residual, weight, bias, 1e-5, 0.5, centred)

    def truth(x, residual, weight, bias):
        total = x + residual  # rounded once, as the kernel keeps it
        value = total.float()
        value = value - value.mean(-1, keepdim=True) if centred else value
        value = value * (value.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight.float() + 0.5)
        return total, value + bias.float()

    check(compute, truth, draw)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("width", HIDDEN)
def test_activations_of_a_step(width, kind, warps):
    def draw(generator):
        return (normal(generator, 256, 2 * width, dtype=torch.bfloat16),)

    def compute(both):
        return (kernels.activate(both[:, :width], both[:, width:], kind), kernels.activate(both[:, :width], None, kind))

    def truth(both):
        gate, up = both.float().split(width, dim=1)
        return torch_kernels.activate(gate, up, kind), torch_kernels.activate(gate, None, kind)

    check(compute, truth, draw)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("width", HIDDEN)
def test_gated_activations_and_their_gradients(width, joint, warps):
    def draw(generator):
        return tuple(normal(generator, 256, width, dtype=torch.bfloat16) for _ in range(3))

    def compute(gate, up, grad):
        inputs = (torch.cat((gate, up), dim=-1),) if joint else (gate, up)
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        out = layer_kernels.gated_silu(*inputs)
        gradients = torch.autograd.grad(out, inputs, grad)
        return out.detach(), *(gradients[0].split(width, dim=-1) if joint else gradients)

    def truth(gate, up, grad):
        inputs = tuple(x.float().requires_grad_() for x in (gate, up))
        out = torch.nn.functional.silu(inputs[0]) * inputs[1]
        return out.detach(), *torch.autograd.grad(out, inputs, grad.float())

    check(compute, truth, draw)


@pytest.mark.parametrize("size", VOCABULARIES)
def test_statistics_of_logits_and_their_gradients(size, warps):
    rows = 64

    def draw(generator):
        logits = 3 * normal(generator, rows, size)
        ref_logits = logits + normal(generator, rows, size)
        tokens = torch.randint(size, (rows,), generator=generator, device="cuda")
        return logits, ref_logits, tokens, normal(generator, 4, rows)

    def compute(logits, ref_logits, tokens, grads):
        # log z, log p, entropy, the reference's log z and log p, KL both ways
        out = tuple(torch.empty(rows, device="cuda") for _ in range(7))
        vocab_kernels.stats(logits, ref_logits, tokens, 0.7, out)
        log_z, logp, entropy, ref_log_z, _, kl, ref_policy = out
        head, kept, logits = Head(torch.nn.Linear(1, 1), 1.0), logits, logits.clone()
        gradient = vocab_kernels.gradient(
            logits,
            ref_logits,
            tokens,
            head,
            0.7,
            values=(entropy, kl, log_z, ref_log_z),
            grads=tuple(grads),
            dtype=torch.float32,
        )
        assert gradient.data_ptr() == logits.data_ptr()  # in place
        return logp, entropy, kl, ref_policy, gradient / torch.softmax(kept / 0.7, -1)  # of each cell as much as of all

    def truth(logits, ref_logits, tokens, grads):
        z = (logits.double() / 0.7).requires_grad_()
        policy, ref = torch.log_softmax(z, -1), torch.log_softmax(ref_logits.double() / 0.7, -1)
        values = (
            policy.gather(-1, tokens[:, None]).squeeze(-1),
            -(policy.exp() * policy).sum(-1),
            (policy.exp() * (policy - ref)).sum(-1),
            (ref.exp() * (ref - policy)).sum(-1),
        )
        (gradient,) = torch.autograd.grad(sum((g * x).sum() for g, x in zip(grads.double(), values, strict=True)), z)
        return *(x.detach() for x in values), gradient / 0.7 / policy.detach().exp()

    check_loosely(compute, truth, draw)


def check_loosely(compute, truth, draw):
    """The same for sums over a whole vocabulary, whose rounding is not that of one cell."""
    for seed in range(DRAWS):
        inputs = draw(torch.Generator("cuda").manual_seed(seed))
        for mine, expected in zip(compute(*inputs), truth(*inputs), strict=True):
            torch.testing.assert_close(mine.double(), expected.double(), atol=1e-3, rtol=1e-3)
    first = [x.clone() for x in compute(*inputs)]
    for _ in range(REPEATS):
        assert all(torch.equal(x, y) for x, y in zip(compute(*inputs), first, strict=True))


@pytest.mark.parametrize("size", VOCABULARIES)
def test_draws(size, warps):
    rows = 64

    def state_of(generator):
        kv = (torch.zeros(1, 1, 1, 16, device="cuda", dtype=torch.bfloat16),)
        cache = SharedPrefixCache(Prefix(((1,),), kv, kv), [0] * rows, 8)
        state = DecodeState(rows, size, cache)
        state.restart(rows, 0)
        logits = 3 * normal(generator, rows, size, dtype=torch.bfloat16)
        keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator, device="cuda").tolist()
        state.begin(logits, keys, list(range(rows)), [1, 2, *[9] * (rows - 2)], range(size // 4))
        return state

    def drawn(seed):
        state = state_of(torch.Generator("cuda").manual_seed(seed))
        for _ in range(3):
            kernels.draw(state, rows, 0.8)
        return [getattr(state, name)[:rows].clone() for name in ("tokens", "lengths", "left", "positions")], state

    for seed in range(DRAWS):
        tables, state = drawn(seed)
        logp = torch.log_softmax(state.logits[:rows].float() / 0.8, -1)
        expected = logp.gather(-1, state.numbers[0, :rows, None].long()).squeeze(-1)
        torch.testing.assert_close(state.numbers[1, :rows].float(), expected, atol=1e-4, rtol=1e-5)
        plain = state_of(torch.Generator("cuda").manual_seed(seed))
        for _ in range(3):
            plain.draw(rows, SamplingParams(temperature=0.8))
        same = state.numbers[0, :rows] == plain.numbers[0, :rows]
        assert same.float().mean() > 0.9  # rounding of a sum may turn a draw
        for table, name in zip(tables, ("tokens", "lengths", "left", "positions"), strict=True):
            assert torch.equal(table[same], getattr(plain, name)[:rows][same])
    for _ in range(REPEATS):
        assert all(torch.equal(x, y) for x, y in zip(drawn(seed)[0], tables, strict=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("many", "norms"), [(False, True), (True, False)], ids=["few-rows-norms", "many-rows"]
)  # few rows: own keys in pieces
def test_attention_of_a_step(heads, kv_heads, size, many, norms, warps):
    prompts, groups = (5, 300, 64), 3
    rows = 256 // kv_heads + 1 if many else 9
    lengths = [(7 * row) % 60 for row in range(rows)]

    def computed(generator, expected):
        kv = [(normal(generator, groups, kv_heads, max(prompts), size, dtype=torch.bfloat16),) for _ in range(2)]
        prefix = Prefix(tuple(tuple(range(n)) for n in prompts), *kv)
        cache = SharedPrefixCache(prefix, [row % groups for row in range(rows)], 8, lengths)
        cache.suffix_kv.copy_(normal(generator, *cache.suffix_kv.shape))
        state = DecodeState(rows, 97, cache)
        state.load(cache, heads // kv_heads)
        state.restart(rows, cache.past)
        state.feed(torch.zeros(rows, dtype=torch.int64, device="cuda"))
        qkv = normal(generator, rows, (heads + 2 * kv_heads) * size, dtype=torch.bfloat16)
        tables = tuple(normal(generator, rows, size, dtype=torch.bfloat16) for _ in range(2))
        weights = [normal(generator, size, dtype=torch.bfloat16) for _ in range(2)]
        named = (*weights, 1e-5, 0.5) if norms else None
        args = (qkv, tables, named, state, 0, size**-0.5, heads, kv_heads, state.tile)
        out = kernels.attend(*args), cache.suffix_kv.clone()
        if not expected:
            return out
        return out, plain_attention(qkv, tables, named, kv, cache, prompts, heads, kv_heads, size)

    for seed in range(DRAWS):
        (mine, stored), (truth, kept) = computed(torch.Generator("cuda").manual_seed(seed), True)
        assert float((mine.float() - truth).norm() / truth.norm()) < 1e-2
        assert float((mine.float() - truth).abs().max()) < 0.1
        assert float((stored.float() - kept).abs().max()) <= 2.0**-7 * float(kept.abs().max())
    for _ in range(REPEATS):
        again = computed(torch.Generator("cuda").manual_seed(seed), False)
        assert torch.equal(again[0], mine)
        assert torch.equal(again[1], stored)


def plain_attention(qkv, tables, norms, kv, cache, prompts, heads, kv_heads, size):
    """Each row's newest query over its prompt and its own keys, in fp32, and the cache with the newest keys."""
    rows = len(qkv)
    q, k, v = qkv.float().view(rows, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q_weight, k_weight, eps, offset = norms
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (w.float() + offset)
            for x, w in ((q, q_weight), (k, k_weight))
        )
    cos, sin = (x.float()[:, None] for x in tables)
    q, k = (x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin for x in (q, k))
    kept, out = cache.suffix_kv.float().clone(), torch.zeros(rows, heads, size, device="cuda")
    for row in range(rows):
        first, newest, prompt = cache.left_pad[row], cache.past, prompts[row % len(prompts)]
        kept[0, 0, row, :, newest], kept[0, 1, row, :, newest] = k[row], v[row]
        keys, values = (
            torch.cat((part[0][row % len(prompts), :, :prompt].float(), kept[0, i, row, :, first : newest + 1]), dim=1)
            for i, part in enumerate(kv)
        )
        query = q[row].view(kv_heads, -1, size)
        weights = (query @ keys.transpose(1, 2) * size**-0.5).softmax(-1)
        out[row] = (weights @ values).reshape(heads, size)
    return out.view(rows, -1), kept


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_whole_attention_is_as_near_to_fp64_in_every_shape(heads, kv_heads, warps):
    """Forward and backward through the flash calls, which are torch's own, with all that stands around them."""
    for size in SIZES:
        for seed in range(DRAWS):
            packed = pack(ragged(2, 3, (3, 60), (1, 40), seed=seed), 0, max_row_tokens=10**6)
            rows, length = packed.input_ids.shape
            generator = torch.Generator("cuda").manual_seed(seed)
            halves = [
                normal(generator, rows, n, length, size, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)
            ]
            real = (packed.prefix >= 0).cuda()[:, :, None, None]
            weight = normal(generator, rows, length, heads, size, dtype=torch.bfloat16) * real
            inputs = [x.double().requires_grad_() for x in halves]
            wide = [x.repeat_interleave(heads // x.shape[1], dim=1) for x in inputs]
            attend = torch.nn.functional.scaled_dot_product_attention
            expected = attend(*wide, attn_mask=packed.mask_4d().cuda(), scale=size**-0.5).transpose(1, 2) * real
            gradients = torch.autograd.grad((expected * weight.double()).sum(), inputs)
            segments, half = packed.to("cuda").segments, [x.requires_grad_() for x in halves]

            def forward(half=half, segments=segments, size=size):
                return flash_prefix.flash_attend(*(x.transpose(1, 2).flatten(0, 1) for x in half), segments, size**-0.5)

            out = forward().view_as(expected) * real
            mine = torch.autograd.grad((out * weight).sum(), half)
            for result, truth in zip((out, *mine), (expected, *gradients), strict=True):
                assert (result.double() - truth).norm() < 1e-2 * truth.norm(), (size, seed)
                assert (result.double() - truth).abs().max() < 0.03 * truth.abs().max(), (size, seed)
        with torch.no_grad():
            first = forward()
            assert all(torch.equal(forward(), first) for _ in range(REPEATS))
