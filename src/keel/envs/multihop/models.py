"""Small models over the closed vocabulary of `multihop`'s made-up worlds.

`model.name: keel.envs.multihop.models:multihop_small`
"""

from __future__ import annotations

from typing import Any

from torch import nn

from keel.envs.multihop.options import multihop
from keel.models.words import word_model

DOCUMENTS = 20  # the most that a made-up world has: one vocabulary for all sizes


def multihop_tiny(seed: int = 0) -> tuple[nn.Module, Any]:
    """2 layers of width 64: quick, and enough to look up and to copy; `configs/musique_small.yaml` trains it."""
    return _of_words(seed, layers=2, width=64)


def multihop_small(seed: int = 0) -> tuple[nn.Module, Any]:
    """3 layers of width 64."""
    return _of_words(seed, layers=3, width=64)


def multihop_medium(seed: int = 0) -> tuple[nn.Module, Any]:
    """4 layers of width 128, the shape of `tiny`."""
    return _of_words(seed, layers=4, width=128)


def _of_words(seed: int, *, layers: int, width: int) -> tuple[nn.Module, Any]:
    worlds = multihop(retriever="golden", documents=DOCUMENTS)
    return word_model(worlds.vocabulary, seed, layers=layers, width=width)
