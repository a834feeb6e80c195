"""Mate in one move: whether there is one, and how often a model finds it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from keel.base.types import Group
from keel.envs.chess.format import Padding, read_policy
from keel.envs.chess.rules import board_of, legal_moves


def mating_moves(fen: str) -> tuple[str, ...]:
    """The moves that mate at once, by the rules."""
    board = board_of(fen)
    mates = []
    for move in legal_moves(fen):
        board.push_uci(move)
        if board.is_checkmate():
            mates.append(move)
        board.pop()
    return tuple(mates)


def mate_in_one(groups: Sequence[Group], padding: Padding) -> dict[str, float]:
    """The share of completions whose best move mates, among positions where one does; nothing where there is none."""
    played = []
    for group in groups:
        mates = mating_moves(group.problem.info["fen"])
        played += [read_policy(c.text, padding).best in mates for c in group.completions] if mates else []
    return {"mate_in_one": fmean(played), "mate_in_one_positions": float(len(played))} if played else {}
