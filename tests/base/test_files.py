"""One reader of JSON lines: what it takes, what it says of the rest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from keel.base.files import json_lines, read_json, read_records, unreadable_lines, write_atomic

LINES = (b'\xef\xbb\xbf{"a": 1}', b"  ", b'{"a": NaN}', b'[1, "x"]', b'{"a": "\xff"}', b'{"a": 2')


def test_every_line_is_a_record_or_says_why_it_is_none() -> None:
    lenient = dict(json_lines(LINES))
    assert lenient[1] == {"a": 1}  # the mark of UTF-8 is no part of the text
    assert 2 not in lenient  # blank
    assert isinstance(lenient[3], dict)
    assert lenient[4] == "a JSON list, not an object"
    assert lenient[5] == {"a": "\N{REPLACEMENT CHARACTER}"}
    assert str(lenient[6]).startswith("not JSON (")
    strict = dict(json_lines(LINES, strict=True))
    assert strict[1] == lenient[1]
    assert strict[3] == "not JSON (NaN is no JSON value)"
    assert strict[5] == "not UTF-8 (byte 8)"


def test_a_file_being_written_has_the_records_that_are_whole(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_records(path) == []
    path.write_bytes(b'{"step": 1}\nnull\n{"step": 2}\n{"st')
    assert read_records(path) == [{"step": 1}, {"step": 2}]
    assert unreadable_lines(path) == [2, 4]


def nested(depth: int) -> str:
    """JSON of so many objects within each other."""
    return '{"a": ' * depth + "1" + "}" * depth


@pytest.mark.parametrize(("depth", "read"), [(100, True), (101, False), (500, False), (100_000, False)])
def test_what_recursion_could_not_walk_is_no_record(depth, read, tmp_path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(nested(depth) + "\n")
    assert (len(read_records(file)), unreadable_lines(file)) == ((1, []) if read else (0, [1]))
    assert (read_json(file) is not None) == read


def test_threads_that_write_one_file_leave_one_of_their_texts(tmp_path) -> None:
    path = tmp_path / "state.json"
    texts = [letter * 20_000 for letter in "abcdefgh"]
    with ThreadPoolExecutor(len(texts)) as pool:
        for _ in range(20):
            list(pool.map(lambda text: write_atomic(path, text), texts))
            assert path.read_text() in texts
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
