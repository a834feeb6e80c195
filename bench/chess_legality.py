"""What chess models play: legal moves, right best moves and mates in one, each with its 95 % interval.

    python bench/chess_legality.py configs/chess_policy.yaml runs/chess-policy@warmstart runs/chess-policy

Each model is a run, a run at some time (@start, @warmstart, @best, @STEP) or a folder. All of them answer the same
held-out positions of the configuration's task, and the same mates in one of three pieces (queen or rook), of which no
position is trained on either; one answer each, at temperature 1 unless told otherwise. What is counted are the moves,
so models trained on different rewards compare.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from itertools import islice

import chess

from keel.base.types import Problem
from keel.config import Config, load_config
from keel.envs import Task
from keel.envs.judge import Judge
from keel.envs.problems import HELD_OUT_FRACTION, is_held_out
from keel.eval.evaluate import EvalResult, evaluate
from keel.eval.statistics import wilson
from keel.recipes.chess.format import LINES, Padding, padding_of, policy_prompt
from keel.recipes.chess.policy import PuzzleGrader
from keel.recipes.chess.rules import fen_of, identity, mating_moves
from keel.recipes.chess.task import ChessTask
from keel.rollout.collect import Collector
from keel.rollout.registry import build_engine
from keel.rollout.render import Renderer
from keel.rollout.sampling import SamplingParams
from keel.run.build import build_named_task
from keel.run.model_ref import resolve_model


def mates_in_one(padding: Padding, seed: int = 0) -> Iterator[Problem]:
    """Held-out positions of two kings and a queen or rook of the side to move, where some move mates, each once."""
    rng, drawn = random.Random(seed), set[str]()
    while True:
        board = chess.Board(None)
        board.turn = rng.random() < 0.5
        king, other, third = rng.sample(range(64), 3)
        board.set_piece_at(king, chess.Piece(chess.KING, board.turn))
        board.set_piece_at(other, chess.Piece(chess.KING, not board.turn))
        board.set_piece_at(third, chess.Piece(rng.choice((chess.QUEEN, chess.ROOK)), board.turn))
        fen = fen_of(board)
        if fen in drawn or not is_held_out(identity(fen), HELD_OUT_FRACTION):
            continue
        drawn.add(fen)
        if board.is_valid() and mating_moves(fen):
            yield Problem(fen, policy_prompt(fen, padding), answer=mating_moves(fen), info={"fen": fen})


def share(task: Task, result: EvalResult, part: str, samples: int = 1) -> str:
    """The mean of one part of the task's own reward over the answers, with Wilson's interval."""
    values = [task.reward(g.problem, [c.text]).parts[part] for g in result.groups for c in g.completions]
    low, high = wilson(values, samples)
    return f"{100 * sum(values) / len(values):.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def answered(config: Config, task: Task, problems: Sequence[Problem], model: str, temperature: float) -> EvalResult:
    loaded = resolve_model(model).load()
    engine = build_engine(config.rollout, loaded.model, loaded.tokenizer)
    sampling = SamplingParams.of(config.rollout)
    collector = Collector(engine, task, Renderer(loaded.tokenizer), sampling, Judge.of(task))
    return evaluate(collector, problems, temperature=temperature)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--mates", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    config = load_config(args.config)
    task = build_named_task(config.task, config)
    padding = padding_of(config.task.params.get("padding", "source"))
    puzzles = ChessTask(task, PuzzleGrader(padding), "mates in one")
    held, mates = task.held_out(args.samples), list(islice(mates_in_one(padding), args.mates))
    print("| model | moves that are legal | the best move is legal | the best move is right | mates in one found |")
    print("| --- | --- | --- | --- | --- |")
    for model in args.models:
        played = answered(config, task, held, model, args.temperature)
        mated = answered(config, puzzles, mates, model, args.temperature)
        figures = [
            share(task, played, "legal", LINES),
            share(task, played, "best_legal"),
            share(task, played, "best"),
            share(puzzles, mated, "correct"),
        ]
        print(f"| {model} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
