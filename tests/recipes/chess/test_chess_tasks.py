"""The three tasks: sound, split by position and game, reading data by name, with figures of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import chess
import pytest

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.cli import main
from keel.envs import Task
from keel.envs.judge import Judge
from keel.envs.registry import build_task, check_task
from keel.envs.validity import check
from keel.eval.evaluate import summarise
from keel.recipes.chess.format import read_env_row, read_policy_row
from keel.recipes.chess.rules import identity, step

from .fake_engine import fake_engine
from .positions import random_game
from .stockfish import needs_stockfish

START = chess.STARTING_FEN


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, Any]:
    return {"path": fake_engine(tmp_path), "cache": str(tmp_path / "cache.sqlite"), "workers": 1}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"pieces": 4},
        {"pieces": 3, "plies": [0, 0], "illegal": 0.5},
        {"plies": [30, 40], "history": 1, "system": "binary", "parse": "strict", "malformed": -0.5},
        {"pieces": 5, "draws": "automatic", "held_out": 0.5},
    ],
    ids=str,
)
def test_the_environment_is_sound(params: dict[str, Any]) -> None:
    task = build_task("chess_env", **params)
    assert isinstance(task, Task)
    check(task, count=12)
    for problem in task.sample(12, seed=0, step=0):
        row = str(problem.prompt) + task.gold(problem)
        fen, move, history, verdict = read_env_row(row)
        assert step(fen, move, history[:-1], params.get("draws", "claimed")).verdict == verdict
        assert len(history) <= params.get("history", 10)
        assert task.reward(problem, [task.gold(problem)]).total == (1.0 if "system" in params else 1.5)
        if "pieces" in params:
            assert len(chess.Board(fen).piece_map()) <= params["pieces"]


def test_illegal_moves_come_as_often_as_asked() -> None:
    problems = build_task("chess_env", pieces=4, illegal=0.5).sample(100, seed=0, step=0)
    assert 30 < sum(p.answer[3] for p in problems) < 70
    assert not any(p.answer[3] for p in build_task("chess_env", pieces=4, illegal=0).sample(50, seed=0, step=0))


@pytest.mark.parametrize(
    "params", [{}, {"padding": "none", "pieces": 4}, {"system": "binary", "parse": "strict"}], ids=str
)
def test_the_policy_is_sound(params: dict[str, Any], fake: dict[str, Any]) -> None:
    task = build_task("chess_policy", engine=fake, **params)
    check(task, count=8)
    for problem in task.sample(8, seed=0, step=0):
        row = str(problem.prompt) + task.gold(problem)
        fen, analysis = read_policy_row(row)
        assert analysis.best == max(zip(analysis.evaluations, analysis.moves, strict=True))[1]
        assert fen == problem.info["fen"]
        assert task.reward(problem, [task.gold(problem)]).total == 1.0


def test_gold_moves_are_shuffled(fake: dict[str, Any]) -> None:
    task = build_task("chess_policy", engine=fake)
    places = set()
    for problem in task.sample(24, seed=0, step=0):
        _, analysis = read_policy_row(str(problem.prompt) + task.gold(problem))
        places.add(analysis.moves.index(analysis.best))
    assert places == {0, 1, 2, 3, 4}


@needs_stockfish
def test_check_task_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = f"engine.cache={tmp_path / 'cache.sqlite'}"
    for words in (["chess_env"], ["chess_policy", cache, "engine.nodes=1000"], ["chess", cache, "engine.nodes=1000"]):
        assert main(["check-task", *words, "--samples", "6", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ok"]


def test_the_mixture_has_both_in_proportion(fake: dict[str, Any]) -> None:
    task = build_task("chess", environment=0.25, engine=fake, pieces=4)
    assert task.name == "chess"
    check(task, count=16)
    held = task.held_out(40)
    assert sum(str(p.prompt).startswith("A: ") for p in held) == 10
    drawn = [p for step in range(10) for p in task.sample(40, seed=0, step=step)]
    assert 60 < sum(str(p.prompt).startswith("A: ") for p in drawn) < 140
    for share, mark in ((0, "P: "), (1, "A: ")):
        only = build_task("chess", environment=share, engine=fake, pieces=4)
        assert {str(p.prompt)[:3] for p in only.sample(8, seed=0, step=0)} == {mark}


def test_a_held_out_position_is_never_trained_on_by_any_task(fake: dict[str, Any]) -> None:
    env, policy = build_task("chess_env", pieces=3), build_task("chess_policy", pieces=3, engine=fake)
    held = {
        identity(p.info["fen"]) for task in (env, policy) for seed in range(2) for p in task.held_out(30, seed=seed)
    }
    for task in (env, policy):
        trained = {identity(p.info["fen"]) for s in range(6) for p in task.sample(30, seed=7, step=s)}
        assert not held & trained


# --------------------------------------------------------------------------------------------------------- data


def env_rows(count: int) -> list[dict[str, Any]]:
    """Moves of random games as columns, with the rules' own answers as text in `row`."""
    task = build_task("chess_env", pieces=4)
    rows = []
    for problem in task.sample(count, seed=3, step=0):
        rows.append({"text": str(problem.prompt) + task.gold(problem)})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


