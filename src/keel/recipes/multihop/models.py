"""Small models over the closed vocabulary of `multihop`'s synthetic worlds.

`model.name: keel.recipes.multihop.models:multihop_small`
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from keel.models.tiny import word_model
from keel.recipes.multihop.options import multihop

DOCUMENTS = 20  # the maximum of a synthetic world, so that all sizes share one vocabulary


def of_words(seed: int = 0, *, layers: int, width: int) -> tuple[nn.Module, Any]:
    """A model of this shape; equal seeds give equal weights."""
    worlds = multihop(retriever="golden", documents=DOCUMENTS)
    return word_model(worlds.vocabulary, seed, layers=layers, width=width)


multihop_tiny = partial(of_words, layers=2, width=64)  # enough to look up and to copy
multihop_small = partial(of_words, layers=3, width=64)
multihop_medium = partial(of_words, layers=4, width=128)  # the shape of `tiny`
