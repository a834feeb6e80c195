"""Generate rows in shards: resumable, and with the same result for any number of processes.

A shard depends only on its number and is written atomically. Rows are merged in shard order, and shards on disk are
reused, so that an interrupted run that is repeated produces the same files.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import write_atomic

SETTINGS, PARTS = "data.json", "parts"
FILES = {False: "train.jsonl", True: "held_out.jsonl"}
_MAX_BARREN = 20  # consecutive shards without new rows before giving up

# The item that must be unique, its rows as JSON ("" for one that could not be made), whether they are held out.
Item = tuple[str, tuple[str, ...], bool]
Work = Callable[[int], list[Item]]  # maps a shard's number to its items; picklable
OnRows = Callable[[int], None]


@dataclass(frozen=True)
class ShardCounts:
    """The contents of the folder: rows of each split, dropped duplicates, shards, rows that existed already, and rows
    that could not be made (`unavailable`)."""

    train: int
    held_out: int
    duplicates: int
    shards: int
    found: int = 0
    unavailable: int = 0


def make_shards(
    out: Path, settings: Mapping[str, Any], work: Work, *, rows: int, jobs: int = 1, on_rows: OnRows | None = None
) -> ShardCounts:
    """Write `rows` rows to `out/train.jsonl` and `out/held_out.jsonl`, each item once.

    `settings` are stored in the folder: continuing with other settings is refused, because the rows would be mixed.
    `on_rows` is called with the number of new rows, those found on disk included.
    """
    full_settings = {**settings, "rows": rows}
    finished = _begin(out, full_settings)
    if finished is not None:
        return finished
    parts, ledger = out / PARTS, _Ledger(rows, on_rows)
    number = 0
    while (part := _part(parts, number)).exists():
        ledger.take_back(part.read_text(encoding="utf-8"))
        number += 1
    reused, barren = ledger.count, 0
    with _workers(jobs) as submit:
        waiting: dict[int, Callable[[], list[Item]]] = {}
        while ledger.remaining > 0:
            for ahead in range(number, number + (2 * jobs if jobs > 1 else 1)):
                if ahead not in waiting:
                    waiting[ahead] = submit(work, ahead)
            before = ledger.count
            write_atomic(_part(parts, number), ledger.take(waiting.pop(number)()))
            number, barren = number + 1, 0 if ledger.count > before else barren + 1
            if barren >= _MAX_BARREN:
                raise KeelError(
                    f"only {ledger.count} different rows exist with these settings: set fewer --rows, with a new --out"
                )
    return _finish(
        out,
        full_settings,
        ShardCounts(ledger.train, ledger.held_out, ledger.duplicates, number, reused, ledger.unavailable),
    )


class _Ledger:
    """Counts of the rows so far. A part's text is a line of counts, then `t` or `h`, the item and the row, by tabs."""

    def __init__(self, rows: int, on_rows: OnRows | None) -> None:
        self.rows, self.on_rows = rows, on_rows
        self.train = self.held_out = self.duplicates = self.unavailable = 0
        self.seen: set[bytes] = set()

    @property
    def count(self) -> int:
        return self.train + self.held_out

    @property
    def remaining(self) -> int:
        return self.rows - self.count

    def take(self, items: Sequence[Item]) -> str:
        """Add new items up to the number of rows; returns the part's text."""
        lines: list[str] = []
        duplicates = unavailable = 0
        for name, rows, held in items:
            texts = [text for text in rows if text]
            room = self.remaining - len(lines)
            unavailable += len(rows) - len(texts) if room else 0
            if texts and self._is_new(name):
                lines += [f"{'h' if held else 't'}\t{name}\t{text}" for text in texts[:room]]
            else:
                duplicates += len(texts)
        self._count(lines, duplicates, unavailable)
        return "\n".join([f"{duplicates} {unavailable}", *lines]) + "\n"

    def take_back(self, text: str) -> None:
        """Count a part from an earlier start."""
        counts, *lines = text.splitlines()
        for line in lines:
            self._is_new(line.split("\t", 2)[1])
        self._count(lines, *map(int, counts.split()))

    def _is_new(self, name: str) -> bool:
        digest = blake2b(name.encode(), digest_size=12).digest()  # millions of positions take some hundred megabytes
        if digest in self.seen:
            return False
        self.seen.add(digest)
        return True

    def _count(self, lines: Sequence[str], duplicates: int, unavailable: int = 0) -> None:
        held = sum(line.startswith("h") for line in lines)
        self.held_out += held
        self.train += len(lines) - held
        self.duplicates += duplicates
        self.unavailable += unavailable
        if self.on_rows is not None:
            self.on_rows(len(lines))


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:06d}"


def _begin(out: Path, full_settings: Mapping[str, Any]) -> ShardCounts | None:
    """Claim the folder for these settings; returns the contents if it is already complete."""
    settings = out / SETTINGS
    if settings.exists():
        try:
            written = json.loads(settings.read_text(encoding="utf-8"))
        except ValueError:
            raise KeelError(f"{settings} cannot be read: give another --out, or delete that folder") from None
        counts = written.pop("made", None)
        differing = sorted(name for name in {*written, *full_settings} if written.get(name) != full_settings.get(name))
        if differing:
            raise KeelError(
                f"{out} was started with another {', '.join(differing)}: give another --out, or delete that folder"
            )
        return None if counts is None else ShardCounts(**{**counts, "found": counts["train"] + counts["held_out"]})
    if any((out / name).exists() for name in FILES.values()):
        raise KeelError(f"{out} contains other data: give another --out")
    try:
        (out / PARTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KeelError(f"cannot make the folder {out}: {error.strerror}") from error
    write_atomic(settings, json.dumps(full_settings, indent=2) + "\n")
    return None


def _finish(out: Path, full_settings: Mapping[str, Any], counts: ShardCounts) -> ShardCounts:
    """Join the parts into two files, mark them as complete, and delete the parts."""
    for held, name in FILES.items():
        temporary = out / f"{name}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            for number in range(counts.shards):
                lines = _part(out / PARTS, number).read_text(encoding="utf-8").splitlines()[1:]
                file.writelines(line.split("\t", 2)[2] + "\n" for line in lines if line.startswith("h") == held)
        os.replace(temporary, out / name)
    write_atomic(out / SETTINGS, json.dumps({**full_settings, "made": {**asdict(counts), "found": 0}}, indent=2) + "\n")
    shutil.rmtree(out / PARTS)
    return counts


@contextmanager
def _workers(jobs: int) -> Iterator[Callable[[Work, int], Callable[[], list[Item]]]]:
    """Submit shards to this process, or to `jobs` processes, which exit when this one does."""
    if jobs <= 1:
        yield lambda work, number: lambda: work(number)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            yield lambda work, number: pool.submit(work, number).result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """End a worker whose parent was killed, which would otherwise wait for work forever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name="keel-parent", daemon=True).start()
