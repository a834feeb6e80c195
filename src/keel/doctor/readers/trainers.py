"""Readers of the run directory of Keel and of TRL's output folder."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import parse_json, read_json
from keel.doctor.history import KL_NAMES, History, Record, series_of
from keel.doctor.names import keel_options, renamed
from keel.doctor.runs import RunRecord, number, read_run
from keel.loggers import rundir


def is_keel_run(path: Path) -> bool:
    """Whether a folder contains Keel's files."""
    return path.is_dir() and ((path / rundir.METRICS).is_file() or (path / rundir.EVENTS).is_file())


def read_keel_run(path: Path) -> History:
    """The history of a run. If a rollback repeated a step, the last attempt is used."""
    return history_of(read_run(path))


def history_of(run: RunRecord) -> History:
    """The history of a run that is already read."""
    lines, again = _last_attempt(run.metrics)
    notes = [f"read {len(lines)} steps of Keel's run {run.path}{'; it is still running' if run.running else ''}"]
    if again:
        notes.append(f"{again} step lines belong to attempts that were rolled back; only the last attempt is checked")
    notes += _abandoned(run)
    return History(
        source="keel",
        path=run.path,
        series=series_of(lines),
        config=run.config,
        events=run.events,
        evaluations=run.evaluations,
        rollouts=run.rollouts,
        vocabulary=_vocabulary(run),
        running=run.running,
        missing=run.missing,
        notes=tuple(notes),
    )


def _last_attempt(lines: Iterable[Record]) -> tuple[list[Record], int]:
    """(the lines of the final attempt, the number of others). A repeated step removes the lines from that step on."""
    current: list[Record] = []
    dropped = 0
    for line in lines:
        step = number(line.get("step")) or 0.0
        while current and (number(current[-1].get("step")) or 0.0) >= step:
            current.pop()
            dropped += 1
        current.append(line)
    return current, dropped


def _abandoned(run: RunRecord) -> list[str]:
    """One line per attempt that a rollback abandoned: its steps and its KL."""
    notes = []
    for name, lines in run.abandoned:
        series = series_of(lines)
        kl = next((series[name] for name in KL_NAMES if name in series and len(series[name].finite)), None)
        steps = series.get("reward/mean") or kl
        reached = f"; KL had reached {kl.top()[1]:.3g} nats per token" if kl is not None else ""
        notes.append(f"{name.replace(' ', '-')} was abandoned after {steps.span if steps else 'no step'}{reached}")
    return notes


def _vocabulary(run: RunRecord) -> int | None:
    """The vocabulary size from the config.json of the newest checkpoint."""
    configs = sorted((run.path / rundir.CHECKPOINTS).glob("step-*/**/config.json"))
    return vocabulary_of(configs[-1]) if configs else None


def vocabulary_of(path: Path) -> int | None:
    """vocab_size of a Hugging Face config.json, or that of the text part of a composite model."""
    data = read_json(path)
    if not isinstance(data, dict):
        return None
    inner = data.get("text_config")
    size = number(data.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None))
    return int(size) if size is not None and math.isfinite(size) and size > 1 else None


# ------------------------------------------------------------------------ TRL

STATE = "trainer_state.json"


def state_files(path: Path) -> list[Path]:
    """The state file of the folder itself, then those of its checkpoints, the newest first."""
    top = [path / STATE] if (path / STATE).is_file() else []
    numbered = sorted(path.glob(f"checkpoint-*/{STATE}"), key=_number, reverse=True)
    return [*top, *numbered]


def read_trl(path: Path) -> History:
    """The log history of the state with the most steps. `path` may also be a file `trainer_state.json`."""
    paths = [path] if path.is_file() else state_files(path)
    states = [(file, _state(file)) for file in paths]
    file, state = max(states, key=lambda pair: _step(pair[1]), default=(path, {}))
    history = state.get("log_history")
    log = [line for line in history if isinstance(line, dict)] if isinstance(history, list) else []
    lines = [line for line in log if not any(key.startswith(("eval_", "train_runtime")) for key in line)]
    if not lines:
        raise KeelError(f"{file} has no log_history with training steps: train with logging_steps=1 and save the state")
    held_out = [line for line in log if any(key.startswith("eval_") for key in line)]
    logged = series_of([{k: v for k, v in line.items() if k != "epoch"} for line in lines]) | series_of(
        [{k: v for k, v in line.items() if k == "step" or k.startswith("eval_")} for line in held_out]
    )
    series, unused = renamed(logged, {}, "TRL")
    folder = file.parent
    options, options_from = _options(folder)
    every = lines[0].get("step")
    notes = [f"read {len(lines)} logged steps of TRL's {file}"]
    if isinstance(every, int) and every > 1:
        notes.append(f"TRL logged every {every} steps, so each value is a mean over these steps")
    if options_from is not None:
        notes.append(f"options from {options_from}, read without running it")
    if unused:
        notes.append(f"not used: {', '.join(sorted(unused))}")
    missing = [] if options_from else [f"no training_args.bin beside {file}: the options are unknown"]
    missing.append("TRL writes no rollouts and no events, so rewards of single completions cannot be checked")
    config_files = [folder / "config.json", *sorted(path.glob("checkpoint-*/config.json") if path.is_dir() else [])]
    sizes = [size for file in config_files if (size := vocabulary_of(file)) is not None]
    return History(
        source="TRL",
        path=path,
        series=series,
        config=options,
        vocabulary=sizes[-1] if sizes else None,
        missing=tuple(missing),
        notes=tuple(notes),
    )


def _options(folder: Path) -> tuple[dict[str, Any], Path | None]:
    for file in (folder / "training_args.bin", folder.parent / "training_args.bin"):
        args = read_training_args(file)
        if not args:
            continue
        return keel_options("TRL", args), file
    return {}, None


def _state(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise KeelError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise KeelError(f"{path} is not a trainer state: it must be an object with log_history")
    return data


def _step(state: dict[str, Any]) -> int:
    value = state.get("global_step", 0)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(path: Path) -> int:
    digits = path.parent.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdigit() else -1


# Read the options in `training_args.bin`, a zip with a pickle. Unpickling normally calls functions named in the file.
# Here every name becomes a stub that does nothing, so the result is the plain state of the outer object.


class _Stub:
    """A stub for every class and function in the file. It keeps arguments and state and does nothing."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **fields: Any) -> _Stub:  # a pickle may create objects without calling __init__
        stub = super().__new__(cls)
        stub.args, stub.state = args, {}
        return stub

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class _StubUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Stub

    def persistent_load(self, pid: Any) -> Any:
        return None


def read_training_args(path: Path) -> dict[str, Any]:
    """Option → value (numbers, words, lists; enums by value); empty if the file cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as file:
                outer = _StubUnpickler(file).load()
    except Exception:  # the file may be anything, and a pickle can fail in any way
        return {}
    state = outer.state if isinstance(outer, _Stub) else outer
    return {str(key): _plain(value) for key, value in state.items()} if isinstance(state, dict) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, _Stub):
        return value.args[0] if len(value.args) == 1 and isinstance(value.args[0], str | int | float) else None
    return value
