"""A program that speaks UCI and misbehaves as told."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

_SCRIPT = """#!{python}
import pathlib, sys, time
import chess
board, lines = chess.Board(), 1
for line in sys.stdin:
    words = line.split()
    if words[:1] == ["uci"]:
        print("id name Fake 1")
        print("option name MultiPV type spin default 1 min 1 max 500")
        print("uciok", flush=True)
    elif words[:1] == ["isready"]:
        print("readyok", flush=True)
    elif words[:3] == ["setoption", "name", "MultiPV"]:
        lines = int(words[-1])
    elif words[:2] == ["position", "fen"]:
        board = chess.Board(" ".join(words[2:8]))
    elif words[:2] == ["position", "startpos"]:
        board = chess.Board()
    elif words[:1] == ["quit"]:
        break
    elif words[:1] == ["go"]:
        {on_go}
        moves = sorted(m.uci() for m in board.legal_moves)[:lines]
        for number, move in enumerate(moves, 1):
            print(f"info depth 1 multipv {{number}} score cp {{number * 10}} pv {{move}}")
        print("bestmove", moves[0], flush=True)
"""


def fake_engine(folder: Path, on_go: str = "pass") -> str:
    """An engine that runs `on_go` before each answer; its scores get better down the list, as if out of order."""
    path = folder / "fake-engine"
    path.write_text(_SCRIPT.format(python=sys.executable, on_go=on_go))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
