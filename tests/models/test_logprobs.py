"""Packed, chunked scores equal those of the model's own full logits: values, gradients and bytes."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keel.base.errors import KeelError
from keel.kl.exact import jsd, topk_kl, topk_kl_unbiased
from keel.models.chunked import Divergence, StatsOptions, token_stats
from keel.models.head import Head, frozen_head, head_of
from keel.models.pack import microbatches, pack
from keel.models.scorer import hidden_states, score_hidden, score_tokens

from .packing_cases import (
    RAGGED,
    VOCABULARY,
    assert_same_gradients,
    gradients,
    make_groups,
    make_model,
    naive_logp,
    naive_logprobs,
)

FAMILIES = ["llama", "llama-tied", "gpt2", "qwen2", "qwen3"]
HEADS = ["cohere", "granite", "gemma2", "phi"]


def weights(count: int) -> Tensor:
    """Different upstream gradients for different tokens, so that a permutation cannot pass."""
    return torch.linspace(-1.0, 1.5, count)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("row_tokens", [None, 40], ids=["row-a-group", "groups-share-rows"])
@pytest.mark.parametrize("tool", [None, slice(1, 3)], ids=["one-turn", "turns"])
def test_shared_prefix_equals_one_row_a_completion(name: str, row_tokens: int | None, tool: slice | None) -> None:
    model, groups = make_model(name), make_groups(RAGGED, tool=tool)
    packed = pack(groups, 0, max_row_tokens=row_tokens)
    scores = score_tokens(model, packed, chunk_tokens=7)
    found, mask = scores.logp, packed.action_mask
    expected = packed.scatter(naive_logp(model, groups))
    assert (found - expected).abs().max() < 1e-4
    assert found[~packed.completion_mask].abs().sum() == 0
    coefficients = weights(int(mask.sum()))
    assert_same_gradients(
        gradients(model, (found[mask] * coefficients).sum()), gradients(model, (expected[mask] * coefficients).sum())
    )


@pytest.mark.parametrize("name", [*FAMILIES, *HEADS, "llama-eager", "mistral-window", "bloom"])
def test_the_fallback_is_right_for_every_model(name: str) -> None:
    model, groups = make_model(name), make_groups([(20, (9, 3)), (4, (2, 30))])
    packed = pack(groups, 0, shared_prefix=False)
    found = score_tokens(model, packed).logp[packed.completion_mask]
    expected = naive_logp(model, groups)
    assert (found - expected).abs().max() < 1e-4
    coefficients = weights(len(expected))
    assert_same_gradients(
        gradients(model, (found * coefficients).sum()), gradients(model, (expected * coefficients).sum())
    )


@pytest.mark.parametrize(
    ("name", "temperature"), [("llama-tied", 0.5), ("gemma2", 1.3), ("cohere", 0.5), ("granite", 1.3), ("phi", 1.0)]
)
@pytest.mark.parametrize("general", [False, True], ids=["written-out", "checkpointed"])
def test_entropy_and_exact_kl_equal_full_logits(name: str, temperature: float, general: bool) -> None:
    policy, reference = make_model(name), make_model(name, seed=1)
    parameters = list(policy.parameters())
    groups = make_groups(RAGGED)
    packed = pack(groups, 0, shared_prefix=False)  # also right for Gemma
    with torch.no_grad():
        ref_hidden = hidden_states(reference, packed)
    hook = head_of(policy).module.register_forward_hook(lambda *_: None) if general else None
    assert (head_of(policy).linear() is None) == general
    scores = score_tokens(
        policy,
        packed,
        temperature=temperature,
        entropy=True,
        exact_kl=True,
        ref_policy=True,
        ref_policy_grad=True,
        ref_hidden=ref_hidden,
        ref_head=head_of(reference),
        chunk_tokens=11,
    )
    p = torch.cat(naive_logprobs(policy, groups, temperature))
    q = torch.cat(naive_logprobs(reference, groups, temperature)).detach()
    mask = packed.completion_mask
    expected = {
        "logp": naive_logp(policy, groups, temperature),
        "entropy": -(p.exp() * p).sum(-1),
        "exact_kl": (p.exp() * (p - q)).sum(-1),
        "ref_logp": naive_logp(reference, groups, temperature),
        "ref_policy_kl": (q.exp() * (q - p)).sum(-1),
    }
    for key, value in expected.items():
        assert (getattr(scores, key)[mask] - value).abs().max() < 1e-5, key
    assert not scores.ref_logp.requires_grad
    for key, coefficients in zip(
        ["logp", "entropy", "exact_kl", "ref_policy_kl"],
        [weights(len(p)), weights(len(p)).flip(0), weights(len(p)).square(), weights(len(p)).roll(1)],
        strict=True,
    ):
        found = torch.autograd.grad((getattr(scores, key)[mask] * coefficients).sum(), parameters, retain_graph=True)
        wanted = torch.autograd.grad((expected[key] * coefficients).sum(), parameters, retain_graph=True)
        assert_same_gradients(dict(enumerate(found)), dict(enumerate(wanted)), 1e-5)
    if hook is not None:
        hook.remove()


@pytest.mark.parametrize("key", ["logp", "entropy", "kl"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_each_written_out_gradient_by_finite_differences(key: str, softcap: float | None) -> None:
    """In float64, so that nothing hides: the written-out formulas against numerical derivatives."""
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    module = nn.Linear(4, 9, bias=True).double()
    ref_head = nn.Linear(4, 9).double()
    ref_hidden, tokens = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 8, 3, 1])
    options = StatsOptions(temperature=0.7, entropy=True, ref_head=ref_head, chunk_tokens=2)
    head = Head(module, scale=1.7, softcap=softcap)

    def function(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return getattr(token_stats(h, head, tokens, options, ref_hidden), key)

    assert torch.autograd.gradcheck(function, (hidden, module.weight, module.bias))


DIVERGENCES: dict[str, Divergence] = {
    "jsd": lambda policy, ref, tokens: jsd(policy, ref, 0.3),
    "topk": lambda policy, ref, tokens: topk_kl(policy, ref, 4),
    "topk_unbiased": lambda policy, ref, tokens: topk_kl_unbiased(policy, ref, tokens, 4),
}


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("plain", [True, False], ids=["written-out", "checkpointed"])
@pytest.mark.parametrize("with_logp", [False, True])
def test_a_divergence_by_chunks_is_that_of_full_logits(
    name: str, softcap: float | None, plain: bool, with_logp: bool
) -> None:
    """Values and gradients in float64, alone and together with those of the log-probabilities."""
    torch.manual_seed(1)
    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    linear, ref_head = nn.Linear(4, 9, bias=True).double(), nn.Linear(4, 9).double()
    ref_hidden, tokens = torch.randn(7, 4, dtype=torch.float64), torch.randint(9, (7,))
    head = Head(linear if plain else nn.Sequential(linear), scale=1.7, softcap=softcap)
    options = StatsOptions(temperature=0.7, ref_head=ref_head, chunk_tokens=3, divergence=DIVERGENCES[name])
    stats = token_stats(hidden, head, tokens, options, ref_hidden)
    raw = linear(hidden) * 1.7
    logprobs = ((raw if softcap is None else softcap * (raw / softcap).tanh()) / 0.7).log_softmax(-1)
    expected = DIVERGENCES[name](logprobs, (ref_head(ref_hidden) / 0.7).log_softmax(-1), tokens)
    torch.testing.assert_close(stats.divergence, expected, rtol=0, atol=1e-12)
    assert stats.divergence is not None
    coefficients = weights(7).double()
    found, wanted = (stats.divergence * coefficients).sum(), (expected * coefficients).sum()
    if with_logp:
        found = found + stats.logp.sum()
        wanted = wanted + logprobs.gather(-1, tokens[:, None]).sum()
    leaves = (hidden, linear.weight, linear.bias)
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_kl_at_the_start_is_zero_with_zero_gradient() -> None:
    model, packed = make_model("llama"), pack(make_groups(RAGGED), 0)
    with torch.no_grad():
        ref_hidden = hidden_states(model, packed)
    scores = score_tokens(model, packed, exact_kl=True, ref_hidden=ref_hidden, ref_head=head_of(model))
    assert scores.exact_kl.abs().max() == 0
    assert all(g.abs().max() < 1e-5 for g in gradients(model, scores.exact_kl.sum()).values())


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]], ids=["body", "body-and-head"])
def test_peft_models(targets: list[str]) -> None:
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(make_model("llama"), config).eval()
    groups = make_groups(RAGGED)
    packed = pack(groups, 0)
    found = score_tokens(model, packed, chunk_tokens=16).logp[packed.completion_mask]
    expected = naive_logp(model, groups)
    assert (found - expected).abs().max() < 1e-4
    assert_same_gradients(gradients(model, found.square().sum()), gradients(model, expected.square().sum()))
    with model.disable_adapter():
        off = score_tokens(model, packed).logp[packed.completion_mask]
    assert (off - naive_logp(make_model("llama"), groups)).abs().max() < 1e-4


@pytest.mark.parametrize("options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}, {}], ids=str)
@pytest.mark.parametrize("reference_off", [True, False])
def test_a_reference_of_other_adapters_keeps_its_own_head(options: dict[str, Any], reference_off: bool) -> None:
    """The reference's hidden states and head are taken inside its context, and used outside of it."""
    options = {"target_modules": ["q_proj"], **options}
    torch.manual_seed(0)
    model = peft.get_peft_model(make_model("llama"), peft.LoraConfig(r=4, init_lora_weights=False, **options)).eval()
    groups = make_groups(RAGGED)
    packed = pack(groups, 0)

    with model.disable_adapter() if reference_off else nullcontext(), torch.no_grad():
        ref_hidden, ref_head = hidden_states(model, packed), frozen_head(model)
        q = torch.cat(naive_logprobs(model, groups))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1)
    p = torch.cat(naive_logprobs(model, groups))
    scores = score_tokens(model, packed, exact_kl=True, ref_hidden=ref_hidden, ref_head=ref_head)
    assert (scores.exact_kl[packed.completion_mask] - (p.exp() * (p - q)).sum(-1)).abs().max() < 1e-5


