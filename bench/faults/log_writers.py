"""A history of training, and the files in which each trainer would have left it."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from faults.log_names import EVALUATION, METRICS, UPDATE_METRICS, Metrics
from keel.config.schema import Config

FORMATS = {
    "keel": ("run",),
    "trl": ("state", "tensorboard", "wandb-csv", "wandb-history"),
    "verl": ("tensorboard", "jsonl", "console", "wandb-csv", "wandb-history"),
    "openrlhf": ("tensorboard", "wandb-csv", "wandb-history", "wandb-history-csv"),
    "nemo-rl": ("tensorboard", "wandb-csv", "wandb-history"),
    "prime-rl": ("jsonl", "wandb-csv", "wandb-history"),
}
RUN = "grpo-math-7b"


@dataclass(frozen=True)
class Log:
    """One run as one trainer logged it. Series are by neutral names (faults.log_names), one value a logged step."""

    trainer: str
    format: str
    options: Mapping[str, Any]
    steps: np.ndarray
    series: Mapping[str, np.ndarray]
    evaluations: Mapping[int, float] = field(default_factory=dict)  # step: held-out accuracy
    evaluated: int = 256  # held-out problems
    retention: Mapping[int, float] = field(default_factory=dict)  # a skill that is not trained; Keel's runs alone
    events: tuple[Mapping[str, Any], ...] = ()  # Keel's runs alone
    resumed: tuple[int, int] | None = None  # (last step before it stopped, step of the checkpoint it went on from)

    @property
    def options_kept(self) -> bool:
        """Whether the files say with which options the run was made."""
        return self.format in ("run", "state")


def write_log(log: Log, folder: Path) -> Path:
    """Writes the log's files below `folder`; returns the path that a user would give to the doctor."""
    folder.mkdir(parents=True, exist_ok=True)
    return _WRITERS[log.format](log, folder)


def rows_of(log: Log) -> list[Metrics]:
    """One row of the trainer's metrics a logged step, in the order in which they were written."""
    order = [int(step) for step in log.steps]
    if log.resumed is not None:  # steps past the checkpoint were logged, lost, and logged again
        stopped, checkpoint = log.resumed
        order = [step for step in order if step <= stopped] + [step for step in order if step > checkpoint]
    index = {int(step): at for at, step in enumerate(log.steps)}
    return [_row(log, index[step]) for step in order]


def _row(log: Log, at: int) -> Metrics:
    values = {name: float(series[at]) for name, series in log.series.items()}
    constants = {name: float(log.options[name]) for name in ("reward_low", "reward_high", "max_grad_norm")}
    step = int(log.steps[at])
    if log.trainer == "trl" and log.options["every"] == 1 and (step - 1) % log.options["updates"]:
        # a step of TRL is an update: those that use a batch again have nothing to say about its completions
        values = {name: value for name, value in values.items() if name in UPDATE_METRICS}
    return {"step": step, **METRICS[log.trainer]({**values, **constants, "step": float(step)})}


def _rows_with_evaluations(log: Log) -> list[Metrics]:
    """Rows, each with the evaluation that was made since the row before it."""
    rows, pending = [], dict(sorted(log.evaluations.items()))
    for row in rows_of(log):
        due = [step for step in pending if step <= row["step"]]
        for step in due:
            row = row | {EVALUATION[log.trainer]: pending.pop(step)}
        rows.append(row)
    return rows


def _run(log: Log, folder: Path) -> Path:
    run = folder / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(_keel_config(log), sort_keys=False), encoding="utf-8")
    lines = [_row(log, at) for at in range(len(log.steps))]  # a resume cuts lines past its checkpoint off
    _write_lines(run / "metrics.jsonl", [{k: _null(v) for k, v in line.items()} for line in lines])
    splits = (("trained", "math", log.evaluations), ("retention", "summaries", log.retention))
    evaluations = [
        {"step": step, "task": task, "split": split, "pass@1": value, "ci95": _wilson(value, log.evaluated)}
        | {"n": log.evaluated, "reward": value, "parsed_fraction": 1.0, "truncated_fraction": 0.0, "greedy": True}
        for split, task, curve in splits
        for step, value in sorted(curve.items())
    ]
    if evaluations:
        _write_lines(run / "eval.jsonl", evaluations)
    resumes = [{"step": log.resumed[1], "kind": "resume", "message": "resumed"}] if log.resumed else []
    _write_lines(run / "events.jsonl", [*resumes, *log.events])
    return run


