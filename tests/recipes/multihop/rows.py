"""Rows in MuSiQue's form for tests, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def row(**changes: Any) -> dict[str, Any]:
    """Two hops over four paragraphs: Miria wrote Amber Hall and was born in Old Ashford."""
    texts = [
        ("Harbour", "The harbour of Coldmouth is deep.", False),
        ("Miria Vane", "Miria Vane was born in Old Ashford.", True),
        ("Amber Hall", "Amber Hall is a novel by Miria Vane.", True),
        ("Ashford", "Ashford and Old Ashford are two towns.", False),
    ]
    return {
        "id": "2hop__1",
        "paragraphs": [
            {"idx": i, "title": title, "paragraph_text": text, "is_supporting": supporting}
            for i, (title, text, supporting) in enumerate(texts)
        ],
        "question": "Where was the author of Amber Hall born?",
        "question_decomposition": [
            {"question": "Amber Hall >> author", "answer": "Miria Vane", "paragraph_support_idx": 2},
            {"question": "Where was #1 born?", "answer": "Old Ashford", "paragraph_support_idx": 1},
        ],
        "answer": "Old Ashford",
        "answer_aliases": ["the town of Old Ashford"],
        "answerable": True,
        **changes,
    }


def three_hops() -> dict[str, Any]:
    found = row(id="3hop__1", question="Who leads the town where the author of Amber Hall was born?", answer="Bo Rand")
    found["paragraphs"] = [{**p, "is_supporting": p["idx"] in (1, 2, 3)} for p in found["paragraphs"]]
    return found


def written(path: Path, *rows: Any) -> str:
    """A JSONL file of the rows."""
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return str(path)
