"""Any TensorBoard folder, under the names of Keel or of a trainer of names.yaml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from keel.base.errors import KeelError
from keel.doctor.history import History, Series, in_order
from keel.doctor.readers.table import named_history

EVENTS = "events.out.tfevents.*"


def event_folders(path: Path) -> list[Path]:
    """Folders at or below `path` that hold event files, those with the most data first."""
    size: dict[Path, int] = {}
    for file in path.rglob(EVENTS):
        size[file.parent] = size.get(file.parent, 0) + file.stat().st_size
    return sorted(size, key=lambda folder: (-size[folder], str(folder)))


def read_tensorboard(path: Path, mapping: dict[str, str] | None = None) -> History:
    """The folder with the most data below `path`; the others are named."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise KeelError("reading TensorBoard files needs tensorboard: pip install 'keel-rl[tensorboard]'") from error
    folder, *others = event_folders(path)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    series: dict[str, Series] = {}
    for tag in events.Tags()["scalars"]:
        series[tag] = in_order((event.step, event.value) for event in events.Scalars(tag))
    for tag in events.Tags()["tensors"]:  # newer writers store scalars as tensors
        points = [(event.step, event.tensor_proto) for event in events.Tensors(tag)]
        if all(len(proto.float_val) == 1 for _, proto in points):
            series[tag] = in_order((step, proto.float_val[0]) for step, proto in points)
    note = f"read {len(series)} scalars of the TensorBoard files in {folder}"
    history = named_history(folder, series, mapping or {}, "tag", sorted(series), note)
    also = [f"event files also in {', '.join(map(str, others))}: name one to have it read"] if others else []
    source = "TensorBoard" if history.source == "table" else history.source
    return replace(history, path=path, source=source, notes=(*history.notes, *also))
