"""`chess_env` (A:): be the environment. Given a position and a move, say what the rules say."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.types import Group, Problem, Reward
from keel.envs.problems import HELD_OUT_FRACTION
from keel.recipes.chess.data import ChessRow
from keel.recipes.chess.format import HISTORY, Verdict, env_completion, env_prompt, read_env, read_env_row
from keel.recipes.chess.notation import is_real, require_uci
from keel.recipes.chess.positions import Position, any_move, games_of
from keel.recipes.chess.rewards import env_reward
from keel.recipes.chess.rules import DRAWS, board_of, legal_moves, next_positions, step
from keel.recipes.chess.task import ChessGrader, ChessTask, check_grading, part_means, problems_of

PARTS = ("parsed", "structure", "fen_exact", "fen_similarity", "fen_progress", "reward_value", "flags")


@dataclass(frozen=True)
class EnvGrader(ChessGrader):
    """Grades A: answers by the rules; `answer` of a problem is the true verdict's four fields."""

    options: Mapping[str, Any] = field(default_factory=dict)

    def gold(self, problem: Problem) -> str:
        return env_completion(Verdict(*problem.answer))

    def reward(self, problem: Problem, text: str) -> Reward:
        return env_reward(read_env(text), Verdict(*problem.answer), problem.info["fen"], **self.options)

    def metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Means of the parts, and `legal`: the share of answers whose FEN some legal move leads to, or is right."""
        legal: list[bool] = []
        for group in groups:
            possible = next_positions(group.problem.info["fen"]) | {group.problem.answer[0]}
            legal += [read_env(completion.text).fen in possible for completion in group.completions]
        return {**part_means(groups, PARTS, self.reward), "legal": fmean(legal)}


def env_problem(fen: str, move: str, before: Sequence[str], draws: str, key: str | None = None) -> Problem:
    """The A: problem of a move after the moves `before` it."""
    outcome = step(fen, move, before, draws)
    verdict = outcome.verdict
    return Problem(
        key=key or f"{fen}+{move}",
        prompt=env_prompt(fen, move, (*before, move)),
        answer=(verdict.fen, verdict.reward, verdict.terminated, verdict.truncated),
        info={"fen": fen, "move": move, "reason": outcome.reason},
    )


def chess_env(
    data: Mapping[str, Any] | None = None,
    plies: Sequence[int] | None = None,
    pieces: int | None = None,
    illegal: float = 0.05,
    history: int = HISTORY,
    draws: str = "claimed",
    system: str = "graduated",
    parse: str = "lenient",
    malformed: float | None = None,
    held_out: int | float = HELD_OUT_FRACTION,
) -> ChessTask:
    """The task `chess_env`: positions of `data`, or of random games of `plies` [from, to] moves, from the starting
    position or from one of at most `pieces` pieces.

    `illegal` is the share of moves that are not legal, `history` how many moves are shown (1: the move alone), `draws`
    claimed or automatic (see `rules.step`), `system` graduated or binary, `parse` lenient or strict, `malformed` what
    an unreadable answer earns, `held_out` the share of positions (of data: also of games) kept for evaluation.
    """
    if not isinstance(history, int) or not 1 <= history <= HISTORY:
        raise KeelError(f"chess history is {history!r}: it must be from 1 (the move alone) to {HISTORY}")
    if not (is_real(illegal) and 0 <= illegal < 1):
        raise KeelError(f"chess illegal is {illegal!r}: it must be a share from 0 to below 1")
    if draws not in DRAWS:
        raise unknown("chess draws", draws, DRAWS)
    grader = EnvGrader(check_grading(system, parse, malformed))

    def shown(moves: Sequence[str]) -> tuple[str, ...]:
        return tuple(moves[-(history - 1) :]) if history > 1 else ()

    def ask(rng: random.Random, position: Position) -> Problem:
        move = any_move(rng, legal_moves(position.fen), illegal)
        return env_problem(position.fen, move, shown(position.history), draws)

    def ask_of(record: ChessRow) -> Problem:
        return _of_record(record, shown, draws)

    problems = problems_of("chess_env", "A: ", data, games_of(plies, pieces), ask, ask_of, held_out)
    return ChessTask(problems, grader, "chess_env")


def _of_record(record: ChessRow, shown: Callable[[Sequence[str]], Sequence[str]], draws: str) -> Problem:
    """A row's problem. The verdict of a text must be the rules' own, or the row would teach what is wrong."""
    if record.text is None:
        board_of(record.fen)
        if not record.move:
            raise KeelError("it has no column 'move': an environment answers to a move")
        return env_problem(record.fen, require_uci(record.move), shown(record.history), draws, record.location)
    fen, move, moves, stated = read_env_row(record.text)
    board_of(fen)
    problem = env_problem(fen, move, moves[:-1], draws, record.location)
    if Verdict(*problem.answer) != stated:
        raise KeelError(f"the rules say {env_completion(Verdict(*problem.answer))!r}, not {env_completion(stated)!r}")
    return env_problem(fen, move, shown(moves[:-1]), draws, record.location)
