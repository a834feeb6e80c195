"""The reversed k3, a common mistake in tutorials, for a study of its effect."""

from __future__ import annotations

import torch
from torch import Tensor


def reversed_k3(d: Tensor) -> Tensor:
    """e^u − u − 1 with u = log π − log p = −d: k3 with its arguments swapped, on samples from the wrong side.

    On samples from π its mean is Σ π²/p − 1 − KL(π‖p), the χ² divergence less the KL, and its plain gradient in the
    loss has the mean ½∇χ²(π‖p): a penalty, but of another divergence, and without bound where p is small.
    """
    return torch.expm1(-d) + d
