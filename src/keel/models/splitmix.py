"""SplitMix64 on int64 tensors: the hash of fingerprints and of sampling noise."""

from __future__ import annotations

from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, because torch's right shift is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection of 64 bits that passes BigCrush as a counter."""
    x = shift(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = shift(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return shift(x, 31).bitwise_xor_(x)