def _keel_config(log: Log) -> dict[str, Any]:
    options = log.options
    config = Config().to_dict()
    config["run"] |= {"name": "run", "max_steps": options["max_steps"]}
    config["kl"] |= {"beta": options["beta"]}
    config["model"] |= {"dropout": options["dropout"]}
    config["loss"] |= {"num_iterations": options["updates"], "scale_rewards": options["scale_rewards"]}
    config["loss"] |= {"entropy_coef": options["entropy_coef"]}
    config["optim"] |= {"learning_rate": options["learning_rate"], "warmup_steps": options["warmup_steps"]}
    config["optim"] |= {"max_grad_norm": options["max_grad_norm"]}
    config["rollout"] |= {"num_generations": options["group_size"], "temperature": options["temperature"]}
    config["rollout"] |= {"max_completion_length": options["max_length"]}
    return config


class GRPOConfig:
    """Stands for TRL's class of that name in a training_args.bin: its state is all that is read of it."""

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)


def _state(log: Log, folder: Path) -> Path:
    output = folder / "trl-output"
    checkpoint = output / f"checkpoint-{int(log.steps[-1])}"
    checkpoint.mkdir(parents=True)
    history: list[Metrics] = []
    for at in range(len(log.steps)):  # the state comes back with a checkpoint: no step is there twice
        row = _row(log, at)
        history.append({**row, "epoch": row["step"] / 1000})
    for step, value in log.evaluations.items():
        history.append({EVALUATION["trl"]: value, "eval_reward": value, "eval_runtime": 31.0, "step": step})
    history.sort(key=lambda line: line["step"])
    options = log.options
    state = {"global_step": int(log.steps[-1]), "max_steps": options["max_steps"], "log_history": history}
    state |= {"logging_steps": options["every"], "is_world_process_zero": True, "best_metric": None}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": options["vocabulary"]}), encoding="utf-8")
    args = {name: options[name] for name in ("beta", "learning_rate", "max_grad_norm", "temperature", "max_steps")}
    args |= {"scale_rewards": options["scale_rewards"], "num_iterations": options["updates"], "loss_type": "dapo"}
    args |= {"steps_per_generation": 1, "num_generations": options["group_size"], "top_p": 1.0, "top_k": 0}
    args |= {"max_completion_length": options["max_length"], "disable_dropout": not options["dropout"]}
    args |= {"warmup_steps": options["warmup_steps"], "entropy_coef": options["entropy_coef"]}
    torch.save(GRPOConfig(**args), checkpoint / "training_args.bin")
    return output


def _tensorboard(log: Log, folder: Path) -> Path:
    below = {"trl": "trl-output/runs/Aug03_10-11-12_node7", "verl": f"tensorboard_log/math/{RUN}"}
    runs = folder / below.get(log.trainer, f"logs/{RUN}")
    runs.mkdir(parents=True)
    prefix = "train/" if log.trainer == "trl" else ""
    attempts: list[list[Metrics]] = [[]]
    for row in _rows_with_evaluations(log):
        if attempts[-1] and row["step"] <= attempts[-1][-1]["step"]:
            attempts.append([])  # whoever resumes opens another event file
        attempts[-1].append(row)
    for number, rows in enumerate(attempts):
        _write_events(runs / f"events.out.tfevents.{1785000000 + 5000 * number}.node7.{4711 + number}.0", rows, prefix)
    return runs


