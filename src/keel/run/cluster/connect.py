"""The one place that imports Ray and connects to a cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keel.base.errors import KeelError


def check_backend(on: str) -> None:
    """Refuse an unknown `--on`: it is `local`, `ray` or `ray:ADDRESS`."""
    kind, _, address = on.partition(":")
    if kind != "ray" and (kind != "local" or address):
        raise KeelError(f"--on {on} is not known: use local, ray or ray:ADDRESS")


@contextmanager
def connected(on: str, cores: int) -> Iterator[Any]:
    """Ray, connected to the cluster that `ray:ADDRESS` or RAY_ADDRESS names, or to one started here with `cores`."""
    try:
        import ray
    except ImportError:
        raise KeelError("--on ray needs Ray: pip install 'keel-rl[ray]'") from None
    address = on.partition(":")[2] or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {} if address else {"include_dashboard": False, "num_cpus": cores}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise KeelError(f"cannot connect to the Ray cluster {address or 'started here'}: {reason}") from None
    try:
        yield ray
    finally:
        ray.shutdown()
