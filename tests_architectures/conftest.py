"""The sweep's own builders stand with the tests of the models' room."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
torch.set_num_threads(1)
