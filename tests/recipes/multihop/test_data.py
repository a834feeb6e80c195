"""Rows, hub names, noise, hop filters, the curriculum; and rows that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keel.base.errors import KeelError
from keel.envs.layouts import source_of
from keel.envs.registry import build_task
from keel.envs.validity import check
from keel.recipes.multihop.question import read_questions

from .rows import row, three_hops, written


def many(count: int = 40) -> list[dict[str, Any]]:
    """Questions of two and of three hops in turn, all different."""
    rows = []
    for i in range(count):
        base = row() if i % 2 else three_hops()
        rows.append({**base, "id": f"r{i}", "question": f"{base['question']} ({i})", "answer": f"answer {i}"})
    return rows


def test_a_row_becomes_a_question_with_its_chain_in_order(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", row())
    (question,) = read_questions(source_of({"path": path}), 1.0).questions
    assert question.chain == ("2", "1")  # the order of the decomposition
    assert question.hops == 2
    assert question.answers == ("Old Ashford", "the town of Old Ashford")
    assert [one.id for one in question.documents] == ["0", "1", "2", "3"]


def test_rows_are_sound_as_a_task(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", *many())
    check(build_task("multihop", data={"path": path}, retriever="golden"), count=4)


@pytest.mark.parametrize(
    ("spec", "count"),
    [("{}", 40), ("{}[:5]", 5), ("{}[3:5]", 2), ("{}[38:]", 2), ("{}:7", 7), ("{}[:2] ; {}[2:4]", 4)],
)
def test_parts_of_files_and_several_of_them(tmp_path: Path, spec: str, count: int) -> None:
    path = written(tmp_path / "a.jsonl", *many())
    loaded = read_questions(source_of({"path": spec.replace("{}", path)}), 1.0)
    assert len(loaded.questions) == count
    assert len({question.key for question in loaded.questions}) == count


def test_hub_names_with_a_part_of_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, *name: str, split: str) -> list[Mapping[str, Any]]:
        asked.append((path, *name, split))
        return many(10)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    hub = "bdsaglam/musique-mini,answerable,train[:3];bdsaglam/musique,answerable,validation"
    loaded = read_questions(source_of({"path": hub}), 1.0)
    assert asked == [
        ("bdsaglam/musique-mini", "answerable", "train"),
        ("bdsaglam/musique", "answerable", "validation"),
    ]
    assert len(loaded.questions) == 13


def test_an_empty_part_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", row())
    with pytest.raises(KeelError, match="selects no rows"):
        read_questions(source_of({"path": f"{path}[5:]"}), 1.0)


def test_broken_rows_beyond_a_part_do_not_count_and_the_first_is_named(tmp_path: Path) -> None:
    """Lines 2 and 5 are no JSON, line 3 has no paragraphs: a part counts lines as they stand in the file."""
    good = [json.dumps(one) for one in many(4)]
    lines = [good[0], "{", json.dumps(row(paragraphs=[])), good[1], "not JSON", good[2], good[3]]
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def read(part: str, on_broken: str = "skip") -> Any:
        return read_questions(source_of({"path": f"{path}{part}", "on_broken": on_broken}), 1.0)

    assert [q.key for q in read("[:1]", "error").questions] == ["r0"]
    assert [q.key for q in read("[5:]", "error").questions] == ["r2", "r3"]
    assert [q.key for q in read("[1:4]").questions] == ["r1"]
    assert read("[1:4]").notes[0].endswith("2 broken rows skipped (data.on_broken=skip), the first at bad.jsonl:2")
    assert read("[2:6]").notes[0].endswith("the first at bad.jsonl:3")
    assert read("").notes[0].endswith("3 broken rows skipped (data.on_broken=skip), the first at bad.jsonl:2")
    with pytest.raises(KeelError, match=r"bad\.jsonl:3: .*'paragraphs' is empty \(1 more: bad\.jsonl:5\)"):
        read("[2:]", "error")
    with pytest.raises(KeelError, match="has 7"):
        read("[7:]")


def without_support() -> dict[str, Any]:
    return row(paragraphs=[{**p, "is_supporting": False} for p in row()["paragraphs"]])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (without_support(), "it has no supporting paragraph"),
        (row(paragraphs=[]), "'paragraphs' is empty"),
        (row(paragraphs=None), "'paragraphs' is empty"),
        (row(paragraphs=[{"title": "x"}]), "paragraph 0 has no paragraph_text"),
        (row(paragraphs=[*row()["paragraphs"], row()["paragraphs"][0]]), "the same idx"),
        (row(answer=None, answer_aliases=[]), "column 'answer' is empty"),
        (row(answer="  ", answer_aliases=None), "column 'answer' is empty"),
        (row(question=" "), "column 'question' is empty"),
    ],
)
def test_rows_that_cannot_be_used_are_named_or_counted(tmp_path: Path, broken: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "a.jsonl", row(), broken)
    with pytest.raises(KeelError, match=rf"a\.jsonl:2: .*{message}"):
        read_questions(source_of({"path": path}), 1.0)
    loaded = read_questions(source_of({"path": path, "on_broken": "skip"}), 1.0)
    assert len(loaded.questions) == 1
    assert "1 broken rows skipped" in loaded.notes[0]
    with pytest.raises(KeelError, match="no usable row"):
        read_questions(source_of({"path": written(tmp_path / "b.jsonl", broken), "on_broken": "skip"}), 1.0)


def test_an_answer_column_that_is_a_list_accepts_each(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", row(answer=["Old Ashford", 7], answer_aliases=[]))
    assert read_questions(source_of({"path": path}), 1.0).questions[0].answers == ("Old Ashford", "7")


def test_noise_keeps_a_share_of_the_distractors_and_all_support(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", *many(400))
    kept = {rate: read_questions(source_of({"path": path}), rate).questions for rate in (0.0, 0.3, 1.0)}
    for rate, questions in kept.items():
        assert all(question.document(id) for question in questions for id in question.chain)
        distractors = [one for q in questions for one in q.documents if not one.supporting]
        assert len(distractors) / 600 == pytest.approx(rate, abs=0.06)  # 600 in all, three standard errors
    assert kept[0.3] == read_questions(source_of({"path": path}), 0.3).questions


def test_hop_filters(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", *many())
    task = build_task("multihop", data={"path": path}, hops=3)
    assert {problem.info["hops"] for problem in task.sample(20, seed=0, step=0)} == {3}
    with pytest.raises(KeelError, match=r"no question of \[4\] hops: it has \[2, 3\]"):
        build_task("multihop", data={"path": path}, hops=[4])


@pytest.mark.parametrize("rows", [True, False])
def test_the_curriculum_begins_with_short_chains(tmp_path: Path, rows: bool) -> None:
    data = {"data": {"path": written(tmp_path / "a.jsonl", *many())}} if rows else {"hops": [2, 3]}
    task = build_task("multihop", curriculum_steps=10, **data)
    assert [task.hops_at(step) for step in (0, 4, 5, 10, 99)] == [(2,), (2,), (2, 3), (2, 3), (2, 3)]
    assert {p.info["hops"] for p in task.sample(16, seed=0, step=4)} == {2}
    assert {p.info["hops"] for p in task.sample(16, seed=0, step=5)} == {2, 3}
    assert {p.info["hops"] for p in task.held_out(64)} == {2, 3}
