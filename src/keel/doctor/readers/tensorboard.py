"""Any TensorBoard folder, under the names of Keel or of a trainer of names.yaml."""

from __future__ import annotations

from pathlib import Path

from keel.base.errors import KeelError
from keel.doctor.history import History, Series, in_order
from keel.doctor.names import renamed, source_of

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
    absent = [tag for tag in (mapping or {}).values() if tag not in series]
    if absent:
        raise KeelError(f"{folder} has no tag {absent[0]!r}: it has {', '.join(sorted(series)) or 'no scalars'}")
    source = source_of(series)
    named, unused = renamed(series, mapping or {}, source)
    if not named:
        raise KeelError(
            f"no tag of {folder} is known here: name them with --map kl=TAG,reward=TAG; "
            f"it has {', '.join(sorted(series)) or 'no scalars'}"
        )
    notes = [f"read {len(series)} scalars of the TensorBoard files in {folder}"]
    if others:
        notes.append(f"event files also in {', '.join(map(str, others))}: name one to have it read")
    if unused:
        notes.append(f"not used: {', '.join(sorted(unused))}")
    missing = ("TensorBoard files hold no options: checks that need the configuration are left out",)
    if source is not None:
        notes.append(f"by its names a log of {source}")
    return History(source or "TensorBoard", path, named, missing=missing, notes=tuple(notes))
