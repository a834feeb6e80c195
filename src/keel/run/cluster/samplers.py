"""vLLM servers on the cluster. A lost server is restarted at the same address."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import yaml

from keel.base.errors import KeelError
from keel.config.schema import Config
from keel.envs.endpoint import SECRET
from keel.run.cluster.actor import Output
from keel.run.cluster.placement import ActorLost, Placement
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
        """Wait until it serves for the first time, or raise an error with its last line of stderr."""
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
                _note(f"{lost} and is not restarted: ray.max_restarts is {self._options.max_restarts}")
                return
            self._restarts += 1
            _note(f"{lost}; it is restarted ({self._restarts} of {self._options.max_restarts})")
            with suppress(ActorLost):
                self.start()

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
