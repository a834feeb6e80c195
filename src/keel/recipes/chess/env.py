"""`chess_env` (A:): predict the environment's answer to a move. `chess`: a mixture of it with `chess_policy`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from keel.base.errors import KeelError
from keel.base.types import Group, Problem, Reward
from keel.envs.mixture import Mixture, mixture
from keel.envs.problems import HELD_OUT_FRACTION
from keel.recipes.chess.format import (
    HISTORY,
    PaddingName,
    StepResult,
    env_completion,
    env_prompt,
    read_env,
    read_env_row,
    require_uci,
)
from keel.recipes.chess.policy import chess_policy
from keel.recipes.chess.positions import Pieces, Position, any_move, games_of
from keel.recipes.chess.rewards import Malformed, Parse, System, env_reward
from keel.recipes.chess.rules import Draws, board_of, legal_moves, next_positions, step
from keel.recipes.chess.task import ChessGrader, ChessRow, ChessTask, HeldOut, part_means, problems_of

Illegal = Annotated[float, Field(ge=0, lt=1)]
History = Annotated[int, Field(ge=1, le=HISTORY)]  # 1: only the move itself
ENV_PARTS = ("parsed", "structure", "fen_exact", "fen_similarity", "fen_progress", "reward_value", "flags")


@dataclass(frozen=True)
class EnvGrader(ChessGrader):
    """Grade A: answers by the rules; a problem's `answer` has the four fields of the correct result."""

    options: Mapping[str, Any] = field(default_factory=dict)

    def gold(self, problem: Problem) -> str:
        return env_completion(StepResult(*problem.answer))

    def reward(self, problem: Problem, text: str) -> Reward:
        return env_reward(read_env(text), StepResult(*problem.answer), problem.info["fen"], **self.options)

    def metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Means of the parts, and `legal`: the fraction of answers whose FEN is correct or follows a legal move."""
        legal: list[bool] = []
        for group in groups:
            possible = next_positions(group.problem.info["fen"]) | {group.problem.answer[0]}
            legal += [read_env(completion.text).fen in possible for completion in group.completions]
        return {**part_means(groups, ENV_PARTS, self.reward), "legal": fmean(legal)}


def env_problem(fen: str, move: str, before: Sequence[str], draws: str, key: str | None = None) -> Problem:
    """The A: problem of a move; `before` are the previous moves."""
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
    pieces: Pieces = None,
    illegal: Illegal = 0.05,
    history: History = HISTORY,
    draws: Draws = "claimed",
    system: System = "graduated",
    parse: Parse = "lenient",
    malformed: Malformed = None,
    held_out: HeldOut = HELD_OUT_FRACTION,
) -> ChessTask:
    """The task `chess_env`: positions of `data`, or of random games of `plies` [from, to] half-moves, from the
    starting position or from one of at most `pieces` pieces.

    `illegal` is the fraction of illegal moves, `history` the number of shown moves (1: only the move itself), `draws`
    claimed or automatic (see `rules.step`), `system` graduated or binary, `parse` lenient or strict, `malformed` the
    reward of an unreadable answer, `held_out` the fraction of positions (with data: also of games) for evaluation.
    """
    grader = EnvGrader({"system": system, "parse": parse, "malformed": malformed})

    def shown(moves: Sequence[str]) -> tuple[str, ...]:
        return tuple(moves[-(history - 1) :]) if history > 1 else ()

    def ask(rng: random.Random, position: Position) -> Problem:
        move = any_move(rng, legal_moves(position.fen), illegal)
        return env_problem(position.fen, move, shown(position.history), draws)

    def ask_of(record: ChessRow) -> Problem:
        return _env_problem_of_row(record, shown, draws)

    problems = problems_of("chess_env", "A: ", data, games_of(plies, pieces), ask, ask_of, held_out)
    return ChessTask(problems, grader, "chess_env")


def _env_problem_of_row(record: ChessRow, shown: Callable[[Sequence[str]], Sequence[str]], draws: str) -> Problem:
    """A row's problem. A text whose result differs from the rules is refused."""
    if record.text is None:
        board_of(record.fen)
        if not record.move:
            raise KeelError("it has no column 'move', which an A: row needs")
        return env_problem(record.fen, require_uci(record.move), shown(record.history), draws, record.location)
    fen, move, moves, stated = read_env_row(record.text)
    board_of(fen)
    problem = env_problem(fen, move, moves[:-1], draws, record.location)
    if (true := StepResult(*problem.answer)) != stated:
        raise KeelError(f"the rules give {env_completion(true)!r}, not {env_completion(stated)!r}")
    return env_problem(fen, move, shown(moves[:-1]), draws, record.location)


def chess(
    environment: Annotated[float, Field(ge=0, le=1)] = 0.2,
    data: Mapping[str, Any] | None = None,
    plies: Sequence[int] | None = None,
    pieces: Pieces = None,
    padding: PaddingName = "source",
    engine: Mapping[str, Any] | None = None,
    illegal: Illegal = 0.05,
    history: History = HISTORY,
    draws: Draws = "claimed",
    system: System = "graduated",
    parse: Parse = "lenient",
    malformed: Malformed = None,
    held_out: HeldOut = HELD_OUT_FRACTION,
) -> Mixture:
    """The task `chess`: `environment` is the fraction of A: problems, the others are P:.

    The other parameters are those of `chess_policy` and `chess_env`. In `data`, each of them reads its own rows.
    """
    both: dict[str, Any] = {
        "data": data,
        "plies": plies,
        "pieces": pieces,
        "system": system,
        "parse": parse,
        "malformed": malformed,
        "held_out": held_out,
    }
    tasks: list[Any] = []
    if environment < 1:
        tasks.append(chess_policy(padding=padding, engine=engine, **both))
    if environment > 0:
        tasks.append(chess_env(illegal=illegal, history=history, draws=draws, **both))
    weights = [w for w in (1 - environment, environment) if w > 0]
    return replace(mixture(tasks, weights), name="chess")
