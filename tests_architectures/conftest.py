"""The sweep's own builders stand with the tests of the models' room."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_DIM", "1000000")  # as in tests/conftest.py

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
torch.set_num_threads(1)
