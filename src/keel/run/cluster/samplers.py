"""vLLM servers on the cluster. One that is lost is started again at its address, where the trainers look for it."""

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
from keel.rollout.vllm.client import SECRET
from keel.run.cluster.actor import Output
from keel.run.cluster.placement import ActorLost, Placement
from keel.trainer.options import RayOptions

STOP_S = 10.0  # for a server to end
TAIL = 4096  # characters of its errors that are held


@contextmanager
def serving(placement: Placement, config: Config, options: RayOptions, secret: str) -> Iterator[list[str]]:
    """The addresses of the samplers once all of them serve; they are supervised until the block ends."""
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
    """Options of `keel serve` that the configuration decides; what it leaves open is the server's own default."""
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
    """A server on the cluster and the thread that starts it again."""

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
        """Start the server, in a new actor where there is none; its port stays the same."""
        call = self._placement.call
        if self._actor is None:
            self._actor = self._placement.actor(self._index)
            self._file = call(self._actor.write, "model.yaml", self._model)
        self._port = self._port or call(self._actor.free_port, self._host)
        address = ["--host", self._host, "--port", str(self._port)]
        arguments = ["serve", self._file, *address, *self._command]
        call(self._actor.start, self._options.sampler_python, arguments, {SECRET: self._secret})

    def wait(self) -> None:
        """Until it serves for the first time; one that cannot is refused with its own last words."""
        try:
            serves = self._placement.call(self._actor.serving, self._host, self._port)
        except ActorLost:
            serves = False
        if not serves:
            raise KeelError(f"sampler {self._number} did not start: {self._end()}")
        self._supervisor.start()

    def _supervise(self) -> None:
        while True:
            reason = self._end()
            if self._closing.is_set():
                return
            lost = f"sampler {self._number} at {self.url} was lost ({reason})"
            if self._restarts == self._options.max_restarts:
                _say(f"{lost} and is not started again: ray.max_restarts is {self._options.max_restarts}")
                return
            self._restarts += 1
            _say(f"{lost}; it is started again ({self._restarts} of {self._options.max_restarts})")
            with suppress(ActorLost):
                self.start()

    def _end(self) -> str:
        """Wait for the server's end, and say how it came."""
        errors = ""
        while True:
            try:
                event = self._placement.call(self._actor.follow)
            except ActorLost:
                self._actor = None
                return "its actor has died"
            if isinstance(event, Output):
                errors = (errors + event.text)[-TAIL:] if event.stream == "stderr" else errors
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


def _say(line: str) -> None:
    sys.stderr.write(f"keel: note: {line}\n")