def test_rows_of_text(tmp_path: Path) -> None:
    rows = env_rows(60)
    task = build_task("chess_env", data=write(tmp_path / "rows.jsonl", rows))
    check(task, count=8)
    problems = [*task.sample(40, seed=0, step=0), *task.held_out(60)]
    assert {str(p.prompt) + task.gold(p) for p in problems} <= {row["text"] for row in rows}
    (note,) = task.notes  # type: ignore[attr-defined]
    assert sum(int(word) for word in note.replace(",", " ").split() if word.isdigit()) == 60


def test_columns_and_a_split_by_game(tmp_path: Path) -> None:
    rows = []
    for game in range(12):
        board = chess.Board()
        for after, move in random_game(game, 30):
            history = [m.uci() for m in after.move_stack[:-1]][-9:]
            rows.append({"fen": board.fen(), "move": move.uci(), "history": " ".join(history), "game": f"g{game}"})
            board = after.copy()
    data = write(tmp_path / "games.jsonl", rows)
    task = build_task("chess_env", data=data, held_out=3)
    check(task, count=8)
    by_place = {f"games.jsonl:{n}": row for n, row in enumerate(rows, 1)}
    held = {p.key for p in task.held_out(1000)}
    trained = {p.key.partition("#")[0] for p in task.sample(1000, seed=0, step=0)}
    assert {by_place[key]["game"] for key in held}.isdisjoint(by_place[key]["game"] for key in trained)
    assert {by_place[key]["fen"] for key in held}.isdisjoint(by_place[key]["fen"] for key in trained)
    assert len({by_place[key]["game"] for key in held}) == 3


def test_labels_of_data_need_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: dict[str, Any]) -> None:
    source = build_task("chess_policy", engine=fake, pieces=4)
    rows = [{"text": str(p.prompt) + source.gold(p)} for p in source.sample(40, seed=0, step=0)]
    monkeypatch.setenv("KEEL_STOCKFISH", str(tmp_path / "none"))
    data = write(tmp_path / "rows.jsonl", rows)
    task = build_task("chess_policy", data=data)
    check(task, count=6)
    golds = {str(p.prompt) + task.gold(p) for p in task.held_out(40)}
    assert all(read_policy_row(gold)[1].best in gold for gold in golds)
    both = write(tmp_path / "both.jsonl", [*rows, *env_rows(40)])
    check(build_task("chess", data=both, environment=0.5), count=6)
    fens = write(tmp_path / "fens.jsonl", [{"fen": START}, {"fen": "8/P6k/8/8/8/8/8/4K3 w - - 0 1"}])
    with pytest.raises(KeelError, match="none, which is not a program"):
        build_task("chess_policy", data=fens, held_out=1)


