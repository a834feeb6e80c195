"""Keel and the packages whose environments it takes: `make test-envs`. Without them these tests fail."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["KEEL_WARMSTART_CACHE"] = "0"

import torch

torch.set_num_threads(1)
