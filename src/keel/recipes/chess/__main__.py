"""`python -m keel.recipes.chess data|play`: make training data, play whole games against an opponent."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from keel.base.errors import KeelError, unknown
from keel.cli import main
from keel.cli.app import ANY_OPTION, application, bar, print_json, split
from keel.recipes.chess.make import make_shards

OPPONENTS = ("random", "stockfish")
PLAY_HELP = """Let a model play whole games of chess with the best move of its P: answers.

Colours alternate, and each pair of games starts with the same random moves. An answer without a legal best move loses
the game and counts as a forfeit. Prints wins, draws, losses and the score (draw: 0.5) with its 95 % Wilson interval.

Examples:

  python -m keel.recipes.chess play runs/chess --opponent random --games 20 --pgn games.pgn

  python -m keel.recipes.chess play ./my-model --opponent stockfish --nodes 1000 --games 10 --svg boards --temperature 0
"""


def play(
    args: Annotated[
        list[str], typer.Argument(metavar="MODEL|RUN|CONFIG [KEY=VALUE]...", help="The model, and its options.")
    ],
    opponent: Annotated[str, typer.Option(metavar="random|stockfish", help="The opponent.")] = "random",
    nodes: Annotated[int | None, typer.Option(help="Stockfish nodes per move (default: 1000).")] = None,
    games: Annotated[int, typer.Option(min=1, help="Number of games, played concurrently.")] = 10,
    opening_plies: Annotated[int, typer.Option(min=0, help="Random moves at the start of a game.")] = 4,
    max_plies: Annotated[int, typer.Option(min=1, help="Game length after which it is a draw.")] = 200,
    padding: Annotated[str, typer.Option(help="source or none, as in training.")] = "source",
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint of a run: best, start, warmstart or a step.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum answer length.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of openings, random mover and sampling.")] = 0,
    pgn: Annotated[Path | None, typer.Option(metavar="FILE.pgn", help="Write the games to this file.")] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write each game's last position to this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
) -> int:
    if opponent not in OPPONENTS:
        raise unknown("--opponent", opponent, OPPONENTS)
    if nodes is not None and opponent != "stockfish":
        raise KeelError("--nodes needs --opponent stockfish: add it, or leave --nodes out")
    if pgn is not None and not pgn.parent.is_dir():
        raise KeelError(f"cannot write {pgn}: the folder {pgn.parent} does not exist")
    paths, overrides = split(args)
    if len(paths) != 1:
        raise KeelError(f"chess play takes one model, run or configuration, not {len(paths)}: {' '.join(paths)}")
    try:
        from keel.recipes.chess import matches
    except ImportError as error:
        raise KeelError(f"chess play needs {error.name}: pip install 'keel-rl[chess]'") from error
    opponent_player, opponent_name, at_once = _opponent(opponent, nodes or 1000, seed)
    model = _model(paths[0], overrides, checkpoint, padding, temperature, max_tokens, seed)
    with model as (player, name), bar() as watch:
        played = matches.play_games(
            player,
            opponent_player,
            games,
            opening_plies=opening_plies,
            max_plies=max_plies,
            seed=seed,
            at_once=at_once,
            on_finished=watch(f"{name} against {opponent_name}", games),
        )
    data = _figures(played, name, opponent_name)
    if pgn is not None:
        from keel.base.files import write_atomic

        write_atomic(pgn, "\n\n".join(game.pgn(name, opponent_name) for game in played) + "\n")
    if svg is not None:
        _draw(played, svg)
    if as_json:
        print_json(data)
    else:
        _show(data)
        for path in filter(None, (pgn, svg)):
            typer.echo(f"wrote {path}")
    return 0


def _opponent(opponent: str, nodes: int, seed: int) -> tuple[Any, str, int]:
    """The opponent, its name, and the number of games that it plays at the same time."""
    from keel.recipes.chess import matches

    if opponent == "random":
        return matches.random_mover(seed), "a random mover", 1
    from keel.recipes.chess.engine import engine_options, pool_of

    pool = pool_of(engine_options({"nodes": nodes}))
    return matches.engine_mover(pool), f"{pool.name} ({nodes} nodes)", pool.workers


@contextmanager
def _model(
    source: str,
    overrides: list[str],
    checkpoint: str | None,
    padding: str,
    temperature: float,
    max_tokens: int,
    seed: int,
) -> Iterator[tuple[Any, str]]:
    """The model as a player: one P: prompt per game and move, for all games at once."""
    from keel.recipes.chess.format import padding_of, read_policy
    from keel.recipes.chess.policy import policy_problem
    from keel.recipes.chess.rules import fen_of
    from keel.rollout import Request, SamplingParams
    from keel.rollout.registry import build_engine
    from keel.run.model_ref import resolve_model
    from keel.run.parts import build_renderer

    widths = padding_of(padding)
    model_ref = resolve_model(source, overrides, checkpoint)
    loaded = model_ref.load()
    renderer = build_renderer(model_ref.config, loaded.tokenizer)
    changes = {"temperature": temperature, "max_completion_length": max_tokens, "num_generations": 1}
    sampling = SamplingParams.of(model_ref.config.rollout, **changes)

    def moves(games: Sequence[Any]) -> list[str | None]:
        keys = [f"game {game.number}, ply {len(game.board.move_stack)}" for game in games]
        problems = [policy_problem(fen_of(g.board), widths, key) for g, key in zip(games, keys, strict=True)]
        requests = [Request(problem.key, renderer.prompt(problem)) for problem in problems]
        completions = engine.generate(requests, sampling, seed=seed)
        return [read_policy(samples[0].text, widths).best for samples in completions]

    with closing(build_engine(model_ref.config.rollout, loaded.model, loaded.tokenizer)) as engine:
        yield moves, model_ref.name


def _figures(played: Sequence[Any], name: str, opponent: str) -> dict[str, Any]:
    from keel.eval.statistics import wilson
    from keel.recipes.chess.matches import tally

    scores = [game.score for game in played if game.score is not None]
    return {
        "model": name,
        "opponent": opponent,
        **tally(played),
        "score": sum(scores) / len(scores) if scores else None,
        "ci95": list(wilson(scores)) if scores else None,
        "plies_mean": sum(len(game.board.move_stack) for game in played) / len(played),
        "ends": [{"game": g.number + 1, "result": g.result, "reason": g.reason} for g in played],
    }


def _draw(played: Sequence[Any], folder: Path) -> None:
    from keel.base.files import write_atomic
    from keel.recipes.chess.task import board_picture

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KeelError(f"cannot make the folder {folder}: {error.strerror}") from error
    for game in played:
        write_atomic(folder / f"game-{game.number + 1:03d}.svg", board_picture(game.board))


def _show(data: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    title = escape(f"{data['model']} against {data['opponent']}")
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0)
    counts = ("games", "wins", "draws", "losses", "forfeits", "unfinished")
    for name in (*counts, "score [95 %]", "plies"):
        table.add_column(escape(name), justify="right", no_wrap=True)
    score = "–" if data["score"] is None else f"{data['score']:.3f} [{data['ci95'][0]:.3f}, {data['ci95'][1]:.3f}]"
    table.add_row(*(str(data[name]) for name in counts), escape(score), f"{data['plies_mean']:.1f}")
    Console().print(table)
    reasons: dict[str, int] = {}
    for end in data["ends"]:
        reason = "illegal move" if end["reason"].startswith("illegal") else end["reason"]
        reasons[reason] = reasons.get(reason, 0) + 1
    typer.echo("ends: " + json.dumps(reasons, ensure_ascii=False).strip("{}").replace('"', ""))


app = application("python -m keel.recipes.chess", "Chess: make training data, play whole games.")
app.command(name="play", help=PLAY_HELP, context_settings=ANY_OPTION)(play)

DATA_HELP = """Make chess rows: A: (the environment's answer to a move) and P: (an analysis, labelled by Stockfish).

Positions come from random legal games, engine self-play and the lines of an openings file. Positions are unique; games
are split into OUT/train.jsonl and OUT/held_out.jsonl as the tasks split them. Every row is parsed again and must earn
the full reward. After an interruption, repeat the command: it continues and produces the same files. Train on them
with warmstart.path=OUT/train.jsonl, or data.path='[OUT/train.jsonl, OUT/held_out.jsonl]'.

Examples:

  python -m keel.recipes.chess data --out data/chess --rows 100000 --jobs 2

  python -m keel.recipes.chess data --out data/few --rows 20000 --max-pieces 3 --plies 4 --history 1

  python -m keel.recipes.chess data --out data/play --kind both --games random,engine,openings --openings openings.tsv
"""


@app.command(name="data", help=DATA_HELP)
def data(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder.")],
    kind: Annotated[str, typer.Option(metavar="a|p|both", help="Which rows; p and both need Stockfish.")] = "a",
    rows: Annotated[int, typer.Option(min=1, help="Total number of rows in both splits.")] = 10_000,
    games: Annotated[
        str, typer.Option(metavar="NAME[,NAME]...", help="Sources of games, used in turn: random, engine, openings.")
    ] = "random",
    openings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Table with a column uci or pgn; games continue at random.")
    ] = None,
    max_pieces: Annotated[
        int | None, typer.Option(help="Games start from random positions of 3 to this many pieces.")
    ] = None,
    plies: Annotated[
        int | None, typer.Option(help="Maximum game length (default: 80, or 12 with --max-pieces).")
    ] = None,
    history: Annotated[int, typer.Option(help="Moves shown in an A: prompt, 1 to 10.")] = 10,
    illegal: Annotated[float, typer.Option(help="Fraction of A: rows with an illegal move.")] = 0.05,
    draws: Annotated[str, typer.Option(help="claimed or automatic, as in the task.")] = "claimed",
    padding: Annotated[str, typer.Option(help="source or none, as in the task.")] = "source",
    nodes: Annotated[int, typer.Option(help="Engine nodes per position.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of the games.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a sentence.")] = False,
) -> int:
    try:
        from keel.recipes.chess.make import MakeOptions, check_options, shard
    except ImportError as error:
        raise KeelError(f"chess data needs {error.name}: pip install 'keel-rl[chess]'") from error
    names = tuple(dict.fromkeys(name.strip() for name in games.split(",") if name.strip()))
    if openings is not None and "openings" not in names:
        names = (*names, "openings")
    options = MakeOptions(
        kind=kind,
        games=names,
        openings=None if openings is None else str(openings.expanduser().resolve()),
        max_pieces=max_pieces,
        plies=plies,
        history=history,
        illegal=illegal,
        draws=draws,
        padding=padding,
        nodes=nodes,
        seed=seed,
    )
    check_options(options)
    settings: dict[str, Any] = {"data": "chess", **asdict(options), "games": list(options.games)}
    start = time.monotonic()
    with bar() as watch:
        made = make_shards(out, settings, partial(shard, options), rows=rows, jobs=jobs, on_rows=watch("rows", rows))
    seconds = time.monotonic() - start
    fresh = made.train + made.held_out - made.found
    rate = round(60 * fresh / max(seconds, 1e-9))
    if as_json:
        print_json({"out": str(out), **asdict(made), "seconds": round(seconds, 3), "rows_per_minute": rate})
        return 0
    speed = f"{fresh:,} rows in {seconds:.1f} s, {rate:,} a minute" if fresh else "all rows existed"
    already = f" ({made.found:,} existed already)" if made.found and fresh else ""
    typer.echo(f"{out}: {made.train:,} training rows, {made.held_out:,} held out; {speed}{already}")
    typer.echo(f"{made.duplicates:,} rows dropped as duplicate positions")
    if made.unavailable:
        typer.echo(f"{made.unavailable:,} P: rows are missing because the engine failed on their positions")
    return 0


if __name__ == "__main__":
    sys.exit(main(app=app))
