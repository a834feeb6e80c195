"""Whether anything that is given to the doctor ends in a traceback: mutated logs, configurations, preflights.

    python bench/fuzz_doctor.py --logs 10000 --configs 10000 --preflights 100 --seed 0 --processes 2
    python bench/fuzz_doctor.py --case log:0:17          # one case again, with its traceback

A case is right if it ends in a Diagnosis (or a configuration), or in a KeelError of one line. Anything else is printed
with the command that repeats it, and its files are kept below `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

os.environ.setdefault("TQDM_DISABLE", "1")  # models are loaded hundreds of times

import yaml

import faults
import keel
from faults.base import OPERATORS
from faults.log_names import TRAINERS
from faults.log_writers import FORMATS, Log, write_log
from faults.logs import healthy_log
from faults.mutations import as_lines, as_yaml, mutate_bytes, mutate_file, mutate_rows, mutate_tree, value
from keel.base.errors import KeelError
from keel.base.files import encode
from keel.config import load_config
from keel.config.schema import Config
from keel.doctor import preflight
from keel.doctor.examine import examine

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").rglob("*.yaml"))
FAULTS = Path(faults.__path__[0])
KEEL = Path(keel.__file__).parent
SUBJECTS = 8  # healthy configurations that preflights start from; each is taught a model
LIMIT_S = {"log": 30, "config": 30, "preflight": 240}


@dataclass(frozen=True)
class Case:
    """What is tried: the same for the same name."""

    kind: str
    seed: int
    number: int

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.seed}:{self.number}"


@dataclass(frozen=True)
class Outcome:
    """How a case ended: `failure` is the last line of a traceback, where it was in Keel, and `trace` all of it."""

    case: Case
    result: str  # "diagnosis", "configuration", "refused", "failed"
    failure: str = ""
    trace: str = ""


def try_case(case: Case, folder: Path) -> Outcome:
    """Runs one case with its files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(case.name)
    try:
        with _limited(LIMIT_S[case.kind]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = KINDS[case.kind](random, folder)
    except KeelError as error:
        line = str(error)
        if line.strip() and len(line.splitlines()) == 1:
            return Outcome(case, "refused")
        return Outcome(case, "failed", f"a KeelError of {len(line.splitlines())} lines", line)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in frames if "/keel/" in frame.filename] or list(frames)
        where = f"{inside[-1].filename.rpartition('/src/')[2]}:{inside[-1].lineno} in {inside[-1].name}"
        message = " ".join(str(error).split())[:120]
        return Outcome(case, "failed", f"{type(error).__name__}: {message} ({where})", traceback.format_exc())
    return Outcome(case, result)


