"""The reference of other trainers' logs: how each metric and option is called there."""

from __future__ import annotations

from keel.doctor.names import SHORT, TRAINERS, PeerTrainer
from pages.tables import table

HEAD = """# Names in logs of other trainers

`keel doctor` reads these names with or without `train/` before them. Metrics marked `other/` are read and not checked.

"""
SHORT_NAMES = """## Names for --map

`--map` takes these names or Keel's own metric names.

"""


def logs_page() -> str:
    short = table(("--map", "Keel"), ((f"`{theirs}`", f"`{ours}`") for theirs, ours in SHORT.items()))
    return HEAD + "\n\n".join([*map(_trainer, TRAINERS.values()), SHORT_NAMES + short]) + "\n"


def _trainer(trainer: PeerTrainer) -> str:
    rows = ((f"`{theirs}`", f"`{name.keel}`", name.unit, name.per) for theirs, name in trainer.metrics.items())
    metrics = table((trainer.name, "Keel", "unit", "per"), rows)
    options = table(("option", "Keel"), ((f"`{theirs}`", f"`{ours}`") for theirs, ours in trainer.options.items()))
    return f"## {trainer.name}\n\n{trainer.about}\n\n{metrics}\n\n{options}"
