"""The reversed k3, a common mistake in tutorials, for studies of its effect."""

from __future__ import annotations

import torch
from torch import Tensor


def reversed_k3(d: Tensor) -> Tensor:
    """e^u − u − 1 with u = log π − log p = −d: k3 with swapped arguments, but on the same samples.

    On samples from π its mean is Σ π²/p − 1 − KL(π‖p), the χ² divergence minus the KL. Its plain gradient in the loss
    has the mean ½∇χ²(π‖p): a penalty with another divergence, which is unbounded for small p.
    """
    return torch.expm1(-d) + d