def test_microbatches_add_up() -> None:
    model, groups = make_model("qwen2"), make_groups(RAGGED)
    whole = score_tokens(model, pack(groups, 0)).logp
    parts = [pack(part, 0) for part in microbatches(groups, 30)]
    assert len(parts) > 1
    scored = torch.cat([score_tokens(model, part).logp[part.completion_mask] for part in parts])
    assert (scored - whole[pack(groups, 0).completion_mask]).abs().max() < 1e-5


def test_a_batch_of_empty_completions_scores_nothing() -> None:
    scores = score_tokens(make_model("llama"), pack(make_groups([(4, (0, 0))]), 0), entropy=True)
    assert scores.logp.shape == scores.entropy.shape == (2, 0)


def test_impossible_tokens_do_not_poison_entropy_and_kl() -> None:
    """A head may give −inf to padding of the vocabulary: 0 · (−inf) must count as 0."""
    model, packed = make_model("phi"), pack(make_groups(RAGGED, vocabulary=50), 0)
    with torch.no_grad():
        head_of(model).module.bias[50:] = -torch.inf
        ref_hidden = hidden_states(model, packed)
    scores = score_tokens(model, packed, entropy=True, exact_kl=True, ref_hidden=ref_hidden, ref_head=head_of(model))
    assert torch.isfinite(scores.entropy).all()
    assert scores.exact_kl.abs().max() < 1e-6
    loss = scores.logp.sum() + scores.entropy.sum() + scores.exact_kl.sum()
    assert all(torch.isfinite(g).all() for g in gradients(model, loss).values())


