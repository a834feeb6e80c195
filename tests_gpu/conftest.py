"""These tests need a CUDA device: `make test-gpu`. Without one they fail rather than be skipped."""

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_matmuls():
    """fp32 without TF32, so that equality can be asked for."""
    assert torch.cuda.is_available(), "no CUDA device: run `make test` instead"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
