"""The likelihood of plain text against the model's own cross-entropy, line by line."""

import pytest
import torch

from keel.lab.compare import Side
from keel.lab.studies.point import SENTENCES, text_logprob
from keel.models.load import load_model


def test_text_likelihood_is_minus_the_cross_entropy_per_token():
    loaded = load_model("tiny", device="cpu", seed=3)
    lines = ("A cat sat.", "Two dogs ran away, and one came back.")
    total = count = 0.0
    for line in lines:
        ids = torch.tensor([loaded.tokenizer.encode(line)])
        with torch.no_grad():
            total -= loaded.model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert text_logprob(Side("tiny", loaded), lines) == pytest.approx(total / count, rel=1e-5)


def test_the_sentences_are_different_and_plain():
    assert len(set(SENTENCES)) == 40
    assert all(line.isascii() for line in SENTENCES)
