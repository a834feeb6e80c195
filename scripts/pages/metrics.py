"""The reference of metrics: the table `keel/base/metrics.yaml`, with the names that other trainers have for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import yaml

from keel.doctor.names import TRAINERS
from pages.tables import table

HEAD = """# Metrics

Every figure that a step writes to `metrics.jsonl`, TensorBoard and W&B. A metric called just "kl" does not exist: the
name says whose samples, against whom, by which estimator. `{a,b}` stands for each of these, `*` for a name that a
task, a reward or a tool chooses. The last column has what TRL and verl call it, as `keel doctor` reads their logs;
for other trainers see [Names in logs](logs.md).

A step whose update was skipped still writes a complete line. `eval.jsonl` has evaluations, `events.jsonl` what
guards, resumes and samplers did, `rollouts.jsonl` completions with the KL of every token. How a run reads them:
[Guards](../runs.md#guards), [Findings](findings.md).

"""
SHOWN = ("TRL", "verl")


def metrics_page() -> str:
    parts = []
    for group, entries in metric_table().items():
        rows = ((f"`{name}`", f"*{unit}*: {meaning}", _elsewhere(name)) for name, (unit, meaning) in entries.items())
        parts.append(f"## {group}\n\n{table(('metric', 'unit and meaning', 'elsewhere'), rows)}")
    return HEAD + "\n\n".join(parts) + "\n"


def metric_table() -> dict[str, dict[str, tuple[str, str]]]:
    """Group → name → (unit, meaning)."""
    loaded: dict[str, dict[str, tuple[str, str]]] = yaml.safe_load(
        files("keel.base").joinpath("metrics.yaml").read_text(encoding="utf-8")
    )
    return loaded


def spelled_out(name: str) -> Iterator[str]:
    """A name of the table without its braces: each metric that it stands for."""
    braces = re.search(r"\{([^}]*)\}", name)
    if braces is None:
        yield name
        return
    for choice in braces[1].split(","):
        yield from spelled_out(name[: braces.start()] + choice + name[braces.end() :])


def _elsewhere(name: str) -> str:
    """What TRL and verl call it, up to two names of each."""
    ours = set(spelled_out(name))
    names = {trainer: [t for t, known in TRAINERS[trainer].metrics.items() if known.keel in ours] for trainer in SHOWN}
    return "; ".join(
        f"{trainer}: {', '.join(f'`{t}`' for t in theirs[:2])}" for trainer, theirs in names.items() if theirs
    )