ROW = env_rows(1)[0]["text"]
ROOK = "7k/8/8/8/8/8/8/R6K w - - 3 3"
BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("chess_env", {"text": "hello"}, "broken.jsonl:2: column 'text' must start with 'P: ' or 'A: '"),
    ("chess_env", {"fen": "8/8 w - - 0 1", "move": "e2e4"}, "broken.jsonl:2: the FEN .* is broken: .*eight ranks"),
    ("chess_env", {"fen": "8/8/8/8/8/8/8/8 w - - 0 1", "move": "e2e4"}, "broken.jsonl:2: .*no white king"),
    ("chess_env", {"fen": START, "move": "Nf3"}, r"broken.jsonl:2: the move 'Nf3' is not in UCI .*SAN.*g1f3"),
    ("chess_env", {"fen": START}, "broken.jsonl:2: it has no column 'move'"),
    ("chess_env", {"fen": START, "move": "e2e4", "history": "Nf3"}, "broken.jsonl:2: the move 'Nf3'"),
    ("chess_env", {"fen": START, "move": "e2e4", "history": 5}, "broken.jsonl:2: its history is 5: give the previous"),
    ("chess_env", {"fen": START, "move": "e2e4", "history": ["e2e2"]}, "broken.jsonl:2: the move 'e2e2' does not"),
    ("chess_env", {"fen": START, "move": "e2e2"}, "broken.jsonl:2: the move 'e2e2' does not change the square"),
    (
        "chess_env",
        {"text": f"A: {ROOK}+a1a2+e5e5 a1a2+7k/8/8/8/8/8/R7/7K b - - 4 3+0.001+0+0"},
        "broken.jsonl:2: the move 'e5e5' does not change the square",
    ),
    ("chess_env", {"board": START}, "broken.jsonl:2: it has neither a text .* its columns are board"),
    (
        "chess_env",
        {"text": f"A: {START}+e2e4+e2e4+{START}+0.001+0+0"},
        "broken.jsonl:2: the rules give 'rnbqkbnr/.* not",
    ),
    ("chess_env", {"text": f"A: {START}+e2e4+{START}"}, "broken.jsonl:2: an environment row is"),
    ("chess_policy", {"text": f"P: {START} M: e2e5 E: 0.1 B: e2e5"}, "broken.jsonl:2: the move e2e5 is not legal"),
    (
        "chess_policy",
        {"text": f"P: {START} M: Nf3 E: 0.1 B: Nf3"},
        "broken.jsonl:2: .*'Nf3' is not a valid move in UCI",
    ),
    (
        "chess_policy",  # as if Black's evaluations were White's
        {"text": f"P: {START} M: e2e4 d2d4 E: 0.1 0.4 B: e2e4"},
        "broken.jsonl:2: the best move e2e4 does not have the highest evaluation: evaluations are for the side to move",
    ),
    ("chess_policy", {"fen": "7k/5Q2/5K2/8/8/8/8/8 b - - 1 1"}, "broken.jsonl:2: .*has no legal move"),
]


