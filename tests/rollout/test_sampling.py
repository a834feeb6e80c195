"""Filters against transformers' warpers, draws against probabilities, noise against its keys."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine
from keel.rollout.sampling import block_shape, draw, filter_threshold, gumbel, row_key

from . import shapes


def filter_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The logits with -inf where a filter leaves the token out."""
    return logits.masked_fill(logits < filter_threshold(logits, params), -torch.inf)


@pytest.mark.parametrize("vocabulary", [50, 257, 3000])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.1), (20, 0.7, 0.05), (10**6, 0.3, 0.0), (1, 1.0, 0.0)],
)
def test_filters_match_transformers(vocabulary: int, top_k: int, top_p: float, min_p: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    for scale in (0.01, 1.0, 4.0):
        logits = scale * torch.randn(6, vocabulary, generator=generator)
        expected = logits
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        if min_p:
            expected = MinPLogitsWarper(min_p)(None, expected)
        found = filter_logits(logits, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))
        differs = found != expected
        # cumulative sums round: the token at the very edge of the nucleus may fall to either side
        assert differs.sum(-1).max() <= 1
        above = (logits[:, None] > logits[..., None]) & expected.isfinite()[:, None]
        edge = (above * torch.softmax(logits, -1)[:, None]).sum(-1) if differs.any() else torch.zeros(())
        assert not differs.any() or (edge[differs] - top_p).abs().max() < 1e-5
        assert torch.equal(found[~differs], expected[~differs])


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom, cells of fewer than 5 expected draws pooled into one."""
    expected = counts.sum() * probabilities.double()
    rare = expected < 5
    pooled_counts = torch.cat((counts[~rare].double(), counts[rare].sum().double().view(1)))
    pooled = torch.cat((expected[~rare], expected[rare].sum().view(1)))
    used = pooled > 1e-9
    assert pooled_counts[~used].sum() == 0, "drew what has no probability"
    return float(((pooled_counts - pooled)[used] ** 2 / pooled[used]).sum()), int(used.sum()) - 1


def assert_fits(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Within 4.5 standard deviations (of the chi-square's normal approximation) of what sampling would give."""
    statistic, freedom = chi_square(counts, probabilities)
    assert freedom > 0
    assert abs(statistic - freedom) < 4.5 * (2 * freedom) ** 0.5 + 2, (statistic, freedom)


@pytest.mark.parametrize("vocabulary", [7, 64, 251])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    logits = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    rows = 60_000
    keys = torch.tensor([row_key(0, 0, 0, "p", i) for i in range(rows)])
    noise = gumbel(keys, torch.zeros_like(keys), sum(block_shape(vocabulary)))
    token, logp, _ = draw(logits.expand(rows, -1), SamplingParams(temperature=0.7), noise)
    expected = torch.log_softmax(logits / 0.7, -1)
    assert_fits(torch.bincount(token, minlength=vocabulary), expected.exp())
    torch.testing.assert_close(logp, expected[token], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.8}, {"top_k": 12}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}]
)
def test_the_engine_samples_from_the_model(options: dict[str, float]) -> None:
    """First and second tokens of many completions, against the model's own probabilities."""
    model = shapes.model("llama", sharpen=30.0)
    engine = NativeEngine(model, shapes.tokenizer())
    sampling = SamplingParams(num_generations=4000, max_completion_length=2, ignore_eos=True, **options)  # type: ignore[arg-type]
    prompt = (5, 80, 31)
    (group,) = engine.generate([Request("p", prompt)], sampling, seed=2)
    with torch.no_grad():
        contexts = torch.tensor([[*prompt, token] for token in range(shapes.VOCABULARY)])
        logits = model.eval()(input_ids=contexts).logits
    unfiltered = torch.log_softmax(logits, -1)
    filtered = torch.log_softmax(filter_logits(logits.flatten(0, 1), sampling).view_as(logits), -1)
    tokens = torch.tensor([c.tokens for c in group])
    first = filtered[0, 2].exp()
    assert_fits(torch.bincount(tokens[:, 0], minlength=len(first)), first)
    second = (first[:, None] * filtered[:, 3].exp()).sum(0)
    assert_fits(torch.bincount(tokens[:, 1], minlength=len(first)), second)
    common = torch.bincount(tokens[:, 0]).argmax()
    after = tokens[tokens[:, 0] == common, 1]
    assert_fits(torch.bincount(after, minlength=len(first)), filtered[common, 3].exp())
    for kind, at in (("sample_logp", unfiltered), ("filtered_logp", filtered)):
        found = torch.tensor([getattr(c, kind) for c in group])
        expected = torch.stack((at[0, 2, tokens[:, 0]], at[tokens[:, 0], 3, tokens[:, 1]]), 1)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_noise_depends_on_its_key_and_position_alone() -> None:
    keys = torch.tensor([row_key(0, 0, 0, "p", i) for i in range(50)])
    positions = torch.arange(50)
    noise = gumbel(keys, positions, 300)
    torch.testing.assert_close(noise[7], gumbel(keys[7:8], positions[7:8], 300)[0], rtol=0, atol=0)
    torch.testing.assert_close(noise[:, :20], gumbel(keys, positions, 20), rtol=0, atol=0)
    # Gumbel has mean 0.5772 and variance pi^2/6
    assert abs(float(noise.mean()) - 0.5772) < 0.05
    assert abs(float(noise.var()) - 1.6449) < 0.1
    correlation = torch.corrcoef(torch.stack((noise[:-1].flatten(), noise[1:].flatten())))[0, 1]
    assert abs(float(correlation)) < 0.03
    grid = gumbel(keys[:1].expand(2000), torch.arange(2000), 2)
    assert abs(float(torch.corrcoef(grid.T)[0, 1])) < 0.1
    seen = {row_key(*key) for key in ((0, 0, 0, "p", 0), (1, 0, 0, "p", 0), (0, 1, 0, "p", 0), (0, 0, 1, "p", 0))}
    assert len(seen | {row_key(0, 0, 0, "q", 0), row_key(0, 0, 0, "p", 1), row_key(1, 10, 0, "p", 0)}) == 7


def test_blocks_cover_the_vocabulary() -> None:
    for vocabulary in (1, 2, 3, 7, 260, 32000, 49152, 50257, 151936):
        blocks, size = block_shape(vocabulary)
        assert blocks * size >= vocabulary
        assert blocks + size <= 4 * vocabulary**0.5 + 2
