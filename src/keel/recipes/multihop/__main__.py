"""Check data rows: `python -m keel.recipes.multihop FILE [OPTION=VALUE]...` plays an oracle on each."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import typer

from keel.base.errors import KeelError
from keel.cli import main
from keel.envs.layouts import source_of
from keel.envs.tool_calls import FORMATS
from keel.recipes.multihop.options import ANSWER_STYLES, multihop
from keel.recipes.multihop.question import read_questions

MOST_NAMED = 5
HELP = """Play an oracle on every row of FILE.

Every row must load. In each format of calls and answers a demonstration, which queries only with text it has read,
must retrieve all supporting documents and earn the maximum reward. Options are those of the task (default: the golden
retriever). Exit status: 0 all rows pass, 1 some rows fail, 2 the file cannot be read.
"""
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True)
class OracleResult:
    """The oracle's episodes in one format: the number of rows, of episodes that retrieved all supporting documents, of
    those whose results contain the answer, and the reasons for rewards below the maximum."""

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
            f"earn the maximum, {self.complete} retrieve all support, {self.demonstrations} retrieve the answer"
            f"{f' ({shortfalls})' if shortfalls else ''}"
        )


def play_oracle(path: str, **options: Any) -> list[OracleResult]:
    """Play the oracle on every row in each format. The default retriever is golden, since others return distractors."""
    results = []
    questions = read_questions(source_of({"path": path}), 1.0).questions
    for tool_format, answer_style in product(FORMATS, ANSWER_STYLES):
        form = {"tool_format": tool_format, "answer_style": answer_style}
        task = multihop(data={"path": path}, **{"retriever": "golden", **options, **form})
        complete, demonstrations, short = 0, 0, []
        for question in questions:
            problem = task.problem(question)
            earned, maximum = task.reward(problem, task.gold_turns(problem)), task.max_reward(problem)
            demonstrations += task.usable_for_sft(problem)
            complete += earned.parts["retrieval_recall"] == 1.0
            if abs(earned.total - maximum) > 1e-9:
                lacking = ", ".join(name for name in task.weights if earned.parts[name] < 1.0)
                short.append(f"{question.key} earns {earned.total:.4g} of {maximum:.4g}: {lacking}")
        results.append(OracleResult(tool_format, answer_style, len(questions), complete, demonstrations, tuple(short)))
    return results


@app.command(name="python -m keel.recipes.multihop", help=HELP)
def oracle(
    path: Annotated[str, typer.Argument(metavar="FILE", help="Rows in MuSiQue's format.")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...", help="The task's.")] = None,
) -> int:
    results = play_oracle(path, **dict(map(_option, options or ())))
    typer.echo(f"{results[0].rows} rows load")
    typer.echo("\n".join(map(str, results)))
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
    sys.exit(main(app=app))
