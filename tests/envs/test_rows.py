"""Reading a user's rows: every format gives the same problems, and what is wrong is named by its place."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from keel.base.errors import KeelError
from keel.envs.layouts import load_problems, source_of
from keel.envs.rows import read_rows

ROWS = [{"question": f"{a}+1=", "answer": str(a + 1), "level": a} for a in range(5)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def load(path: str | list[str], **options: Any) -> Any:
    return load_problems(source_of({"path": path, **options}))


def refused(path: str | list[str], **options: Any) -> str:
    with pytest.raises(KeelError) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------- formats


def test_every_format_gives_the_same_problems(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(json.dumps(ROWS))
    (tmp_path / "e.json").write_text(json.dumps({"version": 1, "rows": ROWS}))
    paths = [
        write_jsonl(tmp_path / "a.jsonl", ROWS),
        write_parquet(tmp_path / "b.parquet", ROWS),
        write_csv(tmp_path / "c.csv", ROWS),
        write_csv(tmp_path / "c.tsv", ROWS),
        str(tmp_path / "d.json"),
        str(tmp_path / "e.json"),
    ]
    for path in paths:
        problems = load(path).problems
        assert [p.prompt for p in problems] == [row["question"] for row in ROWS]
        assert [p.answer for p in problems] == [row["answer"] for row in ROWS]
        assert [str(p.info["level"]) for p in problems] == [str(row["level"]) for row in ROWS]


def test_places_are_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"question": "a", "answer": 1}\n\n{"question": "b", "answer": 2}\r\n', encoding="utf-8")
    assert [p.key for p in load(str(path)).problems] == ["a.jsonl:1", "a.jsonl:3"]
    table = tmp_path / "b.csv"
    table.write_text('question,answer\n"two\nlines",1\nb,2\n')
    assert [(p.key, p.prompt) for p in load(str(table)).problems] == [("b.csv:2", "two\nlines"), ("b.csv:4", "b")]


def test_a_folder_is_read_by_its_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS[:3])
    write_parquet(tmp_path / "test-00000-of-00001.parquet", ROWS[3:])
    assert len(load(str(tmp_path)).problems) == 3
    assert load(str(tmp_path), split="test").problems[0].key == "test-00000-of-00001.parquet:1"
    assert "train.jsonl" in refused(str(tmp_path), split="validation")
    (tmp_path / "none").mkdir()
    assert "has no data files" in refused(str(tmp_path / "none"))


@pytest.mark.parametrize("more", [False, True])
def test_a_split_that_a_file_does_not_have_is_refused(tmp_path: Path, more: bool) -> None:
    path = write_jsonl(tmp_path / "sums_test.jsonl", ROWS)
    assert len(load(path).problems) == len(load(path, split="test").problems) == len(ROWS)
    others = [write_jsonl(tmp_path / "tset.jsonl", ROWS)] if more else []
    message = refused([*others, path], split="tset")
    assert message.startswith(f"data.split=tset has no effect for {path}")


def test_a_folder_saved_by_datasets(tmp_path: Path) -> None:
    import datasets

    whole = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS[:4]), "test": datasets.Dataset.from_list(ROWS[4:])}
    )
    whole.save_to_disk(str(tmp_path / "both"))
    whole["train"].save_to_disk(str(tmp_path / "one"))
    assert len(load(str(tmp_path / "both")).problems) == 4
    assert len(load(str(tmp_path / "both"), split="test").problems) == 1
    assert len(load(str(tmp_path / "one")).problems) == 4
    assert "did you mean 'test'" in refused(str(tmp_path / "both"), split="tests")


def test_a_hub_name_asks_for_path_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load("someone/sums").problems[1].key == "sums/train:2"
    load("someone/sums,main", split="test")
    load("someone/sums,main,dev")
    assert asked == [
        (("someone/sums",), {"split": "train"}),
        (("someone/sums", "main"), {"split": "test"}),
        (("someone/sums", "main"), {"split": "dev"}),
    ]
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **o: 1 / 0)
    assert "cannot load data.path=someone/sums" in refused("someone/sums")


def test_several_files_keep_their_keys_apart(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    paths = [write_jsonl(tmp_path / "a.jsonl", ROWS[:2]), write_jsonl(tmp_path / "x" / "a.jsonl", ROWS[2:])]
    problems = load(paths).problems
    assert len({p.key for p in problems}) == 5


def test_files_of_equal_name_are_located_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("x", "y"):
        Path(folder).mkdir()
        for name in ("a.jsonl", "b.jsonl"):
            write_jsonl(Path(folder, name), ROWS[:2])
    with Path("y/b.jsonl").open("a") as file:
        file.write("cut\n")
    keys = [p.key for p in load(["x/a.jsonl", "y/a.jsonl"]).problems]
    assert keys == ["x/a.jsonl:1", "x/a.jsonl:2", "y/a.jsonl:1", "y/a.jsonl:2"]
    keys = [p.key for p in load(["x", "y"], on_broken="skip").problems]
    assert keys == [f"{folder}/{name}.jsonl:{line}" for folder in "xy" for name in "ab" for line in (1, 2)]
    assert refused(["x/b.jsonl", "y/b.jsonl"]).startswith("y/b.jsonl:3: ")
    for twice in (["x/a.jsonl", "x/a.jsonl"], ["x", "./x/a.jsonl"], ["x", str(tmp_path / "x")]):
        assert "twice" in refused(twice)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b'question,answer\na,1\n"b"x,2\n', 3),
        (b'question,answer\na,1\n"b\nc\n', 3),  # the row whose quotes are not closed
        (b'"question"x\n', 1),
        (b"question,answer\n" + b"a,1\n" * 5000 + b"\xff,1\n", 5002),
    ],
)
def test_the_line_of_invalid_csv(tmp_path: Path, text: bytes, line: int) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    assert refused(str(tmp_path / "a.csv")).startswith(f"{tmp_path / 'a.csv'}:{line}: ")


# ------------------------------------------------------------------------------------------------- layouts


def verl_rows() -> list[dict[str, Any]]:
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": row["question"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": i, "split": "train"},
        }
        for i, row in enumerate(ROWS)
    ]


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_verls_layout_as_it_is(tmp_path: Path, write: Any) -> None:
    loaded = load(write(tmp_path / ("v.parquet" if write is write_parquet else "v.jsonl"), verl_rows()))
    first = loaded.problems[0]
    assert first.prompt == [{"role": "user", "content": "0+1="}]
    assert [p.answer for p in loaded.problems] == [row["answer"] for row in ROWS]
    assert first.info["data_source"] == "openai/gsm8k"
    assert first.info["extra_info"] == {"index": 0, "split": "train"}
    assert first.info["reward_model"]["style"] == "rule"
    assert "verl's layout" in loaded.notes[0]


@pytest.mark.parametrize("answer", ["solution", "answer", "ground_truth", "completion"])
def test_trls_layouts_as_they_are(tmp_path: Path, answer: str) -> None:
    import datasets

    for prompt in (CHAT, "2+2?"):
        path = str(tmp_path / f"{answer}-{type(prompt).__name__}.parquet")
        datasets.Dataset.from_list([{"prompt": prompt, answer: "4", "kind": "sum"}] * 2).to_parquet(path)
        first = load(path).problems[0]
        assert (first.prompt, first.answer, first.info["kind"]) == (prompt, "4", "sum")


def test_a_conversational_completion_is_its_text(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT, "completion": [{"role": "assistant", "content": "4"}]}]
    assert load(write_jsonl(tmp_path / "a.jsonl", rows)).problems[0].answer == "4"


def test_messages_as_json_text_in_csv(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [{"question": json.dumps(CHAT), "answer": "4"}])
    assert load(path).problems[0].prompt == CHAT


def test_whole_conversations_end_with_the_answer(tmp_path: Path) -> None:
    rows = [{"messages": [*CHAT, {"role": "assistant", "content": "4"}], "id": 7}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    for columns in ({}, {"messages": "messages"}):
        problem = load(path, columns=columns).problems[0]
        assert (problem.prompt, problem.answer, problem.info) == (CHAT, "4", {"id": 7})
    rows = [{"messages": CHAT}]
    assert "does not end with the assistant's turn" in refused(write_jsonl(tmp_path / "b.jsonl", rows))


def test_named_columns_win(tmp_path: Path) -> None:
    rows = [
        {"question": "no", "prompt": "no", "ask": "yes", "a": {"b": {"c": "deep"}}, "answer": "no", "sys": "Short."}
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    found = load(path, columns={"prompt": "ask", "answer": "a.b.c", "system": "sys"})
    assert found.problems[0].prompt == [{"role": "system", "content": "Short."}, {"role": "user", "content": "yes"}]
    assert found.problems[0].answer == "deep"
    assert found.notes == ()
    assert "no column 'asks'" in refused(path, columns={"prompt": "asks"})


# ----------------------------------------------------------------------------------------------- bad input


def test_broken_lines_are_named_and_refused_unless_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps(ROWS[0]).encode()
    lines = [good, b'{"question": "cut', b"[1, 2]", b'{"question": "\xff", "answer": 1}', b'{"question": "x"}', good]
    path.write_bytes(b"\n".join(lines))
    message = refused(str(path))
    assert message.startswith("a.jsonl:2: not JSON")
    assert "3 more: a.jsonl:3, a.jsonl:4, a.jsonl:5" in message
    assert "data.on_broken=skip" in message
    loaded = load(str(path), on_broken="skip")
    assert [p.key for p in loaded.problems] == ["a.jsonl:1", "a.jsonl:6"]
    assert "4 broken rows skipped" in loaded.notes[0]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"question": NaN, "answer": 1}', "not JSON"),
        ('"text"', "a JSON text, not an object"),
        ('{"question": "", "answer": "1"}', "column 'question' is empty"),
        ('{"question": null, "answer": "1"}', "column 'question' is empty"),
        ('{"question": 3, "answer": "1"}', "int, not text"),
        ('{"question": [{"role": "user"}], "answer": "1"}', "without a role or a text content"),
        ('{"question": "a", "answer": null}', "column 'answer' is empty"),
        ('{"question": "a", "answer": "  "}', "column 'answer' is empty"),
        ('{"answer": "a"}', "column 'question' is missing"),
    ],
)
def test_each_broken_row_says_why(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    message = refused(str(path))
    assert message.startswith("a.jsonl:2: ")
    assert why in message


def test_csv_with_another_number_of_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer\na,1\nb\nc,3,4\n")
    assert refused(str(path)).startswith("a.csv:3: 1 fields, but the header has 2 columns")
    assert len(load(str(path), on_broken="skip").problems) == 1
    path.write_text("question,question\na,1\n")
    assert "occurs twice" in refused(str(path))


def test_missing_columns_are_named_with_those_that_exist(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"questions": "a", "answer": "1"}])
    message = refused(path)
    assert "no column 'question'" in message
    assert "did you mean data.columns.prompt=questions?" in message
    assert "it has questions, answer" in message
    path = write_jsonl(tmp_path / "b.jsonl", [{"question": "a", "out": {"result": "1"}}])
    message = refused(path)
    assert "no column 'answer' for the answer: set data.columns.answer, or data.columns.answer=null" in message
    assert "it has question, out" in message
    assert "did you mean data.columns.answer=out.result?" in refused(path, columns={"answer": "out.results"})


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json", "b.csv"])
def test_an_empty_dataset(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text({"a.json": "[]", "b.csv": "question,answer\n"}.get(name, ""))
    assert "is empty" in refused(str(tmp_path / name))


def test_all_rows_broken(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "", "answer": "1"}])
    assert "no usable row" in refused(path, on_broken="skip")


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([1, "two", [3]], "a number at a.jsonl:1, a text at a.jsonl:2, a list at a.jsonl:3"),
        ([True, 1], "a boolean at a.jsonl:1, a number at a.jsonl:2"),
        ([{"value": 1}], "has objects (a.jsonl:1): name the field"),
        ([["a", 1]], "a.jsonl:1: the list in column 'answer' mixes types"),
    ],
)
def test_mixed_types_of_answers(tmp_path: Path, answers: list[Any], says: str) -> None:
    rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(answers)]
    assert says in refused(write_jsonl(tmp_path / "a.jsonl", rows), on_broken="skip")


def test_whole_and_decimal_numbers_are_one_type(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate([1, 2.5])]
    assert [p.answer for p in load(write_jsonl(tmp_path / "a.jsonl", rows)).problems] == [1, 2.5]


def test_files_that_are_not_there_or_not_what_they_say(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "mine.jsonl", ROWS)
    assert "did you mean" in refused(str(tmp_path / "mein.jsonl"))
    assert "file nowhere.csv not found" in refused("nowhere.csv")
    (tmp_path / "a.parquet").write_text("no")
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "a.txt").write_text("hello")
    assert "cannot read" in refused(str(tmp_path / "a.parquet"))
    assert "not JSON" in refused(str(tmp_path / "a.json"))
    assert "use one of .jsonl" in refused(str(tmp_path / "a.txt"))
    assert "give data.path" in refused(None)  # type: ignore[arg-type]
    assert read_rows(str(tmp_path / "mine.jsonl")).columns == ("question", "answer", "level")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    import datasets

    def retries(*words: Any, **options: Any) -> Any:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", retries)
    level = logging.getLogger("huggingface_hub").level
    assert "cannot load data.path=nobody/nothing" in refused("nobody/nothing")
    assert not caplog.records
    assert logging.getLogger("huggingface_hub").level == level
