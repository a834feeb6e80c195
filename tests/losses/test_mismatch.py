"""Sampler-mismatch weights by hand."""

import math

import pytest
import torch

from keel.base.errors import KeelError
from keel.config import load_config
from keel.losses import MismatchOptions, mismatch_weights

RATIOS = torch.tensor([[0.25, 1.0, 1.5, 4.0], [0.5, 2.0, 3.0, 1.0]])
SAMPLE = torch.full((2, 4), -1.0)
OLD = SAMPLE + RATIOS.log()
MASK = torch.tensor([[True, True, True, True], [True, True, False, False]])

CASES = [
    (MismatchOptions(), [[0.25, 1.0, 1.5, 2.0], [0.5, 2.0, 1.0, 1.0]]),
    (MismatchOptions(kind="none"), [[1.0] * 4, [1.0] * 4]),
    (MismatchOptions(kind="truncate", cap=3.0), [[0.25, 1.0, 1.5, 3.0], [0.5, 2.0, 1.0, 1.0]]),
    (MismatchOptions(kind="mask", cap=1.6), [[0.25, 1.0, 1.5, 0.0], [0.5, 0.0, 1.0, 1.0]]),
    (MismatchOptions(kind="icepop", cap=1.6, floor=0.4), [[0.0, 1.0, 1.5, 0.0], [0.5, 0.0, 1.0, 1.0]]),
    (MismatchOptions(kind="truncate", cap=1.2, level="sequence"), [[1.2] * 4, [1.0] * 4]),
    (MismatchOptions(kind="truncate", cap=2.0, level="sequence"), [[1.5] * 4, [1.0] * 4]),
    (MismatchOptions(kind="mask", cap=1.4, level="sequence"), [[0.0] * 4, [1.0] * 4]),
    (MismatchOptions(kind="icepop", cap=5.0, floor=0.5, level="sequence"), [[1.5] * 4, [1.0] * 4]),
]


@pytest.mark.parametrize(("spec", "expected"), CASES)
def test_literal_weights(spec, expected):
    torch.testing.assert_close(mismatch_weights(OLD, SAMPLE, MASK, spec), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("spec", "expected"), CASES)
def test_weights_are_detached(spec, expected):
    assert not mismatch_weights(OLD.clone().requires_grad_(), SAMPLE, MASK, spec).requires_grad


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_missing_sampler_log_probability_means_no_correction(level):
    sample = SAMPLE.clone()
    sample[0, 3] = math.nan
    got = mismatch_weights(OLD, sample, MASK, MismatchOptions(kind="truncate", cap=10.0, level=level))
    expected = 1.0 if level == "token" else 0.375
    assert got[0, 3].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("hole", [math.nan, -math.inf])
def test_nothing_leaks_from_outside_the_mask(level, hole):
    old, sample = OLD.clone(), SAMPLE.clone()
    old[1, 2:], sample[1, 2:] = hole, -hole
    spec = MismatchOptions(kind="truncate", cap=10.0, level=level)
    torch.testing.assert_close(mismatch_weights(old, sample, MASK, spec), mismatch_weights(OLD, SAMPLE, MASK, spec))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_tokens_the_sampler_calls_impossible_stay_finite(kind, level):
    sample = torch.tensor([[-math.inf, -math.inf, -1.0, -1.0], [-1.0] * 4])
    assert torch.isfinite(mismatch_weights(OLD, sample, MASK, MismatchOptions(kind=kind, level=level))).all()


MISTAKES = [
    ({"kind": "trunc"}, "loss.mismatch.kind is the text trunc: did you mean truncate?"),
    ({"level": "word"}, "loss.mismatch.level is the text word: it must be one of token, sequence"),
    ({"cap": 0.5}, "loss.mismatch.cap is 0.5: it must be at least 1"),
    ({"kind": "icepop"}, "needs a floor between 0 and 1"),
    ({"kind": "icepop", "floor": 1.5}, "loss.mismatch.floor is 1.5: it must be at most 1"),
    ({"floor": 0.5}, "loss.mismatch.floor does not apply to kind=truncate"),
]


@pytest.mark.parametrize(("options", "says"), MISTAKES)
def test_mistakes_are_one_line(options, says):
    with pytest.raises(KeelError) as caught:
        load_config({"loss": {"mismatch": options}})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_floor_that_is_missing_is_refused_where_it_is_used():
    with pytest.raises(KeelError, match="needs a floor"):
        mismatch_weights(OLD, SAMPLE, MASK, MismatchOptions(kind="icepop"))


def test_a_mask_that_is_not_boolean_is_refused():
    with pytest.raises(KeelError, match="boolean"):
        mismatch_weights(OLD, SAMPLE, MASK.float(), MismatchOptions())
