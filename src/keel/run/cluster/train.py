"""`keel train --on ray`: trainer ranks and vLLM servers from one configuration.

Ranks get the environment of torchrun; their output is printed here, and they end together. A lost server is restarted
at the same address."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import yaml

from keel.base.errors import KeelError
from keel.base.watchdog import LAUNCH_FLAGS
from keel.config.schema import Config
from keel.envs.endpoint import SECRET
from keel.rollout.vllm.connection import shared_secret
from keel.run.cluster.actor import Output
from keel.run.cluster.placement import ActorLost, Placement, bundles_of, connected, reserve
from keel.trainer.options import RayOptions

STOP_S = 10.0  # seconds to wait for a server to end
STDERR_TAIL = 4096  # characters of stderr to store


@contextmanager
def serving(placement: Placement, config: Config, options: RayOptions, secret: str) -> Iterator[list[str]]:
    """Start the samplers and yield their addresses once all of them serve; supervise them until the block ends."""
    model = {"run": {"seed": config.run.seed}, "model": config.to_dict()["model"]}
    command = [f"--{name}={value}" for name, value in serve_options(config).items()]
    command += [] if config.rollout.vllm.cuda_graphs else ["--no-cuda-graphs"]
    samplers = [
        ClusterSampler(placement, number, options, yaml.safe_dump(model), command, secret)
        for number in range(options.samplers)
    ]
    try:
        for sampler in samplers:
            sampler.start()
        for sampler in samplers:
            sampler.wait()
        yield [sampler.url for sampler in samplers]
    finally:
        for sampler in samplers:
            sampler.close()


def serve_options(config: Config) -> dict[str, Any]:
    """Options of `keel serve` that the configuration sets; others keep the server's defaults."""
    vllm, lora = config.rollout.vllm, config.model.lora
    own: dict[str, Any] = {name: getattr(vllm, name) for name in ("gpu_memory_utilization", "max_model_len")}
    if vllm.tensor_parallel_size > 1:
        own["tensor_parallel_size"] = vllm.tensor_parallel_size
    if lora is not None:
        own["max_lora_rank"] = lora.r
    if config.rollout.dtype != "auto":
        own["dtype"] = config.rollout.dtype
    return {name.replace("_", "-"): value for name, value in own.items() if value is not None}


class ClusterSampler:
    """A server on the cluster and the thread that restarts it."""

    def __init__(
        self, placement: Placement, number: int, options: RayOptions, model: str, command: list[str], secret: str
    ) -> None:
        self._placement, self._number, self._options = placement, number, options
        self._model, self._command, self._secret = model, command, secret
        self._index = options.trainers + number
        self._host = placement.hosts[self._index]
        self._port, self._restarts = 0, 0
        self._actor: Any = None
        self._closing = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    def start(self) -> None:
        """Start the server, in a new actor if needed; its port stays the same."""
        call = self._placement.call
        if self._actor is None:
            self._actor = self._placement.actor(self._index)
            self._file = call(self._actor.write, "model.yaml", self._model)
        self._port = self._port or call(self._actor.free_port, self._host)
        address = ["--host", self._host, "--port", str(self._port)]
        arguments = ["serve", self._file, *address, *self._command]
        call(self._actor.start, self._options.sampler_python, arguments, {SECRET: self._secret})

    def wait(self) -> None:
        """Wait until the server first answers, or raise an error with the last line of its stderr."""
        try:
            serves = self._placement.call(self._actor.serving, self._host, self._port)
        except ActorLost:
            serves = False
        if not serves:
            raise KeelError(f"sampler {self._number} did not start: {self._exit_reason()}")
        self._supervisor.start()

    def _supervise(self) -> None:
        while True:
            reason = self._exit_reason()
            if self._closing.is_set():
                return
            lost = f"sampler {self._number} at {self.url} was lost ({reason})"
            if self._restarts == self._options.max_restarts:
                _note(f"{lost} and is not restarted, because ray.max_restarts is {self._options.max_restarts}")
                return
            self._restarts += 1
            _note(f"{lost}; it is restarted ({self._restarts} of {self._options.max_restarts})")
            try:
                self.start()
            except ActorLost:  # the next round waits for its end and counts it
                continue
            except KeelError as error:
                _note(f"sampler {self._number} at {self.url} cannot be restarted: {error}")
                return

    def _exit_reason(self) -> str:
        """Wait for the server's end and return the reason."""
        errors = ""
        while True:
            try:
                event = self._placement.call(self._actor.follow)
            except ActorLost:
                self._actor = None
                return "its actor has died"
            if isinstance(event, Output):
                errors = (errors + event.text)[-STDERR_TAIL:] if event.stream == "stderr" else errors
            elif event < 0:
                return f"ended by {signal.Signals(-event).name}"
            else:
                last = errors.strip().splitlines()[-1:]
                return " ".join([f"exit status {event}:", *last]).removesuffix(":").replace("keel: error: ", "")

    def close(self) -> None:
        """End the server."""
        self._closing.set()
        if self._actor is not None and self._supervisor.is_alive():
            with suppress(ActorLost):
                self._placement.call(self._actor.signal, signal.SIGTERM)
            self._supervisor.join(STOP_S)


