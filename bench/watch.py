"""What `keel watch` costs on a long run, in CPU time of the server's process.

python bench/watch.py [--steps 2000]

A run of so many steps, with every metric that the report draws, is written into a temporary folder; a page is opened,
asks while nothing happens, and asks after single new steps.
"""

from __future__ import annotations

import argparse
import http.client
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from keel.lab.report.panels import KL_KINDS, PANELS
from keel.lab.watch.page import Watcher
from keel.lab.watch.serve import listen, served
from keel.loggers import JsonlLogger, RunDirectory

METRICS = [metric for _, _, _, names in PANELS for metric, _ in names]
METRICS += [f"kl/policy_ref/{kind}/{figure}" for kind in KL_KINDS for figure in ("mean", "se", "min", "max", "p95")]
POLLS, NEW_STEPS = 200, 5


def line(noise: random.Random) -> dict[str, float]:
    """One step's metrics: that they mean nothing changes no cost."""
    return {name: noise.random() for name in METRICS}


def cpu_ms(work: Callable[[], object], times: int = 1) -> float:
    """Milliseconds of this process's CPU time that `work` takes."""
    began = time.process_time()
    for _ in range(times):
        work()
    return 1000 * (time.process_time() - began) / times


def measure(run: RunDirectory, steps: int) -> None:
    """Print a line for each kind of request."""
    log, noise, now = JsonlLogger(run), random.Random(0), [0.0]
    run.write_text("config.yaml", f"run: {{name: long, max_steps: {2 * steps}}}\n")
    for step in range(1, steps + 1):
        log.step(step, line(noise))
    watcher, listener = Watcher([run.path], lambda: now[0]), listen(0)

    def ask(path: str, etag: str = "") -> tuple[str, int]:
        connection = http.client.HTTPConnection("127.0.0.1", listener.getsockname()[1])
        connection.request("GET", path, headers={"Accept-Encoding": "gzip", "If-None-Match": etag})
        answer = connection.getresponse()
        return str(answer.getheader("ETag")), len(answer.read())

    size = (run.path / "metrics.jsonl").stat().st_size / 2**20
    print(f"{steps} steps, {len(METRICS)} metrics, {size:.1f} MiB of metrics.jsonl")
    with served(watcher, listener):
        print(f"first page: {cpu_ms(lambda: ask('/')):.0f} ms, {ask('/')[1] / 1024:.0f} KiB sent")
        etag, _ = ask("/state")
        idle = cpu_ms(lambda: ask("/state", etag), POLLS)
        print(f"poll, nothing new: {idle:.2f} ms, {ask('/state', etag)[1]} bytes sent")
        watcher.judge()  # loads the doctor
        drawing, judging, sent = [], [], 0
        for step in range(steps + 1, steps + NEW_STEPS + 1):
            log.step(step, line(noise))
            now[0] += 1000.0
            drawing.append(cpu_ms(lambda: ask("/state")))
            sent = ask("/section/curves")[1]
            judging.append(cpu_ms(watcher.judge))
    print(f"poll, a new step: {sum(drawing) / NEW_STEPS:.0f} ms, {sent / 1024:.0f} KiB of curves sent")
    print(f"the doctor on the log: {sum(judging) / NEW_STEPS:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder, RunDirectory.create(Path(folder) / "long") as run:
        measure(run, steps)


if __name__ == "__main__":
    main()
