"""`chess`: a mixture of `chess_policy` and `chess_env` for one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from keel.base.errors import KeelError
from keel.envs.mixture import Mixture, mixture
from keel.envs.problems import HELD_OUT_FRACTION
from keel.recipes.chess.env import chess_env
from keel.recipes.chess.format import HISTORY, is_real
from keel.recipes.chess.policy import chess_policy


def chess(
    environment: float = 0.2,
    data: Mapping[str, Any] | None = None,
    plies: Sequence[int] | None = None,
    pieces: int | None = None,
    padding: str = "source",
    engine: Mapping[str, Any] | None = None,
    illegal: float = 0.05,
    history: int = HISTORY,
    draws: str = "claimed",
    system: str = "graduated",
    parse: str = "lenient",
    malformed: float | None = None,
    held_out: int | float = HELD_OUT_FRACTION,
) -> Mixture:
    """The task `chess`: `environment` is the fraction of A: problems, the others are P:.

    The other parameters are those of `chess_policy` and `chess_env`. In `data`, each of them reads its own rows.
    """
    if not (is_real(environment) and 0 <= environment <= 1):
        raise KeelError(f"chess environment is {environment!r}: it must be a fraction from 0 to 1")
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
