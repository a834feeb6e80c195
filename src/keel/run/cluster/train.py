"""`keel train --on ray`: trainer ranks and vLLM servers from one configuration."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence

from keel.base.alive import LAUNCH_FLAGS
from keel.config.schema import Config
from keel.rollout.vllm.client import SECRET, shared_secret
from keel.run.cluster.connect import connected
from keel.run.cluster.placement import bundles_of, place
from keel.run.cluster.ranks import run_ranks
from keel.run.cluster.samplers import serving
from keel.trainer.options import RayOptions


def by_servers(*urls: str) -> list[str]:
    """The options of a training that samples by servers."""
    return ["rollout.engine=vllm", "rollout.vllm.mode=server", f"rollout.vllm.url=[{', '.join(urls)}]"]


def train_on_ray(on: str, arguments: Sequence[str], config: Config) -> dict[int, int]:
    """Run `keel ARGUMENTS` as ranks on the cluster; their exit statuses in the order in which they ended."""
    options = config.ray or RayOptions()
    given = config.rollout.vllm.secret
    secret = shared_secret(given) if given else secrets.token_urlsafe(24)
    with connected(on, os.cpu_count() or 1) as ray:
        placement = place(ray, bundles_of(config, options, ray.cluster_resources()))
        with serving(placement, config, options, secret) as urls:
            overrides = [f"ray.trainers={options.trainers}", f"ray.samplers={options.samplers}"]
            if urls:
                sys.stderr.write(f"keel: note: placed by Ray, sampling by vLLM at {', '.join(urls)}\n")
                overrides += by_servers(*urls)
            environment = {SECRET: secret, LAUNCH_FLAGS: f"--on {on}"}
            return run_ranks(placement, options.trainers, [*arguments, *overrides], environment)
