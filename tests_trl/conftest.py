"""The larger matrix of Keel inside TRL, and several processes: `make test-trl`."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import torch

torch.set_num_threads(1)
