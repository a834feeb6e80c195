"""One thread, no set-up for matrices this small, and reproducible examples for every test."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start, too
os.environ["KEEL_WARMSTART_CACHE"] = "0"  # a test makes what it tests, and leaves the user's cache alone
# oneDNN sets itself up for every new shape, which takes longer than multiplying the matrices of tests; BLAS does not.
os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_DIM", "1000000")

# What bench/ makes for a test is this session's own: a cache of another checkout would be read in its place.
if "KEEL_BENCH_CACHE" not in os.environ:
    os.environ["KEEL_BENCH_CACHE"] = tempfile.mkdtemp(prefix="keel-bench-tests-")
    atexit.register(shutil.rmtree, os.environ["KEEL_BENCH_CACHE"], ignore_errors=True)
# As in an activated environment: messages that say what to type then say `keel`, not its path.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("keel", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("keel")


def _checked(file: Any) -> None:
    """The file is open; no test waits for the disk, since none cuts the power."""
    os.fstat(file if isinstance(file, int) else file.fileno())


os.fsync = _checked
gc.disable()  # thousands of tests are collected, and none of them is garbage


def pytest_collection_finish() -> None:
    """From here on what was collected and imported is not looked through again."""
    gc.freeze()
    gc.enable()
