"""Training data from games, in shards: resumable, and with the same result for any number of processes.

A row depends only on the settings and the game's number. A shard is written atomically, rows are merged in shard order,
and shards on disk are reused, so that an interrupted run that is repeated produces the same files.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import chess

from keel.base.errors import KeelError, unknown
from keel.base.files import write_atomic
from keel.base.types import Problem
from keel.envs.problems import HELD_OUT_FRACTION, is_held_out, seeded_rng
from keel.recipes.chess.engine import EnginePool, Query, StockfishOptions, pool_of
from keel.recipes.chess.env import EnvGrader, env_problem
from keel.recipes.chess.format import HISTORY, padding_of, read_env_row, read_policy_row
from keel.recipes.chess.policy import PolicyGrader, policy_problem
from keel.recipes.chess.positions import (
    PLIES,
    PLIES_FEW,
    Ply,
    along,
    any_move,
    at_random,
    by_engine,
    few_pieces,
    play,
    read_openings,
)
from keel.recipes.chess.rewards import FULL_ENV, FULL_POLICY, Lines
from keel.recipes.chess.rules import identity, legal_moves

SETTINGS, PART_FOLDER = "data.json", "parts"
FILES = {False: "train.jsonl", True: "held_out.jsonl"}
_MAX_BARREN = 20  # consecutive shards without new rows before giving up

# (name, rows, held out): items with a known name are dropped; a row is JSON, or "" if it could not be made.
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
    `on_rows` is called with the number of added rows, including those found on disk.
    """
    full_settings = {**settings, "rows": rows}
    finished = _begin(out, full_settings)
    if finished is not None:
        return finished
    parts, ledger = out / PART_FOLDER, _Ledger(rows, on_rows)
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
                    f"these settings give only {ledger.count} different rows: lower --rows, and give a new --out"
                )
    return _finish(
        out,
        full_settings,
        ShardCounts(ledger.train, ledger.held_out, ledger.duplicates, number, reused, ledger.unavailable),
    )


class _Ledger:
    """Counts of the rows so far. A part has a line of counts, then lines of `t` or `h`, name and row, with tabs."""

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
        """Count a part that an earlier run wrote."""
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
        (out / PART_FOLDER).mkdir(parents=True, exist_ok=True)
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
                lines = _part(out / PART_FOLDER, number).read_text(encoding="utf-8").splitlines()[1:]
                file.writelines(line.split("\t", 2)[2] + "\n" for line in lines if line.startswith("h") == held)
        os.replace(temporary, out / name)
    write_atomic(out / SETTINGS, json.dumps({**full_settings, "made": {**asdict(counts), "found": 0}}, indent=2) + "\n")
    shutil.rmtree(out / PART_FOLDER)
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


KINDS = ("a", "p", "both")
GAMES = ("random", "engine", "openings")
FULL = {"a": FULL_ENV, "p": FULL_POLICY}


@dataclass(frozen=True)
class MakeOptions:
    """Settings of a file of chess rows.

    `kind` is a, p or both; the sources in `games` are used in turn, for games of at most `plies` half-moves. With
    `max_pieces`, games start from a random position of 3 to `max_pieces` pieces. `nodes` is the engine's search limit
    per position. `history`, `illegal`, `draws` and `padding` are those of the tasks.
    """

    kind: str = "a"
    games: tuple[str, ...] = ("random",)
    openings: str | None = None
    max_pieces: int | None = None
    plies: int | None = None
    history: int = HISTORY
    illegal: float = 0.05
    draws: str = "claimed"
    padding: str = "source"
    nodes: int = 20_000
    seed: int = 0

    @property
    def needs_engine(self) -> bool:
        return self.kind != "a" or "engine" in self.games

    @property
    def longest(self) -> int:
        return self.plies or (PLIES if self.max_pieces is None else PLIES_FEW)[1]


def check_options(options: MakeOptions) -> None:
    """Refuse invalid settings, a missing engine and a missing openings file, before any work."""
    if options.kind not in KINDS:
        raise unknown("--kind", options.kind, KINDS)
    for name in options.games:
        if name not in GAMES:
            raise unknown("--games", name, GAMES)
    if not options.games:
        raise KeelError(f"--games is empty: give some of {', '.join(GAMES)}")
    if ("openings" in options.games) != (options.openings is not None):
        raise KeelError("--games openings and --openings FILE belong together: give both or neither")
    pieces = options.max_pieces
    if pieces is not None and (not 3 <= pieces <= 12 or "openings" in options.games):
        raise KeelError(f"--max-pieces is {pieces}: it must be from 3 to 12, and --games openings has 32 pieces")
    if not 1 <= options.history <= HISTORY or not 0 <= options.illegal < 1 or options.longest < 1:
        raise KeelError(f"--history is from 1 to {HISTORY}, --illegal a fraction from 0 to below 1, --plies at least 1")
    padding_of(options.padding)
    if options.openings is not None:
        read_openings(options.openings)
    if options.needs_engine:
        _pool(options)


