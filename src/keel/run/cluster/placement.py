"""Connect to a Ray cluster, and place trainers and samplers on it in one placement group."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from keel.base.errors import KeelError
from keel.config.schema import Config
from keel.run.cluster.actor import ProcessActor
from keel.trainer.options import RayOptions


def check_backend(on: str) -> None:
    """Refuse an unknown `--on`: it is `local`, `ray` or `ray:ADDRESS`."""
    kind, _, address = on.partition(":")
    if kind != "ray" and (kind != "local" or address):
        raise KeelError(f"--on {on} is not known: use local, ray or ray:ADDRESS")


@contextmanager
def connected(on: str, cores: int) -> Iterator[Any]:
    """Connect to the cluster of `ray:ADDRESS` or RAY_ADDRESS, or start one here with `cores`; yield the module ray."""
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


WAIT_S = 30  # seconds to wait for resources that are in use
LOOPBACK = "127.0.0.1"
ADVICE = (
    "request fewer resources (ray.trainers, ray.samplers, ray.trainer_cpus, ray.sampler_cpus, model.device=cpu), or "
    "use a larger cluster with --on ray:ADDRESS"
)

Bundle = Mapping[str, float]


class ActorLost(Exception):
    """An actor or its node has died."""


class Placement(NamedTuple):
    """The reserved bundles, one per process (trainers, then samplers), and the node address of each."""

    ray: Any
    group: Any
    bundles: Sequence[Bundle]
    addresses: Sequence[str]

    @property
    def hosts(self) -> Sequence[str]:
        """The host of each process: loopback if all are on one node."""
        return [LOOPBACK] * len(self.addresses) if len(set(self.addresses)) == 1 else self.addresses

    def actor(self, index: int) -> Any:
        """Create an actor in a bundle; its calls run concurrently."""
        in_bundle = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        strategy = in_bundle(self.group, placement_group_bundle_index=index)
        bundle = self.bundles[index]
        resources = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        actor = self.ray.remote(ProcessActor).options(**resources, max_concurrency=4, scheduling_strategy=strategy)
        return actor.remote(dict(os.environ), os.getcwd())

    def call(self, method: Any, *arguments: Any) -> Any:
        """The result of an actor's method."""
        try:
            return self.ray.get(method.remote(*arguments))
        except self.ray.exceptions.RayActorError as error:
            raise ActorLost from error
        except OSError as error:  # raised by `start` in the actor
            reason = getattr(error, "cause", error)
            raise KeelError(
                f"a node of Ray cannot start a process: {reason}; every node needs the Python interpreter and the "
                "working folder of this command under the same paths"
            ) from None


def bundles_of(config: Config, options: RayOptions, cluster: Mapping[str, float]) -> Sequence[Bundle]:
    """Resources of each process. GPUs are requested if the configuration names them or the cluster has GPUs."""
    device = config.model.device
    cuda = device.startswith("cuda") or (device != "cpu" and cluster.get("GPU", 0) > 0)
    trainer, sampler = {"CPU": options.trainer_cpus}, {"CPU": options.sampler_cpus}
    if cuda:
        trainer["GPU"], sampler["GPU"] = 1, config.rollout.vllm.tensor_parallel_size
    return [trainer] * options.trainers + [sampler] * options.samplers


def reserve(ray: Any, bundles: Sequence[Bundle]) -> Placement:
    """Reserve all bundles on as few nodes as possible, or raise an error."""
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    total = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}
    cluster = ray.cluster_resources()
    too_much = (
        f"Ray cannot place this run: it requests {_amounts(total, names)}, and the cluster has "
        f"{_amounts(cluster, names)}"
    )
    if any(cluster.get(name, 0) < count for name, count in total.items()):
        raise KeelError(f"{too_much}: {ADVICE}")
    group = ray.util.placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    if not group.wait(WAIT_S):
        free = _amounts(ray.available_resources(), names)
        ray.util.remove_placement_group(group)
        raise KeelError(f"{too_much}, of which {free} are free, or no node has room for a process: {ADVICE}")
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return Placement(ray, group, bundles, [addresses[nodes[index]] for index in range(len(bundles))])


def _amounts(resources: Mapping[str, float], names: Mapping[str, None]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)
