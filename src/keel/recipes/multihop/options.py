"""Build the task `multihop` from its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from keel.base.errors import KeelError
from keel.base.options import PositiveInt
from keel.envs.dataset import data_name
from keel.envs.layouts import source_of
from keel.envs.problems import HELD_OUT_FRACTION
from keel.envs.tool_calls import Format
from keel.envs.tools import MAX_CHARACTERS, check_distinct
from keel.envs.with_tools import tools_of
from keel.recipes.multihop.retrieve import RetrieverName, build_retriever
from keel.recipes.multihop.score import checked_weights
from keel.recipes.multihop.source import QuestionSource, Worlds, check_size, rows_of
from keel.recipes.multihop.task import Multihop

AnswerStyle = Literal["tags", "complete"]
ANSWER_STYLES: tuple[str, ...] = get_args(AnswerStyle)
INSTRUCTIONS = {
    ("tags", "tags"): (
        "Look up documents with <retrieve> query </retrieve> , as often as you need . "
        "Then answer : {think}<cite> document ids </cite> <answer> answer </answer>"
    ),
    ("tags", "complete"): (
        "Look up documents with <retrieve> query </retrieve> , as often as you need . Then answer : "
        '<complete> {{"reasoning": "…", "final_answer": "…", "cited_doc_ids": ["…"]}} </complete>'
    ),
    ("json", "tags"): (
        "Look up documents with the tool retrieve_documents, as often as you need. "
        "Then answer: {think}<cite>document ids</cite> <answer>answer</answer>"
    ),
    ("json", "complete"): (
        "Look up documents with the tool retrieve_documents, as often as you need. "
        "Then give your answer with the tool complete, citing the documents that support it."
    ),
}
_THINK = {"tags": "<think> reasoning </think> ", "json": "<think>reasoning</think> "}


def multihop(
    data: Mapping[str, Any] | None = None,
    retriever: RetrieverName = "lexical",
    top_n: PositiveInt = 2,
    max_characters: PositiveInt = MAX_CHARACTERS,
    embedding: str | Callable[[list[str]], Any] | None = None,
    tool_format: Format = "tags",
    answer_style: AnswerStyle = "tags",
    think: bool = True,
    hops: int | Sequence[int] | None = None,
    noise_rate: Annotated[float, Field(ge=0, le=1)] = 1.0,
    curriculum_steps: Annotated[int, Field(ge=0)] = 0,
    documents: int | None = None,
    weights: Mapping[str, Annotated[float, Field(ge=0)]] | None = None,
    hop_factor: bool = True,
    tools: Sequence[Any] = (),
    instruction: str | None = "auto",
    held_out: int | float = HELD_OUT_FRACTION,
) -> Multihop:
    """The task `multihop`: rows of `data.path` in MuSiQue's format, or synthetic worlds with `documents` documents.

    `retriever` is golden, lexical or hybrid (with `embedding`); a call returns `top_n` documents, truncated to
    `max_characters`. `hops` selects questions by their number of supporting documents; `noise_rate` is the probability
    of keeping each distractor; longer chains are added over `curriculum_steps`. `tools` adds custom tools.
    `instruction: null` uses the bare question as the prompt.
    """
    lengths = tuple(sorted({hops} if isinstance(hops, int) else set(hops or ())))
    if min(lengths, default=1) < 1:
        raise KeelError(f"multihop hops is {hops!r}: give numbers of supporting documents, such as [2, 3]")
    extra = tools_of(tools)
    check_distinct(["retrieve_documents", "complete", *(extra_tool.name for extra_tool in extra)])
    source, where = source_of(data), "worlds"
    questions: QuestionSource
    if source.path is None:
        if noise_rate != 1.0 and documents is not None:
            raise KeelError("multihop takes documents or noise_rate for its built-in worlds, not both")
        if held_out != HELD_OUT_FRACTION:
            raise KeelError("multihop generates its worlds and holds out a tenth: held_out needs data.path")
        size = 8 if documents is None else documents
        lengths = lengths or (2, 3, 4)
        check_size(lengths, size)
        questions = Worlds(size, noise_rate)
    elif documents is not None:
        raise KeelError("multihop documents is the size of synthetic worlds: leave it out with data.path")
    else:
        rows = rows_of(source, noise_rate, lengths, held_out)
        questions, lengths, where = rows, rows.lengths, data_name(source)
    think_mark = _THINK[tool_format] if think else ""
    text = INSTRUCTIONS[tool_format, answer_style].format(think=think_mark) if instruction == "auto" else instruction
    return Multihop(
        name=f"multihop/{where}",
        source=questions,
        retriever=build_retriever(retriever, embedding),
        top_n=top_n,
        max_characters=max_characters,
        tool_format=tool_format,
        answer_style=answer_style,
        think=think,
        weights=checked_weights(weights),
        hop_factor=hop_factor,
        hops=lengths,
        curriculum_steps=curriculum_steps,
        instruction=text,
        extra_tools=extra,
        notes=questions.notes,
        runs_user_code=bool(extra) or embedding is not None,
    )
