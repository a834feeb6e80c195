"""Keel and the package verifiers: `make test-verifiers`. Without it these tests fail."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["KEEL_WARMSTART_CACHE"] = "0"

HERE = Path(__file__).resolve().parent
FOLDERS = [str(HERE), str(HERE.parent / "examples")]
sys.path[:0] = FOLDERS
# Servers of tools are processes of their own.
os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])

import torch  # noqa: E402

torch.set_num_threads(1)