class NotDone(BaseException):
    """No Exception: the doctor takes those for a part's own and goes on."""


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """A case that does not come back is a failure too."""

    def stop(*_: Any) -> None:
        raise NotDone(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def _short_log(trainer: str, format: str, number: int) -> Log:
    """A healthy log or a broken one, cut to some lines: most of a case's time would go into writing long ones."""
    random = Random(f"short {trainer} {format} {number}")
    log = healthy_log(number, trainer, format)
    operators = [operator for operator in OPERATORS.values() if operator.kind == "log" and operator.fits(log)]
    if random.random() < 0.5:
        log = random.choice(operators).apply(log, random)
    count = random.choice([1, 2, 5, 12, 30, 60])
    series = {name: curve[:count] for name, curve in log.series.items()}
    return replace(log, steps=log.steps[:count], series=series, resumed=None)


def _log(random: Random, folder: Path) -> str:
    trainer = random.choice(TRAINERS)
    format = random.choice(FORMATS[trainer])
    log = _short_log(trainer, format, random.randrange(6))
    if random.random() < 0.3:
        log = _other_values(log, random)
    path = write_log(log, folder)
    if trainer == "keel":
        _other_files(path, random)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for _ in range(random.choice([1, 1, 2, 3, 5])):
        # what is logged more often than what lies beside it
        logs = [file for file in files if file.name.startswith(("metrics", "trainer_state", "events.out"))]
        mutate_file(random.choice(logs if logs and random.random() < 0.5 else files), random)
    if random.random() < 0.05:
        random.choice(files).unlink()
    diagnosis = examine(path)
    encode(diagnosis.as_dict())
    return "diagnosis"


def _other_values(log: Log, random: Random) -> Log:
    """Floats that are no usual ones, in any file, also in those that cannot be mutated as text."""
    names = random.sample(list(log.series), random.randint(1, len(log.series)))
    series = dict(log.series)
    for name in names:
        floats = [v for v in (value(random) for _ in range(20)) if isinstance(v, float)] or [1e308]
        curve = series[name].copy()
        where = range(len(curve)) if random.random() < 0.5 else random.sample(range(len(curve)), 1)
        for at in where:
            curve[at] = floats[at % len(floats)] if random.random() < 0.7 else floats[0]
        series[name] = curve
    steps = log.steps
    if random.random() < 0.3:
        steps = steps.copy()
        random.shuffle(steps)
    return replace(log, series=series, steps=steps)


def _other_files(run: Path, random: Random) -> None:
    """Files of a Keel run with lines that are almost right, or not at all."""
    lines: dict[str, dict[str, Any]] = {
        "eval.jsonl": {"step": 1, "task": "t", "split": "trained", "pass@1": 0.5, "ci95": [0.4, 0.6], "n": 9},
        "events.jsonl": {"step": 3, "kind": "rollback", "message": "text", "metrics": {"kl/policy_ref/k3/mean": 0.1}},
        "rollouts.jsonl": {
            **{"step": 1, "problem": "p", "group": 0, "prompt": "q", "completion": "a", "tokens": ["a"], "kl": [0.1]},
            **{"reward": 1.0, "parts": {"correct": 1.0}, "advantage": 0.5, "stop_reason": "eos", "action": [True]},
        },
    }
    kinds = ["rollback", "kl/final", "resume", "guard", "reward/failed", "stop", "nans", "sampler", "warmstart", "skip"]
    for name, line in lines.items():
        if random.random() < 0.5:
            continue
        rows: list[Any] = [dict(line) for _ in range(random.randint(1, 12))]
        for number, row in enumerate(rows):
            row["step"] = number
            if "kind" in row:
                row["kind"] = random.choice(kinds)
        for _ in range(random.randint(1, 4)):
            rows = mutate_rows(rows, random)
        rows = [mutate_tree(row, random) if random.random() < 0.2 else row for row in rows]
        (run / name).write_bytes(as_lines(rows))


@functools.cache
def _shipped(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@functools.cache
def _options() -> tuple[str, ...]:
    """Every option of the schema by its dotted name."""

    def leaves(prefix: str, tree: Any) -> Iterator[str]:
        if isinstance(tree, dict) and tree:
            for key, item in tree.items():
                yield from leaves(f"{prefix}{key}.", item)
        yield prefix.rstrip(".")

    return tuple(sorted(set(leaves("", Config().to_dict())) - {""}))


def _config(random: Random, folder: Path) -> str:
    source = random.choice([{}, Config().to_dict(), *(_shipped(path) for path in CONFIGS)])
    tree: Any = mutate_tree(source, random) if random.random() < 0.4 else dict(source)
    mild = random.random() < 0.5  # values that some option takes
    for _ in range(random.randint(0, 4)):
        if isinstance(tree, dict):
            tree = _with_option(tree, random.choice(_options()), random.choice(SMALL) if mild else value(random))
    data = as_yaml(tree).encode()
    if random.random() < 0.15:
        data = mutate_bytes(data, random)
    if random.random() < 0.05:
        tails = (b"\n\t- x", b"\n&a *a", b"\nkl: !!python/object:os.system {}", b"\n? [1]\n: 2", b"\n---\na: 1")
        data += random.choice(tails)
    path = folder / random.choice(["config.yaml", "config.yml", "é.yaml"])
    path.write_bytes(data)
    load_config(path, _overrides(random))
    return "configuration"


def _overrides(random: Random) -> list[str]:
    shapes = ("{}={}", "{}={}", "{}={}", "{}", "={}{}", "{}.={}", "{}..x={}", "{}.0={}", "{}=[{}", "{}={{{}", "{}s={}")
    return [
        random.choice(shapes).format(random.choice(_options()), value(random))
        for _ in range(random.choice([0, 0, 1, 2]))
    ]


def _with_option(tree: dict[str, Any], dotted: str, new: Any) -> dict[str, Any]:
    """The tree with one option set, through sections that may not be sections."""
    first, _, rest = dotted.partition(".")
    if not rest:
        return {**tree, first: new}
    section = tree.get(first)
    return {**tree, first: _with_option(section if isinstance(section, dict) else {}, rest, new)}


SMALL = (
    *(0, 1, 2, 3, 7, -1, 0.0, 1e-12, 0.3, 0.999, 1.0, 1.5, 100.0, 1e12, -0.5, 1e308, 5e-324),
    *(True, False, None, "", "none", "auto", [], {}),
)
FIXED = ("run.dir", "run.name", "model.device", "parallel", "rollout.vllm", "rollout.engine", "log", "model.name")
SLOW = ("rollout.prompts_per_step", "rollout.num_generations", "rollout.max_completion_length", "eval.samples")


def _preflight(random: Random, folder: Path) -> str:
    """A small healthy configuration with two or three options changed such that it still loads."""
    from faults.healthy import healthy

    tree = healthy(random.randrange(SUBJECTS))
    tree["run"]["dir"] = str(folder / "runs")
    config = load_config(tree)
    names = [name for name in _options() if not name.startswith((*FIXED, *SLOW))]
    left = random.choice([1, 2, 3])
    while left:
        changed = _with_option(tree, random.choice(names), random.choice(SMALL))
        with contextlib.suppress(KeelError):
            config, tree, left = load_config(changed), changed, left - 1
    (folder / "config.yaml").write_text(as_yaml(tree), encoding="utf-8")
    with _errors_of_measures() as errors:
        diagnosis = preflight.preflight(config)
    for error in errors:
        if is_keels(error):
            raise error
    encode(diagnosis.as_dict())
    return "diagnosis with a failed probe" if errors else "diagnosis"


@contextlib.contextmanager
def _errors_of_measures() -> Iterator[list[Exception]]:
    """What measures raise while this is open: a diagnosis holds one line of it."""
    errors = list[Exception]()

    def noted(run: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any) -> Any:
            try:
                return run(*arguments)
            except Exception as error:
                errors.append(error)
                raise

        return look

    measures = [replace(measure, run=noted(measure.run)) for measure in preflight.MEASURES]
    with mock.patch.object(preflight, "MEASURES", measures):
        yield errors


def is_keels(error: Exception) -> bool:
    """Whether an error is none that Keel means to raise, and comes from its own code and not from a part under test."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = [file for file in files if file.startswith((str(KEEL), str(FAULTS)))]
    return not isinstance(error, KeelError) and bool(ours) and ours[-1].startswith(str(KEEL))


KINDS = {"log": _log, "config": _config, "preflight": _preflight}


def _tried(case: Case, out: Path) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="keel-fuzz-") as folder:
        outcome = try_case(case, Path(folder))
        if outcome.result == "failed":
            target = out / case.name.replace(":", "-")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target)
            (target / "traceback.txt").write_text(outcome.trace, encoding="utf-8", errors="replace")
    return outcome


def _quiet() -> None:
    logging.disable(logging.CRITICAL)


def fuzz(cases: list[Case], processes: int, out: Path) -> list[Outcome]:
    """Every case; a line for the first of each failure."""
    _quiet()
    with contextlib.ExitStack() as stack:
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(processes, initializer=_quiet))
            results: Iterator[Outcome] = pool.imap_unordered(functools.partial(_tried, out=out), cases, chunksize=8)
        else:
            results = (_tried(case, out) for case in cases)
        outcomes, known = [], set()
        for outcome in results:
            outcomes.append(outcome)
            if outcome.failure and outcome.failure not in known:
                known.add(outcome.failure)
                print(f"{outcome.case.name}  {outcome.failure}", flush=True)
            if len(outcomes) % 1000 == 0:
                print(f"{len(outcomes)} of {len(cases)} done", flush=True)
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=int, default=0)
    parser.add_argument("--configs", type=int, default=0)
    parser.add_argument("--preflights", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "keel-fuzz-failures")
    parser.add_argument("--case", help="one case again, such as log:0:17")
    given = parser.parse_args(arguments)
    if given.case:
        kind, seed, number = given.case.split(":")
        outcome = _tried(Case(kind, int(seed), int(number)), given.out)
        print(outcome.trace or outcome.result)
        return outcome.result == "failed"
    counts = {"log": given.logs, "config": given.configs, "preflight": given.preflights}
    cases = [Case(kind, given.seed, number) for kind, count in counts.items() for number in range(count)]
    outcomes = fuzz(cases, given.processes, given.out)
    for kind, count in counts.items():
        if count:
            results = Counter(outcome.result for outcome in outcomes if outcome.case.kind == kind)
            print(
                f"{kind}: {count} tried, " + ", ".join(f"{number} {name}" for name, number in sorted(results.items()))
            )
    failures = Counter(outcome.failure for outcome in outcomes if outcome.result == "failed")
    for failure, count in failures.most_common():
        first = min(outcome.case.number for outcome in outcomes if outcome.failure == failure)
        print(f"{count:5}  {failure}  first: number {first}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
