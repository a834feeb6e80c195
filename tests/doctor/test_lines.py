"""Growing files: incremental reads must return what one read of the whole file returns, after any changes."""

import json
import os

from hypothesis import given
from hypothesis import strategies as st

from keel.base.files import drop_lines_after
from keel.doctor.runs import GrowingLines

GOOD = st.builds(lambda step, text: json.dumps({"step": step, "text": text}), st.integers(0, 9), st.text(max_size=12))
LINE = st.one_of(GOOD, st.sampled_from(["", "  ", "[]", "not json", '{"step": 1', "\ufeff{}"]))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(LINE, min_size=1, max_size=4)),
        st.tuples(st.just("half a line"), LINE),
        st.tuples(st.just("cut"), st.integers(0, 9)),
        st.tuples(st.just("write anew"), st.lists(LINE, max_size=3)),
        st.tuples(st.just("delete"), st.none()),
    ),
    max_size=8,
)


def act(path, action, value):
    """Change the file as a trainer, a kill or a resume does."""
    if action == "append":
        with path.open("ab") as file:
            file.write("".join(f"{line}\n" for line in value).encode("utf-8", "replace"))
    elif action == "half a line":
        with path.open("ab") as file:
            data = value.encode("utf-8", "replace")
            file.write(data[: len(data) // 2 + 1])
    elif action == "cut":
        drop_lines_after(path, value)
    elif action == "write anew":  # the same inode, so that only its content can tell
        path.write_text("".join(f"{line}\n" for line in value), encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


@given(actions=ACTIONS, limit=st.sampled_from([None, 300]))
def test_reading_what_grows_is_reading_the_whole(tmp_path_factory, actions, limit):
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    growing = GrowingLines(path, limit)
    for action, value in actions:
        before = path.read_bytes() if path.exists() else None
        act(path, action, value)
        after = path.read_bytes() if path.exists() else None
        notes, fresh_notes = [], []
        records = growing.read(notes)
        fresh = GrowingLines(path, limit).read(fresh_notes)
        if limit is None:
            assert (records, notes) == (fresh, fresh_notes), (before, after)
        elif after is not None and len(after) <= 2 * limit:
            assert records == GrowingLines(path).read([])
        else:  # which lines of the middle are left out depends on when it was read, the ends do not
            whole = GrowingLines(path).read([])
            assert records[-1:] == whole[-1:]
            assert len(records) <= len(whole)


def test_only_what_is_new_is_read(tmp_path, monkeypatch):
    """A poll of a long file reads only the mark before the position and the appended lines."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "x": 0.5}) + "\n" for step in range(5000)))
    growing = GrowingLines(path)
    assert len(growing.read([])) == 5000
    with path.open("a") as file:
        file.write('{"step": 5000}\n{"step": 50')
    parsed = []
    monkeypatch.setattr("keel.doctor.runs.json_lines", lambda lines: parsed.extend(lines) or iter(()))
    growing.read([])
    assert [line for line in parsed if line] == [b'{"step": 5000}', b'{"step": 50']


def test_a_replaced_file_with_the_same_inode_is_told_by_its_content(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "run": "old"}\n')
    growing = GrowingLines(path)
    growing.read([])
    inode = path.stat().st_ino
    path.write_text('{"step": 1, "run": "new"}\n{"step": 2, "run": "new"}\n')
    assert path.stat().st_ino == inode
    assert [record["run"] for record in growing.read([])] == ["new", "new"]


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    folder = tmp_path / "metrics.jsonl"
    os.mkdir(folder)
    notes = []
    assert GrowingLines(folder).read(notes) == ()
    assert notes == ["metrics.jsonl cannot be read: Is a directory"]
