"""`python -m keel.recipes.chess data|play`: make training data, play whole games."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from keel.base.errors import KeelError
from keel.cli import main
from keel.cli.app import ANY_OPTION, application, bar, print_json
from keel.recipes.chess.play import PLAY_HELP, play
from keel.recipes.chess.shards import make_shards

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