def _write_events(path: Path, rows: list[Metrics], prefix: str) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    with open(path, "wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=1785000000.0, file_version="brain.Event:2").SerializeToString())
        for row in rows:
            numbers = {name: value for name, value in row.items() if name != "step" and value is not None}
            with np.errstate(over="ignore"):
                values = [
                    Summary.Value(
                        tag=name if name.startswith(("eval", "val")) else prefix + name, simple_value=np.float32(v)
                    )
                    for name, v in numbers.items()
                ]
            event = Event(wall_time=1785000000.0 + 60 * row["step"], step=row["step"], summary=Summary(value=values))
            writer.write(event.SerializeToString())
        writer.flush()


def _jsonl(log: Log, folder: Path) -> Path:
    rows = _rows_with_evaluations(log)
    if log.trainer == "verl":  # orjson writes null for what is not finite
        lines = [{"step": row.pop("step"), "data": {k: _null(v) for k, v in row.items()}} for row in rows]
        return _write_lines(folder / f"{RUN}.jsonl", lines)
    return _write_lines(folder / "metrics.jsonl", [part for row in rows for part in _split(row, finite=True)])


def _split(row: Metrics, finite: bool) -> list[Metrics]:
    """prime-rl logs a step in several rows; its file monitor drops what is not finite."""
    groups: dict[str, Metrics] = {}
    for name, value in row.items():
        if name == "step" or (finite and _null(value) is None):
            continue
        area = name.partition("/")[0]
        groups.setdefault(area if area in ("optim", "train", "time", "perf", "eval") else "tensors", {})[name] = value
    return [{"step": row["step"], "time": 1785000000.0 + 60 * row["step"], **group} for group in groups.values()]


def _console(log: Log, folder: Path) -> Path:
    prefix = "\x1b[36m(TaskRunner pid=31337)\x1b[0m " if len(log.steps) % 2 else ""
    lines = [f"{prefix}Total training steps: {log.options['max_steps']}", "INFO 08-03 10:11:12 llm_engine.py:237] Init"]
    for row in _rows_with_evaluations(log):
        step = row.pop("step")
        pairs = [f"{name}:{value!r}" for name, value in row.items() if isinstance(value, int | float)]
        lines.append(prefix + " - ".join([f"step:{step}", *pairs]))
        if step % 7 == 0:
            lines.append(f"{prefix}Training Progress:  {step}%|█▌        | {step}/{log.options['max_steps']}")
    path = folder / "train.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _wandb_csv(log: Log, folder: Path) -> Path:
    """A chart's data as the web page exports it: three columns a line, every cell in quotes."""
    prefix = "train/" if log.trainer == "trl" else ""
    rows = _rows_with_evaluations(log)
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    header = ["train/global_step" if log.trainer == "openrlhf" else "Step"]
    for name in names:
        header += [f"{RUN} - {prefix}{name}{suffix}" for suffix in ("", "__MIN", "__MAX")]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(header)
    seen: dict[int, Metrics] = {}
    for row in rows:  # a resumed run's steps go on: the later value of a step is the one that is there
        seen[row["step"]] = row
    for step in sorted(seen):
        cells = [_cell(seen[step].get(name)) for name in names]
        writer.writerow([str(step), *(cell for cell in cells for _ in range(3))])
    path = folder / "wandb_export_2026-08-03T10_11_12.000+02_00.csv"
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def _wandb_history(log: Log, folder: Path) -> Path:
    return _write_lines(folder / "history.jsonl", _history_rows(log))


def _wandb_history_csv(log: Log, folder: Path) -> Path:
    """`run.history().to_csv()`: pandas writes its index first, without a name."""
    rows = _history_rows(log)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["", *names])
    for number, row in enumerate(rows):
        writer.writerow([number, *(_cell(row.get(name)) for name in names)])
    path = folder / "history.csv"
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def _history_rows(log: Log) -> list[Metrics]:
    """Rows of `run.scan_history()`; `_step` counts calls of wandb.log, the trainer's own step is beside it."""
    rows: list[Metrics] = []
    for row in _rows_with_evaluations(log):
        step = row.pop("step")
        stamps = {"_timestamp": 1785000000.0 + 60 * step, "_runtime": 60.0 * step}
        if log.trainer == "prime-rl":
            rows += [{**part, **stamps, "_step": 0} for part in _split({**row, "step": step}, finite=False)]
        elif log.trainer == "openrlhf":
            rows.append({**row, "train/global_step": step, "_step": 0, **stamps})
        elif log.trainer == "trl":
            named = {k if k.startswith("eval") else f"train/{k}": v for k, v in row.items()}
            rows.append({**named, "train/global_step": step, "_step": 0, **stamps})
        else:
            rows.append({**row, "_step": step, **stamps})
    if rows and rows[0]["_step"] == 0:
        rows = [row | {"_step": number} for number, row in enumerate(rows)]
    return rows


def _write_lines(path: Path, rows: list[Metrics]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity"
    return repr(value)


def _wilson(share: float, count: int) -> list[float]:
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return [max(0.0, middle - half), min(1.0, middle + half)]


_WRITERS: dict[str, Callable[[Log, Path], Path]] = {
    "run": _run,
    "state": _state,
    "tensorboard": _tensorboard,
    "jsonl": _jsonl,
    "console": _console,
    "wandb-csv": _wandb_csv,
    "wandb-history": _wandb_history,
    "wandb-history-csv": _wandb_history_csv,
}
