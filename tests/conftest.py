"""One thread and reproducible examples for every test."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("keel", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("keel")
