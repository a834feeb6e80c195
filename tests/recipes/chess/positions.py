"""Positions of random legal games, made here and not by the task's own generator."""

from __future__ import annotations

import random
from collections.abc import Iterator

import chess


def random_game(seed: int, most: int = 120) -> Iterator[tuple[chess.Board, chess.Move]]:
    """Each move of one random game, with the board after it."""
    rng = random.Random(seed)
    board = chess.Board()
    for _ in range(most):
        moves = list(board.legal_moves)
        if not moves:
            return
        move = rng.choice([m for m in moves if m.promotion] or moves)  # promotions come too seldom by chance alone
        board.push(move)
        yield board, move
