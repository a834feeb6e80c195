"""The tools of an episode, and parsing of the final answer from tags or a call."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from keel.envs.tools import tool

_LABEL = re.compile(r"[(#]*(?:documents?|docs?|ids?|no|and)\b[.:#-]*", re.IGNORECASE)  # words around an id, not ids
_AROUND = "()#.:"


@dataclass(frozen=True)
class Answer:
    """The final answer; `text` is None if there is none, `listed` is whether it was a list."""

    text: str | None
    cited: tuple[str, ...] = ()
    listed: bool = False


def retrieve_documents(query: str) -> str:
    """Find the documents that match a query best.

    Args:
        query: The words to look for, such as the name of a person, a place or a work.
    """
    raise NotImplementedError("each problem binds it to its documents")


@partial(tool, ends=True)
def complete(reasoning: str, final_answer: str | list[str], cited_doc_ids: list[str] | str) -> Answer:
    """Give the final answer and end the conversation.

    Args:
        reasoning: The steps that lead to the answer.
        final_answer: The answer itself, as short as possible.
        cited_doc_ids: The ids of the documents that support the answer.
    """
    return read_answer(final_answer, cited_doc_ids)


def read_answer(text: Any, cited: Any) -> Answer:
    """Parse an answer. A list becomes one answer, joined by commas.

    Ids are accepted in several notations: `Document ID: 3`, `(3)`, `#3` and `3.` are all `3`.
    """
    several = _as_list(text)
    answer = str(text).strip() if several is None else ", ".join(map(str, several))
    ids = cited if isinstance(cited, list | tuple) else [cited]
    parts = [
        _LABEL.sub("", part).strip(_AROUND) for cited_id in ids for part in re.split(r"[\s,;\[\]\"']+", str(cited_id))
    ]
    return Answer(answer or None, tuple(dict.fromkeys(filter(None, parts))), several is not None)


def _as_list(text: Any) -> list[Any] | None:
    """The entries of a list, or of a list written as text; None for other values."""
    if isinstance(text, list | tuple):
        return list(text)
    if not (isinstance(text, str) and text.strip().startswith("[") and text.strip().endswith("]")):
        return None
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return list(value) if isinstance(value, list) else None
