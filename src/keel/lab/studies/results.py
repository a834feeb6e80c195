"""The folder of a study, and the results of its runs: accuracy, reward, KL, skills, outcome."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import encode, one_line_errors, read_json, write_atomic
from keel.base.redact import masked
from keel.config import Config, load_config
from keel.doctor.runs import RunRecord, number, read_run
from keel.lab.studies.grid import Measurements, Point, Study, fingerprint
from keel.loggers.rundir import RunLock

STUDY, POINTS, WARMSTARTS = "study.json", "points", "starts"
LOG, OUTCOME, DRIFT = "log.txt", "outcome.json", "drift.json"
CONFIG = "KEEL_STUDY_CONFIG"  # the variable that holds a run's configuration
DONE, STOPPED, FAILED, INTERRUPTED = "done", "stopped", "failed", "interrupted"


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: a point under a seed, and the folder of its run."""

    point: Point
    seed: int
    folder: Path
    config: Config

    @property
    def label(self) -> str:
        return f"{self.point.label} seed={self.seed}"


@dataclass(frozen=True)
class JobOutcome:
    """How a run ended (done, stopped by a guard, or failed) and the reason."""

    state: str
    reason: str = ""


def digest(study: Study) -> str:
    """A hash of everything that determines the runs; baseline and metric only affect the report."""
    inputs = {
        "config": fingerprint(study.config),
        "points": [[point.label, fingerprint(point.config)] for point in study.points],
        "seeds": study.seeds,
        "measure": asdict(study.measure),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def open_folder(path: Path, study: Study, threads: int) -> Iterator[int]:
    """Lock the study's folder and yield the number of threads per run.

    Float sums depend on the number of threads, so a study keeps the number of its first start.
    """
    with one_line_errors(f"cannot create {path}"):
        path.mkdir(parents=True, exist_ok=True)
    lock = RunLock(path / ".lock")
    try:
        yield _claim(path, study, threads)
    finally:
        lock.release()


def _claim(path: Path, study: Study, threads: int) -> int:
    record, study_digest = path / STUDY, digest(study)
    if record.exists():
        try:
            stored = json.loads(record.read_text(encoding="utf-8"))
            stored_digest, stored_threads = stored["digest"], int(stored["threads"])
        except (ValueError, KeyError, TypeError):
            raise KeelError(f"{record} cannot be read: restore it, or choose another --out") from None
        if stored_digest != study_digest:
            raise KeelError(
                f"{path} contains another study ({_difference(stored, study)}): choose another --out, or delete it"
            )
        return stored_threads
    others = [item.name for item in path.iterdir() if item.name != ".lock"]
    if others:
        raise KeelError(f"{path} is not empty and is not a study ({sorted(others)[0]}): choose another --out")
    write_atomic(record, encode(_record(study, study_digest, threads), indent=2) + "\n")
    return threads


def _record(study: Study, study_digest: str, threads: int) -> dict[str, Any]:
    return {
        "digest": study_digest,
        "name": study.name,
        "seeds": list(study.seeds),
        "points": [{"label": point.label, "settings": masked(dict(point.settings))} for point in study.points],
        "measure": asdict(study.measure),
        "threads": threads,
        "config": masked(study.config.to_dict()),
    }


def _difference(stored: dict[str, Any], study: Study) -> str:
    """The first difference between two definitions: seeds, points or configuration."""
    current = _record(study, "", 0)
    if stored.get("seeds") != current["seeds"]:
        return f"its seeds are {', '.join(map(str, stored.get('seeds', [])))}"
    labels, current_labels = ([p.get("label") for p in record.get("points", [])] for record in (stored, current))
    if labels != current_labels:
        return f"its points are {', '.join(map(str, labels))}"
    return "its configuration differs"


def jobs(path: Path, study: Study) -> list[StudyRun]:
    """Every run, seed by seed within a point, in the order of the grid."""
    planned = []
    for index, point in enumerate(study.points):
        for seed in study.seeds:
            slug = re.sub(r"[^A-Za-z0-9.=_+-]+", "-", point.label)[:80].strip("-")
            name = f"{index:02d}-{slug}-seed{seed}"
            identity = [f"run.seed={seed}", f"run.dir={json.dumps(str(path / POINTS))}", f"run.name={json.dumps(name)}"]
            settings = [*identity, "run.if_exists=resume", "log.console=plain"]
            planned.append(StudyRun(point, seed, path / POINTS / name, load_config(point.config, settings)))
    return planned


def finished_outcome(job: StudyRun) -> JobOutcome | None:
    """The outcome of a finished run, or None if it must be run, resumed or retried."""
    written = read_outcome(job.folder)
    if written is None or written.state not in (DONE, STOPPED):
        return None
    try:
        same = fingerprint(load_config(job.folder / "config.yaml")) == fingerprint(job.config)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return written if same else None


def read_outcome(folder: Path) -> JobOutcome | None:
    """The outcome that a run has written, if any."""
    written = read_json(folder / OUTCOME)
    return JobOutcome(**written) if isinstance(written, dict) and set(written) == {"state", "reason"} else None


def write_outcome(folder: Path, outcome: JobOutcome) -> None:
    """Write the outcome, after all other files of a finished run."""
    write_atomic(folder / OUTCOME, encode(asdict(outcome), indent=2) + "\n")


LAST_STEPS = 10  # number of last steps averaged for the reward
BAND = 1.5  # the band around a target KL is target/1.5 to 1.5·target, as in PPO's rule


@dataclass(frozen=True)
class SkillResult:
    """One retention task: accuracy before and after, and the KL on its prompts in both directions."""

    before: float | None
    after: float | None
    kl_policy_ref: float | None
    kl_ref_policy: float | None


@dataclass(frozen=True)
class RunResult:
    """A run's figures; None if missing. KL is in nats per token, or per sequence if the name contains `sequence`."""

    point: str
    seed: int
    state: str
    reason: str
    options: Mapping[str, str]
    figures: Mapping[str, float | None]
    skills: Mapping[str, SkillResult] = field(default_factory=dict)
    wall_s: float | None = None
    curves: Mapping[str, Sequence[tuple[float, float | None]]] = field(default_factory=dict)
    band_by: str = ""  # the estimate that was compared with the band


FIGURES = (
    "steps",
    "accuracy_before",
    "accuracy_after",
    "accuracy_change",
    "reward",
    "kl_policy_ref",
    "kl_ref_policy",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_sequence",
    "kl_reference_exact",
    "kl_reference_k3",
    "beta_last",
    "retention_before",
    "retention_after",
    "retention_change",
    "forgetting",
    "kl_old_policy_ref",
    "kl_old_ref_policy",
    "text_logprob_before",
    "text_logprob_after",
    "text_logprob_change",
    "steps_to_band",
    "share_in_band",
)
REWARD_CURVE, EXACT_CURVE, K3_CURVE = "reward/mean", "kl/policy_ref/exact/mean", "kl/policy_ref/k3/mean"
SEQUENCE_CURVE = "kl/policy_ref/sequence/mean"
CURVES = (REWARD_CURVE, EXACT_CURVE, K3_CURVE, "kl/beta")


def kl_curve(rows: Sequence[RunResult]) -> str:
    """The KL for comparable curves: exact if every run has it, otherwise k3, which all have."""
    measured = [row.curves for row in rows if K3_CURVE in row.curves]
    return EXACT_CURVE if measured and all(EXACT_CURVE in curves for curves in measured) else K3_CURVE


def read_result(job: StudyRun, outcome: JobOutcome, measure: Measurements) -> RunResult:
    """The figures of a run that its files contain."""
    options = dict(job.point.values)
    try:
        run = read_run(job.folder)
    except KeelError:
        return RunResult(job.point.label, job.seed, outcome.state, outcome.reason, options, dict.fromkeys(FIGURES))
    drift = _drift(job.folder)
    skills, trained = _skills(run, drift), _trained_drift(drift)
    first, last = _accuracy(run, "trained")
    text = drift.get("text_logprob") or {}
    before, after = (_mean(getattr(skill, side) for skill in skills.values()) for side in ("before", "after"))
    rewards = [value for _, value in run.series(REWARD_CURVE)[-LAST_STEPS:] if value is not None]
    band_by, band = _band(run, measure)
    figures: dict[str, float | None] = {
        "steps": float(run.steps),
        "accuracy_before": first.get(""),
        "accuracy_after": last.get(""),
        "reward": fmean(rewards) if rewards else None,
        "kl_policy_ref": _figure(trained, "policy_ref", "exact"),
        "kl_ref_policy": _figure(trained, "ref_policy", "exact"),
        **{f"kl_{name}": _figure(trained, "policy_ref", name) for name in ("k1", "k2", "k3")},
        "kl_sequence": _figure(trained, "policy_ref", "exact", "per_sequence"),
        "kl_reference_exact": run.last(EXACT_CURVE),
        "kl_reference_k3": run.last(K3_CURVE),
        "beta_last": run.last("kl/beta"),
        "retention_before": before,
        "retention_after": after,
        "forgetting": None if before is None or after is None else before - after,
        "kl_old_policy_ref": _mean(skill.kl_policy_ref for skill in skills.values()),
        "kl_old_ref_policy": _mean(skill.kl_ref_policy for skill in skills.values()),
        "text_logprob_before": number(text.get("before")),
        "text_logprob_after": number(text.get("after")),
        **band,
    }
    wall = number((run.summary or {}).get("wall_s"))
    curves = {name: run.series(name) for name in CURVES if run.series(name)}
    return RunResult(
        job.point.label, job.seed, outcome.state, outcome.reason, options, figures, skills, wall, curves, band_by
    )


def _drift(folder: Path) -> dict[str, Any]:
    measured = read_json(folder / DRIFT)
    return measured if isinstance(measured, dict) else {}


def _tasks(drift: Mapping[str, Any], split: str) -> dict[str, Mapping[str, Any]]:
    tasks = drift.get("tasks") or {}
    return {name: task for name, task in tasks.items() if task.get("split") == split}


def _trained_drift(drift: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(_tasks(drift, "trained").values()), {})


def _figure(task: Mapping[str, Any], direction: str, estimator: str, unit: str = "per_token") -> float | None:
    try:
        return number(task[direction][unit][estimator]["mean"])
    except (KeyError, TypeError):
        return None


def _accuracy(run: RunRecord, split: str) -> tuple[dict[str, float], dict[str, float]]:
    """(first, last) accuracy by task, under "" for the trained one; the last is measured after training began.

    A run that a guard rolled back to step 0 ends as it started, and has only one evaluation.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for line in run.evaluations:
        value = number(line.get("pass@1"))
        if line.get("split") != split or value is None:
            continue
        name = "" if split == "trained" else str(line.get("task"))
        (last if number(line.get("step")) else first)[name] = value
    back_at_start = number((run.summary or {}).get("steps")) == 0
    return first, dict(first) if back_at_start and not last else last


def _skills(run: RunRecord, drift: Mapping[str, Any]) -> dict[str, SkillResult]:
    first, last = _accuracy(run, "retention")
    measured = _tasks(drift, "retention")
    return {
        name: SkillResult(
            first.get(name),
            last.get(name),
            _figure(measured.get(name, {}), "policy_ref", "exact"),
            _figure(measured.get(name, {}), "ref_policy", "exact"),
        )
        for name in dict.fromkeys((*first, *measured))
    }


def _mean(figures: Any) -> float | None:
    """The mean, or None if one is missing, since a mean over fewer skills is not comparable."""
    known = list(figures)
    return None if not known or None in known else fmean(known)


def _band(run: RunRecord, measure: Measurements) -> tuple[str, dict[str, float | None]]:
    """(name of the estimate, steps until it is first within a factor of 1.5 of its target, fraction of steps inside).

    The estimate is the controller's: per sequence k1, per token the exact KL if it is measured, else k3.
    """
    target = measure.target
    if target is None:
        return "", {"steps_to_band": None, "share_in_band": None}
    names = (SEQUENCE_CURVE,) if measure.target_unit == "per_sequence" else (EXACT_CURVE, K3_CURVE)
    name = next((name for name in names if run.series(name)), names[-1])
    series = run.series(name)
    inside = [(step, value is not None and target / BAND <= value <= target * BAND) for step, value in series]
    return name.split("/")[2], {
        "steps_to_band": next((step for step, within in inside if within), None),
        "share_in_band": fmean(within for _, within in inside) if inside else None,
    }
