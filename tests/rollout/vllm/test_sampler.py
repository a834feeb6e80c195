"""Keel's drawing as a logits processor of vLLM's, in both of its model runners."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel
from keel.rollout.vllm.engine import EXTRA

from . import fake_vllm

WIDTH, PADDED = 37, 40
SAMPLING = SamplingParams(temperature=0.7, top_k=12)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake_vllm.install(monkeypatch)
    name = "keel.rollout.vllm.sampler"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module.KeelSampler


def params(key: int, start: int = 0, **changes: Any) -> Any:
    drawn = {"key": key, "start": start, "vocabulary": WIDTH, "top_p": 1.0, "min_p": 0.0, "temperature": 0.7}
    return SimpleNamespace(extra_args={EXTRA: {**drawn, "top_k": 12, **changes}})


def expected(logits: torch.Tensor, key: int, position: int) -> tuple[int, float, float]:
    noise = gumbel(torch.tensor([key]), torch.tensor([position]), sum(block_shape(WIDTH)))
    token, before, after = draw(logits[None, :WIDTH], SAMPLING, noise)
    return int(token), float(before), float(after)


def assert_drawn(row: torch.Tensor, logits: torch.Tensor, key: int, position: int) -> None:
    token, before, after = expected(logits, key, position)
    finite = dict(zip(row.isfinite().nonzero().flatten().tolist(), row[row.isfinite()].tolist(), strict=True))
    assert finite == {token: pytest.approx(after, abs=1e-6), (token + 1) % WIDTH: pytest.approx(before, abs=1e-6)}
    assert int(row.argmax()) == token


def test_v1_follows_rows_as_they_move_and_grow(sampler: Any) -> None:
    processor, logits = sampler(None, torch.device("cpu"), False), torch.randn(3, PADDED)
    tokens: list[list[int]] = [[], [1, 2], []]
    added = [(0, params(11), None, tokens[0]), (1, params(22, start=5), None, tokens[1])]
    added += [(2, SimpleNamespace(extra_args=None), None, tokens[2])]
    processor.update_state(SimpleNamespace(removed=(), added=added, moved=()))
    out = processor.apply(logits.clone())
    assert_drawn(out[0], logits[0], 11, 0)
    assert_drawn(out[1], logits[1], 22, 7)
    assert torch.equal(out[2], logits[2])
    tokens[0].append(-1)  # not known yet, and yet there
    processor.update_state(SimpleNamespace(removed=(), added=(), moved=[(0, 1, "swap")]))
    out = processor.apply(logits.clone())
    assert_drawn(out[1], logits[1], 11, 1)
    assert_drawn(out[0], logits[0], 22, 7)
    processor.update_state(SimpleNamespace(removed=[1], added=(), moved=[(0, 1, "one way")]))
    out = processor.apply(logits.clone())
    assert torch.equal(out[0], logits[0])
    assert_drawn(out[1], logits[1], 22, 7)


def test_v2_counts_positions_on_the_device(sampler: Any) -> None:
    requests = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([4, 9, 6, 3])))
    processor, logits = sampler(None, requests), torch.randn(3, PADDED)
    assert processor.add_request(3, params(33))
    assert processor.add_request(1, params(11))
    assert processor.add_request(2, params(22, start=5))
    assert not processor.add_request(3, SimpleNamespace(extra_args={}))  # the slot's next owner draws for itself
    slots = np.array([2, 3, 1])
    positions = torch.tensor([5, 7, 11])  # of the token before: the prompts' last, and two after it
    out = processor.apply(logits.clone(), SimpleNamespace(idx_mapping_np=slots, pos=positions))
    assert_drawn(out[0], logits[0], 22, 5)
    assert torch.equal(out[1], logits[1])
    assert_drawn(out[2], logits[2], 11, 3)


def test_both_runners_take_the_class(sampler: Any) -> None:
    assert issubclass(sampler, fake_vllm.LogitsProcessor)
    assert issubclass(sampler, fake_vllm.LogitsProcessorV2)
    assert not sampler(None, torch.device("cpu"), False).is_argmax_invariant()