def test_an_unknown_head_is_refused() -> None:
    model = make_model("llama")
    own = model.forward

    def twisted(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits = out.logits + out.logits.square()
        return out

    model.forward = twisted
    with pytest.raises(KeelError, match=r"cannot reproduce the logits.*model\.scorer"):
        head_of(model)


def test_what_cannot_be_scored_is_refused() -> None:
    model, packed = make_model("llama"), pack(make_groups(RAGGED), 0)
    hidden, head = hidden_states(model, packed), head_of(model)
    with pytest.raises(KeelError, match="ref_hidden and ref_head"):
        score_hidden(hidden, head, packed, exact_kl=True)
    with pytest.raises(KeelError, match="temperature"):
        score_hidden(hidden, head, packed, temperature=0.0)
    with pytest.raises(KeelError, match="ref_hidden has"):
        score_hidden(hidden, head, packed, exact_kl=True, ref_hidden=hidden[1:], ref_head=head)
    other = nn.Linear(32, VOCABULARY + 3)
    with pytest.raises(KeelError, match="one vocabulary"):
        score_hidden(hidden, head, packed, exact_kl=True, ref_hidden=hidden, ref_head=other)
    assert torch.isfinite(score_hidden(hidden, head, packed).logp).all()


def test_half_precision_scores_are_fp32() -> None:
    model, packed = make_model("llama").bfloat16(), pack(make_groups(RAGGED), 0)
    scores = score_tokens(model, packed, entropy=True)
    assert scores.logp.dtype == scores.entropy.dtype == torch.float32
    assert all(g.dtype == torch.bfloat16 for g in gradients(model, scores.logp.sum()).values())


class Bytes(TorchDispatchMode):
    """The largest tensor that was made, and the peak of bytes alive at once, counted by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.live, self.peak = 0, 0, 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in (x for x in tree_leaves(out) if isinstance(x, Tensor)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self.seen:
                continue
            self.seen.add(key)
            self.largest, self.live = max(self.largest, size), self.live + size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key, size)
        return out

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def peak_bytes(count: int, vocabulary: int, general: bool) -> tuple[int, int]:
    """Forward and backward of every statistic on `count` tokens with 16 in a chunk; parameters are not counted."""
    width = 8
    torch.manual_seed(0)
    head, ref_head = Head(nn.Linear(width, vocabulary, bias=False)), nn.Linear(width, vocabulary, bias=False)
    if general:
        head.module.register_forward_hook(lambda *_: None)
    hidden, ref_hidden = torch.randn(count, width, requires_grad=True), torch.randn(count, width)
    tokens = torch.randint(vocabulary, (count,))
    with Bytes() as seen:
        stats = token_stats(hidden, head, tokens, StatsOptions(1.0, True, True, ref_head, 16), ref_hidden)
        assert stats.entropy is not None
        assert stats.kl is not None
        (stats.logp + stats.entropy + stats.kl).sum().backward()
    return seen.largest, seen.peak


@pytest.mark.parametrize("general", [False, True], ids=["written-out", "checkpointed"])
def test_memory_does_not_grow_with_vocabulary_times_tokens(general: bool) -> None:
    vocabulary = 4096
    small, large = peak_bytes(64, vocabulary, general), peak_bytes(1024, vocabulary, general)
    chunk, whole = 16 * vocabulary * 4, 1024 * vocabulary * 4
    assert large[0] == small[0] <= chunk  # no tensor beyond one chunk of logits
    # Sixteen times the tokens add their own few numbers each (hidden states and results), never logits.
    assert large[1] - small[1] < 1024 * 64 * 4 < 0.02 * whole
    assert large[1] < 16 * chunk < whole / 3
