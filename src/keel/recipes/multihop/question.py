"""A question with its documents, and the parsing of rows in MuSiQue's format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keel.base.errors import KeelError
from keel.envs.options import SourceOptions
from keel.envs.problems import seeded_rng
from keel.envs.rows import BrokenRow, DataRow, handle_broken_rows, read_rows, row_order

_SLICE = re.compile(r"(?P<path>.*?)(?:\[(?P<low>\d*):(?P<high>\d*)\]|:(?P<first>\d+))?")


@dataclass(frozen=True)
class Document:
    """A document that a retriever may return."""

    id: str
    title: str
    text: str
    supporting: bool = False

    def __str__(self) -> str:
        return f"Document ID: {self.id}\n# {self.title}\n{self.text}"


@dataclass(frozen=True)
class SubQuestion:
    """One hop: its question (`#1` is the first hop's answer), its answer, and the id of its document."""

    question: str
    answer: str
    document: str


@dataclass(frozen=True)
class Question:
    """A question, its answer and aliases, its documents, and the ids of the supporting ones in the chain's order.

    The decomposition, if the data have one, is only used for demonstrations and never shown.
    """

    key: str
    text: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]
    chain: tuple[str, ...]
    decomposition: tuple[SubQuestion, ...] = field(default=(), repr=False)  # not a part of the data's digest

    @property
    def hops(self) -> int:
        return len(self.chain)

    def document(self, id: str) -> Document | None:
        return next((document for document in self.documents if document.id == id), None)


@dataclass(frozen=True)
class Questions:
    """Questions in the data's order, and notes on how they were read."""

    source: str
    questions: tuple[Question, ...]
    notes: tuple[str, ...] = ()


def read_questions(source: SourceOptions, noise_rate: float) -> Questions:
    """Read the rows of files or hub datasets, `path,name,split[:n]`; semicolons join several.

    Rows that cannot be read or have no supporting paragraphs are broken: refused with their location, or with
    `data.on_broken: skip` left out and counted.
    """
    paths = [source.path] if isinstance(source.path, str) else list(source.path or ())
    specs = [spec.strip() for path in paths for spec in path.split(";") if spec.strip()]
    if not specs:
        raise KeelError("data.path names no data: give a JSONL file, or a hub name such as path,name,train[:100]")
    parts = [_records(spec, source.split) for spec in specs]
    questions: list[Question] = []
    broken: list[BrokenRow] = []
    for record in (record for _, records in parts for record in records):
        question = record.why if isinstance(record, BrokenRow) else _question(record)
        if isinstance(question, str):
            broken.append(BrokenRow(record.location, question))
        else:
            questions.append(with_noise(question, noise_rate))
    name = parts[0][0] if len(parts) == 1 else f"{parts[0][0]} and {len(parts) - 1} more"
    note = handle_broken_rows(name, broken, source.on_broken)
    if not questions:
        raise KeelError(f"{name} has no usable row: each needs a question, an answer and supporting paragraphs")
    return Questions(name, _distinct_keys(questions), (note,) if note else ())


def with_noise(question: Question, noise_rate: float) -> Question:
    """The question with each distractor kept with this probability, by a fixed random stream."""
    if noise_rate >= 1.0:
        return question
    documents = tuple(
        document
        for document in question.documents
        if document.supporting or seeded_rng("noise", question.key, document.id).random() < noise_rate
    )
    return replace(question, documents=documents)


def _records(spec: str, split: str) -> tuple[str, list[DataRow | BrokenRow]]:
    """(source, records in the data's order). A slice such as `[:100]` counts broken records too."""
    match = _SLICE.fullmatch(spec)
    assert match is not None
    rows = read_rows(match["path"], split)
    records: list[DataRow | BrokenRow] = (
        sorted((*rows.rows, *rows.broken), key=row_order) if rows.broken else list(rows.rows)
    )
    if match["first"] is None and match["low"] is None:
        return rows.source, records
    low, high = int(match["low"] or 0), match["high"] or match["first"]
    selected = records[low : int(high) if high else None]
    if not selected:
        raise KeelError(f"{spec} selects no rows: {rows.source} has {len(records)}")
    return rows.source, selected


def _question(row: DataRow) -> Question | str:
    """A row as a question, or the reason why it is broken."""
    values = row.values
    text, answers = values.get("question"), _answers(values)
    if not isinstance(text, str) or not text.strip():
        return "column 'question' is empty"
    if not answers:
        return "column 'answer' is empty"
    documents = _documents(values.get("paragraphs"))
    if isinstance(documents, str):
        return documents
    supporting = [document.id for document in documents if document.supporting]
    if not supporting:
        return "it has no supporting paragraph"
    steps = _decomposition(values.get("question_decomposition"))
    chain = tuple(dict.fromkeys([*(step.document for step in steps if step.document in supporting), *supporting]))
    return Question(str(values.get("id") or row.location), text.strip(), answers, documents, chain, steps)


def _answers(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The answer and its aliases; each entry of a list is an accepted answer."""
    answer, aliases = values.get("answer"), values.get("answer_aliases")
    several = [*(answer if isinstance(answer, list | tuple) else [answer])]
    several += list(aliases) if isinstance(aliases, list | tuple) else [aliases]
    texts = [str(text).strip() for text in several if isinstance(text, str | int | float)]
    return tuple(dict.fromkeys(filter(None, texts)))


def _documents(paragraphs: Any) -> tuple[Document, ...] | str:
    if not isinstance(paragraphs, Sequence) or isinstance(paragraphs, str) or not paragraphs:
        return "column 'paragraphs' is empty"
    documents = []
    for number, paragraph in enumerate(paragraphs):
        if not isinstance(paragraph, Mapping) or not isinstance(paragraph.get("paragraph_text"), str):
            return f"paragraph {number} has no paragraph_text"
        id = str(paragraph.get("idx", number))
        supporting = bool(paragraph.get("is_supporting", False))
        documents.append(Document(id, str(paragraph.get("title") or ""), paragraph["paragraph_text"], supporting))
    if len({document.id for document in documents}) < len(documents):
        return "two paragraphs have the same idx"
    return tuple(documents)


def _decomposition(steps: Any) -> tuple[SubQuestion, ...]:
    """The sub-questions in order; invalid ones become empty, so that references keep their numbers."""
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        return ()
    records: list[Mapping[str, Any]] = [step if isinstance(step, Mapping) else {} for step in steps]
    return tuple(
        SubQuestion(
            str(record.get("question") or ""), str(record.get("answer") or ""), str(record.get("paragraph_support_idx"))
        )
        for record in records
    )


def _distinct_keys(questions: Sequence[Question]) -> tuple[Question, ...]:
    """Give each question its own key, since the key seeds its noise."""
    counts: dict[str, int] = {}
    distinct = []
    for question in questions:
        copies = counts.get(question.key, 0)
        counts[question.key] = copies + 1
        distinct.append(replace(question, key=f"{question.key}~{copies}") if copies else question)
    return tuple(distinct)