@pytest.mark.parametrize(("name", "row", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_broken_rows_are_named_or_left_out(name: str, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = write(tmp_path / "broken.jsonl", [{"text": ROW}, row])
    with pytest.raises(KeelError, match=message):
        build_task(name, data=data)
    rest = write(tmp_path / "rest.jsonl", [*env_rows(30), row])
    if name == "chess_env":
        task = build_task(name, data={**rest, "on_broken": "skip"})
        assert "1 broken rows skipped" in " ".join(task.notes)  # type: ignore[attr-defined]


def test_the_library_is_an_extra_and_imported_only_when_asked_for() -> None:
    code = (
        "import sys; from keel.envs.registry import check_task; assert 'chess' not in sys.modules\n"
        "sys.modules['chess'] = None\n"
        "from keel.base.errors import KeelError\n"
        "try: check_task('chess_env', {})\n"
        "except KeelError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "the task chess_env needs chess: pip install 'keel-rl[chess]'"
    check_task("chess_env", {"pieces": 4})


# ------------------------------------------------------------------------------------------------------ figures


def judged(task: Any, problem: Problem, texts: list[str], stop: str = "eos") -> Group:
    rewards = Judge.of(task).judge(problem, [[text] for text in texts])
    assert rewards is not None
    made = tuple(Completion((1,), (True,), (0.0,), (0.0,), text, stop) for text in texts)
    return Group(problem, (1,), made, rewards)


def test_figures_of_the_environment_by_hand() -> None:
    task = build_task("chess_env", pieces=4, illegal=0)
    problems = task.sample(2, seed=0, step=0)
    wrong = task.gold(problems[0]).replace("+0.001+0+0", "+0.001+1+0")
    groups = [
        judged(task, problems[0], [task.gold(problems[0]), wrong]),
        judged(task, problems[1], ["", "hello"], stop="length"),
    ]
    result = summarise(task, groups, [1])
    assert result.accuracy == 0.25
    assert result.extra == {
        "parsed": 0.5,
        "structure": 0.5,
        "fen_exact": 0.5,
        "fen_similarity": 0.5,
        "fen_progress": 0.5,
        "reward_value": 0.5,
        "flags": 0.25,
        "truncated_without_eos": 0.5,
        "legal": 0.5,
    }


def test_an_environments_answer_is_legal_where_some_move_leads_to_it() -> None:
    """By hand: the king on a1 has three moves; the other side's king stays where it is."""
    task = build_task("chess_env", pieces=3)
    fen = "7k/8/8/8/8/8/8/K7 w - - 0 1"
    asked, illegal = (
        Problem(move, "", (answer, 0.001, False, False), {"fen": fen, "move": move})
        for move, answer in (("a1a2", "7k/8/8/8/8/8/K7/8 b - - 1 1"), ("a1a3", fen))
    )
    texts = [
        "7k/8/8/8/8/8/K7/8 b - - 1 1",  # right
        "7k/8/8/8/8/8/8/1K6 b - - 1 1",  # another move
        "7k/8/8/8/8/8/8/1K6 w - - 1 1",  # the wrong side
        "7k/8/8/8/8/K7/8/8 b - - 1 1",  # two squares
        fen,  # unchanged, which is right after a move that is not legal
        "",
    ]
    answers = [text and f"{text}+0.001+0+0" for text in texts]
    for problem, share in ((asked, 2 / 6), (illegal, 3 / 6)):
        assert task.extra_metrics([judged(task, problem, answers)])["legal"] == share  # type: ignore[attr-defined]


def test_figures_of_the_policy_by_hand(fake: dict[str, Any]) -> None:
    """The fake engine gives 0.1 to 0.5 pawns to five moves in the order of their names, and 0.1 to a move alone."""
    task = build_task("chess_policy", engine=fake)
    problem = task.sample(1, seed=0, step=0)[0]
    best, *_, fifth = [move for move, _ in problem.info["lines"]]
    other = sorted(m.uci() for m in chess.Board(problem.info["fen"]).legal_moves)[-1]
    texts = [task.gold(problem), f" {fifth} E: 0.1 B: {fifth}", f" {other} E: 0.1 B: {other}", " a1a1 E: 0 B: a1a1"]
    extra = summarise(task, [judged(task, problem, texts)], [1]).extra
    assert best != fifth
    assert extra["top1"] == 0.25
    assert extra["legal_move_rate"] == 0.75
    assert extra["parsed"] == 1.0
    assert extra["top5"] == pytest.approx((1 + 0.2) / 4)
    assert extra["centipawn_loss"] == pytest.approx((0 + 40 + 40) / 3)
    assert extra["engine/unavailable"] == 0.0
    mixed = build_task("chess", engine=fake, environment=0.5, pieces=4)
    groups = [judged(mixed, p, [mixed.gold(p)]) for p in mixed.held_out(4)]
    found = summarise(mixed, groups, [1]).extra
    assert found["chess_policy/top1"] == found["chess_env/fen_exact"] == 1.0