def _note(line: str) -> None:
    sys.stderr.write(f"keel: note: {line}\n")


GRACE_S = 20.0  # seconds for ranks to end by themselves after one failed
POLL_S = 0.2
STREAMS = {"stdout": lambda: sys.stdout, "stderr": lambda: sys.stderr}


def server_overrides(*urls: str) -> list[str]:
    """Overrides that make the run sample from vLLM servers."""
    return ["rollout.engine=vllm", "rollout.vllm.mode=server", f"rollout.vllm.url=[{', '.join(urls)}]"]


def train_on_ray(on: str, arguments: Sequence[str], config: Config) -> dict[int, int]:
    """Run `keel ARGUMENTS` as ranks on the cluster; returns exit statuses by rank, ordered by time."""
    options = config.ray or RayOptions()
    given = config.rollout.vllm.secret
    secret = shared_secret(given) if given else secrets.token_urlsafe(24)
    with connected(on, os.cpu_count() or 1) as ray:
        placement = reserve(ray, bundles_of(config, options, ray.cluster_resources()))
        with serving(placement, config, options, secret) as urls:
            overrides = [f"ray.trainers={options.trainers}", f"ray.samplers={options.samplers}"]
            if urls:
                sys.stderr.write(f"keel: note: Ray has started the run; vLLM samples at {', '.join(urls)}\n")
                overrides += server_overrides(*urls)
            environment = {SECRET: secret, LAUNCH_FLAGS: f"--on {on}"}
            return run_ranks(placement, options.trainers, [*arguments, *overrides], environment)


def run_ranks(
    placement: Placement, size: int, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[int, int]:
    """Run `keel ARGUMENTS` in `size` ranks; returns exit statuses (-9 after kill -9) by rank, ordered by time."""
    actors = dict(enumerate(_start(placement, size, arguments, environment)))
    events: queue.Queue[tuple[int, Output | int]] = queue.Queue()
    for rank, actor in actors.items():
        threading.Thread(target=_follow, args=(placement, rank, actor, events), daemon=True).start()
    exits: dict[int, int] = {}
    escalation: Iterator[int] | None = None
    with _signals() as received:
        while len(exits) < size:
            running = [actor for rank, actor in actors.items() if rank not in exits]
            while received:
                _send(placement, running, received.pop(0))
            if any(exits.values()):
                escalation = escalation or _escalation()
                if number := next(escalation, 0):
                    _send(placement, running, number)
            with suppress(queue.Empty):
                rank, event = events.get(timeout=POLL_S)
                if isinstance(event, Output):
                    stream = STREAMS[event.stream]()
                    stream.write(event.text)
                    stream.flush()
                else:
                    exits[rank] = event
    return exits


def _start(placement: Placement, size: int, arguments: Sequence[str], environment: Mapping[str, str]) -> list[Any]:
    """Start actors by rank with torchrun's variables; ranks of a node are consecutive and share its devices."""
    order = sorted(range(size), key=lambda index: placement.addresses[index])
    nodes = [placement.addresses[index] for index in order]
    actors = [placement.actor(index) for index in order]
    devices = [placement.call(actor.devices) for actor in actors]
    host = placement.hosts[order[0]]
    master = {"MASTER_ADDR": host, "MASTER_PORT": str(placement.call(actors[0].free_port, host))}
    local = Counter[str]()
    for rank, (node, actor) in enumerate(zip(nodes, actors, strict=True)):
        variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local[node], "LOCAL_WORLD_SIZE": nodes.count(node)}
        world = {**{name: str(value) for name, value in variables.items()}, **master} if size > 1 else {}
        if visible := [own for own, other in zip(devices, nodes, strict=True) if other == node and own]:
            world["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        local[node] += 1
        placement.call(actor.start, None, list(arguments), {**environment, **world})
    return actors


def _follow(placement: Placement, rank: int, actor: Any, events: queue.Queue[tuple[int, Output | int]]) -> None:
    event: Output | int | None = None
    while not isinstance(event, int):
        try:
            event = placement.call(actor.follow)
        except ActorLost:
            event = -signal.SIGKILL
        events.put((rank, event))


def _send(placement: Placement, actors: Sequence[Any], number: int) -> None:
    for actor in actors:
        with suppress(ActorLost):
            placement.call(actor.signal, number)


def _escalation() -> Iterator[int]:
    """Signals for the ranks that still run after one failed: 0 (none) at first, then SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            yield 0
        yield number


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM, which are forwarded to the ranks, so that they save and exit."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