def shard(options: MakeOptions, number: int) -> list[Item]:
    """All items of one shard: games of about 400 plies in total, or of 80 if the engine is needed."""
    count = max(1, (PLIES[1] if options.needs_engine else 5 * PLIES[1]) // options.longest)
    games = range(number * count, (number + 1) * count)
    if not options.needs_engine:
        return [item for game in games for item in game_items(options, game)]
    pool = _pool(options)
    before = pool.counts.copy()
    items = [item for game in games for item in game_items(options, game)]
    counts = pool.counts - before
    if counts["unavailable"] and not counts["analysed"] + counts["cached"]:
        raise KeelError(
            f"the engine {pool.path} answered for none of {counts['unavailable']} positions: "
            "run it by hand, or name another in KEEL_STOCKFISH"
        )
    return items


def game_items(options: MakeOptions, number: int) -> Iterator[Item]:
    """The positions of one game with their rows ("" for P: if the engine failed), all in the same split."""
    source = options.games[number % len(options.games)]
    name = f"{source}-{options.seed}-{number}"
    rng = seeded_rng("chess data", name)
    plies = list(_plies(options, source, number, rng))
    held = is_held_out(name, HELD_OUT_FRACTION)
    for ply, lines in zip(plies, _labels(options, plies), strict=True):
        problems = [("a", _environment(options, ply, rng))] if options.kind != "p" else []
        if lines:
            problems.append(("p", _policy(options, ply, lines)))
        rows = [json.dumps({**checked(options, kind, problem), "game": name}) for kind, problem in problems]
        if options.kind != "a" and not lines:
            rows.append("")  # a row without labels is left out, and counted
        yield identity(ply.position.fen), tuple(rows), held


def _plies(options: MakeOptions, source: str, number: int, rng: random.Random) -> Iterator[Ply]:
    board = chess.Board() if options.max_pieces is None else few_pieces(rng, rng.randint(3, options.max_pieces))
    choose = by_engine(rng, _pool(options)) if source == "engine" else at_random(rng)
    if source == "openings":
        lines = read_openings(str(options.openings))
        turn = number // len(options.games)
        choose = along(lines[turn % len(lines)], choose)
    return play(board, options.longest, choose)


def _labels(options: MakeOptions, plies: Sequence[Ply]) -> Sequence[Lines | None]:
    if options.kind == "a":
        return [None] * len(plies)
    return _pool(options).analyse([Query(ply.position.fen) for ply in plies])


def _environment(options: MakeOptions, ply: Ply, rng: random.Random) -> Problem:
    """The move that was played, or with probability `illegal` an illegal one."""
    fen, before = ply.position.fen, ply.position.history
    move = ply.move if rng.random() >= options.illegal else any_move(rng, legal_moves(fen), 1.0)
    return env_problem(fen, move, before[-(options.history - 1) :] if options.history > 1 else (), options.draws)


def _policy(options: MakeOptions, ply: Ply, lines: Lines) -> Problem:
    problem = policy_problem(ply.position.fen, padding_of(options.padding))
    return Problem(problem.key, problem.prompt, info={**problem.info, "lines": lines})


def checked(options: MakeOptions, kind: str, problem: Problem) -> dict[str, str]:
    """Prompt and completion of a problem, parsed again from the whole row and graded: a row must earn the full
    reward."""
    padding = padding_of(options.padding)
    grader: Any = EnvGrader({"parse": "strict"}) if kind == "a" else PolicyGrader(padding, None, {"parse": "strict"})
    prompt, completion = str(problem.prompt), grader.gold(problem)
    row = prompt + completion
    fen = read_env_row(row)[0] if kind == "a" else read_policy_row(row)[0]
    earned = grader.reward(problem, completion).total
    if fen != problem.info["fen"] or abs(earned - FULL[kind]) > 1e-9:
        raise KeelError(f"the row {row!r} earns {earned}, not {FULL[kind]}: please report this bug in Keel")
    return {"prompt": prompt, "completion": completion}


def _pool(options: MakeOptions) -> EnginePool:
    """The engine of this process, with one worker: `--jobs` counts processes."""
    return pool_of(StockfishOptions(nodes=options.nodes, workers=1))
