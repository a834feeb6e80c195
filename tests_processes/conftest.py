"""Commands in processes of their own, as users start them: launched, placed by Ray, killed, gone on with."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import torch

torch.set_num_threads(1)
