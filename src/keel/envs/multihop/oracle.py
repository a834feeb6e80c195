"""Rows of one's own, proven: `python -m keel.envs.multihop.oracle FILE [OPTION=VALUE]...` plays an oracle on each.

Every row must load, and in each form of calls and answers a demonstration, which asks only with what it has read,
must retrieve all support and earn the maximum. Options are those of the task; the retriever is golden unless one is
named. Exit status 0: all do; 1: some do not, by name; 2: not readable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from keel.base.errors import KeelError
from keel.envs.layouts import source_of
from keel.envs.multihop.options import ANSWER_STYLES, multihop
from keel.envs.multihop.question import read_questions
from keel.envs.tool_calls import FORMATS

MOST_NAMED = 5


@dataclass(frozen=True)
class OracleResult:
    """What the oracle's episodes earned in one form: the number of rows, how many episodes retrieved all support, how
    many were shown their answer and so demonstrate it, and why some fall short of the maximum."""

    tool_format: str
    answer_style: str
    rows: int
    complete: int
    demonstrations: int
    short: tuple[str, ...]

    def __str__(self) -> str:
        shortfalls = "; ".join(self.short[:MOST_NAMED])
        return (
            f"{self.tool_format}, {self.answer_style}: {self.rows - len(self.short)} of {self.rows} oracle episodes "
            f"earn the maximum, {self.complete} retrieve all support, {self.demonstrations} are shown their answer"
            f"{f' ({shortfalls})' if shortfalls else ''}"
        )


def play_oracle(path: str, **options: Any) -> list[OracleResult]:
    """The oracle on every row, once for each form; the golden retriever, since others return distractors too."""
    results = []
    questions = read_questions(source_of({"path": path}), 1.0).questions
    for tool_format, answer_style in product(FORMATS, ANSWER_STYLES):
        form = {"tool_format": tool_format, "answer_style": answer_style}
        task = multihop(data={"path": path}, **{"retriever": "golden", **options, **form})
        complete, demonstrations, short = 0, 0, []
        for question in questions:
            problem = task.problem(question)
            earned, maximum = task.reward(problem, task.gold_turns(problem)), task.max_reward(problem)
            demonstrations += task.demonstrates(problem)
            complete += earned.parts["retrieval_recall"] == 1.0
            if abs(earned.total - maximum) > 1e-9:
                lacking = ", ".join(name for name in task.weights if earned.parts[name] < 1.0)
                short.append(f"{question.key} earns {earned.total:.4g} of {maximum:.4g}: {lacking}")
        results.append(OracleResult(tool_format, answer_style, len(questions), complete, demonstrations, tuple(short)))
    return results


def main(arguments: Sequence[str]) -> int:
    """Print the results; the exit status."""
    if not arguments:
        print(f"usage: {(__doc__ or '').splitlines()[0].partition('`')[2].partition('`')[0]}", file=sys.stderr)
        return 2
    try:
        results = play_oracle(arguments[0], **dict(_option(argument) for argument in arguments[1:]))
    except KeelError as error:
        print(f"keel: error: {error}", file=sys.stderr)
        return 2
    print(f"{results[0].rows} rows load")
    print("\n".join(map(str, results)))
    return int(any(result.short for result in results))


def _option(argument: str) -> tuple[str, Any]:
    name, equals, value = argument.partition("=")
    if not equals:
        raise KeelError(f"{argument!r} is not OPTION=VALUE, such as top_n=1")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
