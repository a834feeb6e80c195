"""Steps in several gloo processes: one configuration on any number of them, by an engine that no rounding moves."""

import os
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

import keel
from keel.base.types import Completion
from keel.base.world import World
from keel.config import load_config
from keel.models.fingerprint import fingerprint
from keel.models.sharding import full_tensor
from keel.rollout import Engine
from keel.run.build import build_policy, build_run
from keel.trainer.state import State
from keel.trainer.step import train_step
from processes import spawn

BASE = {
    "model": {"name": "tiny", "device": "cpu"},
    "task": {"name": "arithmetic", "skill": "sort", "digits": 3},
    "rollout": {
        "engine": "trainer.ranks:HashedEngine",
        "prompts_per_step": 5,
        "num_generations": 4,
        "max_completion_length": 9,
    },
    "kl": {"beta": 0.05},
    "optim": {"learning_rate": 1e-3, "microbatch_tokens": 96, "max_grad_norm": 0.05, "eps": 0.01},
    "rewards": [{"name": "trainer.ranks:hashed_reward"}],
    "guards": {"on_step0_kl": "warn"},  # what the engine says of its tokens is a hash
}


def digest(*parts) -> int:
    return zlib.crc32(repr(parts).encode())


def hashed_reward(problem, text):
    return digest(problem.key, text) % 7 / 7


class HashedEngine(Engine):
    """Tokens, lengths and log-probabilities that depend on the problem, the sample and the step alone."""

    def __init__(self, model, tokenizer):
        self.tokenizer = tokenizer

    def generate(self, requests, sampling, *, seed=0, attempt=0, step=0):
        def completion(request, sample):
            length = 1 + digest(request.key, sample, step) % request.limit(sampling)
            tokens = tuple(5 + digest(request.key, sample, step, i) % 60 for i in range(length))
            logp = tuple(-1.0 - digest(request.key, sample, i) % 100 / 50 for i in range(length))
            text = self.tokenizer.decode(tokens)
            return Completion(tokens, (True,) * length, logp, logp, text, "length")

        return [[completion(request, sample) for sample in request.drawn(sampling)] for request in requests]

    def sync(self, policy, version=None):
        self.version = version


def gradients(overrides, world, steps=2):
    """The clipped gradient of each update of `steps` steps, whole, their metrics, and what a process is left with.

    AdamW's eps is far above the gradients' size, so that an update follows them, and no rounding flips a sign.
    """
    torch.set_num_threads(1)
    config = load_config(BASE, overrides)
    built = build_run(config, build_policy(config), world=world)
    run, updates, state = built.run, [], State(kl=built.run.controller.init())
    update = run.optimizer.inner.step

    def recording():
        updates.append(
            {
                run.optimizer._names[p]: full_tensor(p.grad).clone()
                for p in run.optimizer.parameters
                if p.grad is not None
            }
        )
        update()

    run.optimizer.inner.step = recording
    lines = []
    for _ in range(steps):
        state, metrics, _ = train_step(run, state)
        lines.append(metrics)
    left = {"norms": state.norms, "beta": state.beta, "weights": fingerprint(run.policy.model)}
    return updates, lines, left


def training(overrides, world, *, resume=False):
    """A whole run by `keel.train`; its exit status."""
    torch.set_num_threads(1)
    quiet = {"log": {"console": "none", "tensorboard": False}, "eval": {"samples": 4, "every": 0}}
    return keel.train({**BASE, **quiet}, overrides=overrides, resume=resume).exit_status


def _process(rank, size, function, cases, folder):
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(size), str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{size}", rank=rank, world_size=size)
    try:
        for number, (overrides, options) in enumerate(cases):
            torch.save(function(overrides, World(rank, size), **options), Path(folder) / f"{size}-{number}-{rank}.pt")
    finally:
        dist.destroy_process_group()


def in_processes(size, cases, folder, function=gradients):
    """What the function gives on each process, a case (overrides, options) at a time: results[case][rank]."""
    folder.mkdir(exist_ok=True)
    spawn(_process, (size, function, cases, str(folder)), size)
    load = lambda number, rank: torch.load(Path(folder) / f"{size}-{number}-{rank}.pt", weights_only=False)  # noqa: E731
    return [[load(number, rank) for rank in range(size)] for number in range(len(cases))]


def relative_error(got, expected):
    """The largest difference of two gradients, a tensor at a time, over that tensor's largest element."""
    assert got.keys() == expected.keys()
    scale = {name: tensor.abs().max().clamp_min(1e-12) for name, tensor in expected.items()}
    return max(float((got[name] - expected[name]).abs().max() / scale[name]) for name in expected)
