"""A pool of Stockfish (or other UCI engine) processes, and the SQLite cache of their analyses."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import sqlite3
import subprocess
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import chess
import chess.engine
from pydantic import Field

from keel.base.errors import KeelError
from keel.base.options import Options, PositiveFloat, PositiveInt, read_options
from keel.recipes.chess.format import LINES
from keel.recipes.chess.rules import board_of, legal_moves

Lines = tuple[tuple[str, float], ...]  # moves with their evaluations in pawns, best first
_TABLES = """
CREATE TABLE IF NOT EXISTS lines (key TEXT PRIMARY KEY, lines TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS engines (file TEXT PRIMARY KEY, name TEXT NOT NULL);
"""
_LINES, _ENGINE = "SELECT lines FROM lines WHERE key = ?", "SELECT name FROM engines WHERE file = ?"
USUAL_PATHS = ("/usr/games/stockfish", "/usr/local/bin/stockfish", "/opt/homebrew/bin/stockfish")
INSTALL = "apt-get install stockfish"
ATTEMPTS = 3  # attempts per position, each with a new process
START_S = 10.0  # seconds for the answer to 'uci'
PAWN_CAP = 50.0  # largest evaluation without a mate
MATE = 100.0  # mate in n moves is worth 100 - n pawns, and at least 51
_T = TypeVar("_T")


class AnalysisCache:
    """Analysis lines by key and engine names by file. Writes are atomic.

    Entries that cannot be read are analysed again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, timeout=60.0, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise KeelError(
                f"the engine's cache {self.path} cannot be used ({error}): delete it, or set task.engine.cache"
            ) from error
        self._lock = threading.Lock()

    def lines(self, keys: Iterable[str]) -> dict[str, Lines]:
        """The cached analyses of `keys`."""
        known: dict[str, Lines] = {}
        for key in keys:
            with suppress(ValueError, TypeError):  # a damaged entry
                lines = tuple((str(move), float(value)) for move, value in json.loads(self._value(_LINES, key) or "[]"))
                if lines:
                    known[key] = lines
        return known

    def put_lines(self, key: str, lines: Lines) -> None:
        """Store the lines of a position; an existing entry is replaced."""
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO lines VALUES (?, ?)", (key, json.dumps(lines)))

    def engine(self, file: str) -> str | None:
        """The cached name of the engine in a file."""
        return self._value(_ENGINE, file)

    def put_engine(self, file: str, name: str) -> None:
        """Store the name of the engine in a file; errors of the disk are ignored."""
        with self._lock, suppress(sqlite3.Error):
            self._db.execute("INSERT OR REPLACE INTO engines VALUES (?, ?)", (file, name))

    def _value(self, query: str, key: str) -> str | None:
        with self._lock, suppress(sqlite3.Error):
            row = self._db.execute(query, (key,)).fetchone()
            return None if row is None else str(row[0])
        return None


def default_path() -> Path:
    """`keel/stockfish.sqlite` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "keel" / "stockfish.sqlite"


class StockfishOptions(Options):
    """`task.engine`: `path` of the engine (default: `KEEL_STOCKFISH`, `stockfish` on PATH, or the usual paths), `nodes`
    and `timeout_s` per position, `hash_mb` per process, number of `workers` (default: one per core), and the file of
    the `cache`.
    """

    path: str | None = None
    nodes: Annotated[PositiveInt, Field(ge=100)] = 20_000
    hash_mb: PositiveInt = 16
    workers: PositiveInt | None = None
    timeout_s: PositiveFloat = 30.0
    cache: str | None = None


@dataclass(frozen=True)
class Query:
    """A position to analyse, and the moves to consider (empty: all)."""

    fen: str
    moves: tuple[str, ...] = ()


def engine_options(options: Mapping[str, Any] | StockfishOptions | None) -> StockfishOptions:
    """`task.engine`, checked."""
    if isinstance(options, StockfishOptions):
        return options
    return read_options(StockfishOptions, options or {}, "task.engine")


def find_engine(path: str | None = None) -> str:
    """The engine's program: the configured one, `KEEL_STOCKFISH`, `stockfish` on PATH, or a usual path."""
    configured = path or os.environ.get("KEEL_STOCKFISH")
    if configured:
        program = shutil.which(os.path.expanduser(configured))
        if program is None:
            where = "task.engine.path" if path else "KEEL_STOCKFISH"
            raise KeelError(
                f"{where} is {configured}, which is not a program: install it with {INSTALL}, or give another path"
            )
        return program
    program = shutil.which("stockfish") or next(
        (candidate for candidate in USUAL_PATHS if shutil.which(candidate)), None
    )
    if program is None:
        raise KeelError(
            f"the task chess_policy needs Stockfish, which is not on PATH: {INSTALL}, or name it in task.engine.path"
        )
    return program


def pawns_of(score: chess.engine.Score) -> float:
    """A score in pawns: centipawns / 100 within ±50, mate in n moves as ±(100 − min(n, 49)).

    A shorter mate has a higher score, and any mate a higher one than other evaluations. Being mated is the reverse.
    """
    mate = score.mate()
    if mate is None:
        return max(-PAWN_CAP, min(PAWN_CAP, (score.score() or 0) / 100))
    distance = MATE - min(abs(mate), MATE - PAWN_CAP - 1)
    return distance if mate > 0 or isinstance(score, chess.engine.MateGivenType) else -distance


class EnginePool:
    """Engine processes that are started on demand, with a shared cache.

    Every search is independent (one thread, a new game per position) and limited by nodes, so that results depend
    neither on order nor on load. A process that exits or hangs is replaced and the position retried; after `ATTEMPTS`
    the result is None (`unavailable`). `counts` has analysed, cached, started, crashed, timed_out, unavailable and
    unkept (results that could not be cached).
    """

    def __init__(self, options: StockfishOptions) -> None:
        self.options = options
        self.path = find_engine(options.path)
        self.cache = AnalysisCache(options.cache or default_path())
        self.counts: Counter[str] = Counter()
        self.workers = options.workers or os.cpu_count() or 1
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free: asyncio.Queue[Any] | None = None
        self._engines: set[Any] = set()
        self.name = self._identify()

    def analyse(self, queries: Sequence[Query]) -> list[Lines | None]:
        """The lines of each position, best first for the side to move; None if the engine failed."""
        for query in queries:
            legal = legal_moves(query.fen)
            wrong = next((move for move in query.moves if move not in legal), None)
            if wrong is not None or not legal:
                raise KeelError(f"{query.fen!r} has no legal move{f' {wrong}' if wrong else ''}: nothing to analyse")
        keys = [self._key(query) for query in queries]
        known = self.cache.lines(set(keys))
        with self._lock:
            self.counts["cached"] += sum(key in known for key in keys)
        missing = {key: query for key, query in zip(keys, queries, strict=True) if key not in known}
        if missing:
            answers = self._run(self._analyse_all(list(missing.items())))
            known |= {key: lines for key, lines in answers.items() if lines is not None}
        return [known.get(key) for key in keys]

    @property
    def pids(self) -> list[int]:
        return [transport.get_pid() for transport, _ in list(self._engines)]

    def close(self) -> None:
        """Stop all processes; a later query starts new ones."""
        for transport, _ in list(self._engines):
            with suppress(ProcessLookupError, OSError):
                transport.kill()

    # ------------------------------------------------------------------------------------ inside the event loop

    async def _analyse_all(self, missing: Sequence[tuple[str, Query]]) -> dict[str, Lines | None]:
        if self._free is None:
            self._free = asyncio.Queue()
            for _ in range(self.workers):
                self._free.put_nowait(None)
        answers = await asyncio.gather(*(self._analyse_one(key, query) for key, query in missing))
        return dict(zip((key for key, _ in missing), answers, strict=True))

    async def _analyse_one(self, key: str, query: Query) -> Lines | None:
        assert self._free is not None
        for _ in range(ATTEMPTS):
            engine = await self._free.get()
            try:
                if engine is None:
                    engine = await self._start()
                lines = await self._answer(engine[1], query)
            except KeelError:  # an invalid option, which a new process would refuse too
                raise
            except Exception as error:  # a broken engine may cause any error in python-chess
                timed_out = isinstance(error, TimeoutError)
                self.counts["timed_out" if timed_out else "crashed"] += 1
                self._drop(engine)
                engine = None
                continue
            finally:
                self._free.put_nowait(engine)
            self.counts["analysed"] += 1
            with suppress(sqlite3.Error):
                self.cache.put_lines(key, lines)
                return lines
            self.counts["unkept"] += 1
            return lines
        self.counts["unavailable"] += 1
        return None

    async def _start(self) -> Any:
        command = chess.engine.popen_uci(self.path, stderr=subprocess.DEVNULL)
        engine = await asyncio.wait_for(command, START_S)
        self._engines.add(engine)
        self.counts["started"] += 1
        settings = {"Threads": 1, "Hash": self.options.hash_mb}
        known = {name: value for name, value in settings.items() if name in engine[1].options}
        most = engine[1].options["Hash"].max if "Hash" in known else None
        if most is not None and self.options.hash_mb > most:
            self._drop(engine)
            raise KeelError(f"task.engine.hash_mb is {self.options.hash_mb}: {self.path} takes at most {most}")
        try:
            await asyncio.wait_for(engine[1].configure(known), START_S)
        except BaseException:
            self._drop(engine)
            raise
        return engine

    def _drop(self, engine: Any) -> None:
        if engine is not None:
            self._engines.discard(engine)
            with suppress(ProcessLookupError, OSError):
                engine[0].kill()
            engine[0].close()

    async def _answer(self, protocol: Any, query: Query) -> Lines:
        """The search; raises after the time limit or if the process ends, which python-chess does not always detect."""
        search = asyncio.ensure_future(self._search(protocol, query))
        limit = self.options.timeout_s
        done, _ = await asyncio.wait({search, protocol.returncode}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if search in done:
            return search.result()
        search.cancel()
        if done:
            raise chess.engine.EngineTerminatedError("the process ended")
        raise TimeoutError

    async def _search(self, protocol: Any, query: Query) -> Lines:
        """The lines of the deepest complete iteration, because scores of different depths are not comparable.

        If none is complete, the iteration with the most lines.
        """
        board = board_of(query.fen)
        roots = [chess.Move.from_uci(move) for move in query.moves] or None
        line_count = min(LINES, len(roots) if roots else len(legal_moves(query.fen)))
        iterations: dict[int, dict[str, float]] = {}
        limit = chess.engine.Limit(nodes=self.options.nodes)
        kind = chess.engine.INFO_SCORE | chess.engine.INFO_PV | chess.engine.INFO_BASIC
        search = await protocol.analysis(board, limit, multipv=line_count, game=object(), info=kind, root_moves=roots)
        with search:
            async for info in search:
                if info.get("pv") and "score" in info and not (info.get("lowerbound") or info.get("upperbound")):
                    at_depth = iterations.setdefault(info.get("depth", 0), {})
                    at_depth[info["pv"][0].uci()] = pawns_of(info["score"].relative)
        if not iterations:
            raise chess.engine.EngineError(f"it gave no analysis within {self.options.nodes} nodes")
        deepest = iterations[max(iterations, key=lambda depth: (min(len(iterations[depth]), line_count), depth))]
        return tuple(sorted(deepest.items(), key=lambda line: -line[1])[:line_count])

    # --------------------------------------------------------------------------------------------------- outside

    def _identify(self) -> str:
        """The engine's name and version, cached by the file's size and time."""
        real = Path(self.path).resolve()
        stat = real.stat()
        file = f"{real}|{stat.st_size}|{stat.st_mtime_ns}"
        name = self.cache.engine(file)
        if name is None:
            name = self._run(self._ask_name())
            self.cache.put_engine(file, name)
        return name

    async def _ask_name(self) -> str:
        engine = await self._first_start()
        name = str(engine[1].id.get("name", Path(self.path).name))
        self._free = asyncio.Queue()
        for held in [engine, *[None] * (self.workers - 1)]:
            self._free.put_nowait(held)
        return name

    async def _first_start(self) -> Any:
        """Start the first process, again if it ends at once; raises an error if the program is not an engine."""
        while True:
            try:
                return await self._start()
            except (chess.engine.EngineError, OSError) as error:
                if isinstance(error, chess.engine.EngineTerminatedError) and self.counts["crashed"] < ATTEMPTS - 1:
                    self.counts["crashed"] += 1
                    continue
                why = f"it did not answer 'uci' in {START_S:g} s" if isinstance(error, TimeoutError) else "it ended"
                if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                    why = str(error.strerror or error)
                raise KeelError(
                    f"{self.path} is not a UCI engine ({why}): {INSTALL}, or set task.engine.path"
                ) from error

    def _key(self, query: Query) -> str:
        options = self.options
        settings = f"{self.name}|nodes={options.nodes}|hash={options.hash_mb}|multipv={LINES}"
        return f"{settings}|{query.fen}|{' '.join(sorted(query.moves))}"

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        with self._lock:  # several threads may analyse at the same time
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_exception_handler(lambda loop, context: None)  # failures are counted by the caller
                threading.Thread(target=self._loop.run_forever, name="keel-stockfish", daemon=True).start()
                atexit.register(self.close)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


@lru_cache(maxsize=8)
def pool_of(options: StockfishOptions) -> EnginePool:
    """The pool with these options, shared by all tasks of this process."""
    return EnginePool(options)
