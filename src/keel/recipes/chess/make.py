"""Generate rows of training data from games; a row depends only on the settings and the game's number."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import chess

from keel.base.errors import KeelError, unknown
from keel.base.types import Problem
from keel.envs.problems import HELD_OUT_FRACTION, is_held_out, seeded_rng
from keel.recipes.chess.engine import EnginePool, Query, StockfishOptions, pool_of
from keel.recipes.chess.env import EnvGrader, env_problem
from keel.recipes.chess.format import HISTORY, padding_of, read_env_row, read_policy_row
from keel.recipes.chess.policy import PolicyGrader, policy_problem
from keel.recipes.chess.positions import PLIES, PLIES_FEW, any_move, few_pieces
from keel.recipes.chess.rewards import FULL_ENV, FULL_POLICY, Lines
from keel.recipes.chess.rules import identity, legal_moves
from keel.recipes.chess.selfplay import Ply, along, at_random, by_engine, play, read_openings
from keel.recipes.chess.shards import Item

KINDS = ("a", "p", "both")
GAMES = ("random", "engine", "openings")
FULL = {"a": FULL_ENV, "p": FULL_POLICY}


@dataclass(frozen=True)
class MakeOptions:
    """Settings of a file of chess rows.

    `kind` is a, p or both; the sources in `games` are used in turn, for games of at most `plies` moves. `max_pieces`
    starts them from a random position of 3 to that many pieces. `nodes` is the engine's search per position.
    `history`, `illegal`, `draws` and `padding` are those of the tasks.
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
        raise KeelError(f"--max-pieces is {pieces}: it must be from 3 to 12, and openings have 32")
    if not 1 <= options.history <= HISTORY or not 0 <= options.illegal < 1 or options.longest < 1:
        raise KeelError(f"--history is from 1 to {HISTORY}, --illegal a fraction from 0 to below 1, --plies at least 1")
    padding_of(options.padding)
    if options.openings is not None:
        read_openings(options.openings)
    if options.needs_engine:
        _pool(options)


def shard(options: MakeOptions, number: int) -> list[Item]:
    """All items of one shard: about a second of work, or one game of engines."""
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
