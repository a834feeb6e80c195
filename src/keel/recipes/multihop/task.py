"""The task `multihop`: retrieval episodes that end with an answer and citations."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any, Self

from keel.base.errors import KeelError
from keel.base.types import Group, Problem, Reward
from keel.envs import Episode, Task
from keel.envs.answers import last_tag
from keel.envs.base import play_turns
from keel.envs.tool_calls import write_call
from keel.envs.toolbox import MAX_CALLS, Toolbox, ToolEpisode
from keel.envs.tools import MAX_CHARACTERS, Tool, tool
from keel.recipes.multihop import score
from keel.recipes.multihop.question import Document, Question
from keel.recipes.multihop.retrieve import Retrieved, Retriever, queries
from keel.recipes.multihop.score import Answer, complete, read_answer, retrieve_documents
from keel.recipes.multihop.source import QuestionSource, Worlds, world_words

_TAG = re.compile(r"<(/?)([A-Za-z_][\w-]*)>")
_OWN_TAGS = {"think", "cite", "answer", "result"}


@dataclass(frozen=True)
class Multihop(Task):
    """Questions that need several documents. The reward is (hops / 2) × the weighted mean of its parts."""

    name: str
    source: QuestionSource
    retriever: Retriever
    top_n: int
    tool_format: str
    answer_style: str
    think: bool
    weights: Mapping[str, float]
    hop_factor: bool
    hops: tuple[int, ...]
    curriculum_steps: int = 0
    max_characters: int = MAX_CHARACTERS
    instruction: str | None = None
    extra_tools: tuple[Tool, ...] = ()
    notes: tuple[str, ...] = ()
    runs_user_code: bool = False  # whether episodes run user code (tools or embeddings)
    _base: Tool = field(default=tool(retrieve_documents, tag="retrieve"), repr=False, compare=False)

    @property
    def trusted(self) -> bool:
        return super().trusted and not self.runs_user_code

    def fingerprint(self) -> str | None:
        """A digest of the rows with their documents; None for synthetic worlds."""
        return self.source.fingerprint()

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """Training problems of one step, with chain lengths by the curriculum."""
        return self._problems(self.source.sample(count, seed, step, self.hops_at(step)))

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        """Problems of all chain lengths that `sample` never returns."""
        return self._problems(self.source.held_out(count, seed, self.hops))

    def stratum(self, problem: Problem) -> str:
        return str(_question(problem).hops)

    def filter_problems(self, fits: Callable[[Problem], bool]) -> tuple[Self, int] | None:
        """The task with only the questions whose prompts `fits` accepts, and the number of dropped ones."""
        filtered = self.source.filter_problems(lambda question: fits(self.problem(question)))
        return None if filtered is None else (replace(self, source=filtered[0]), filtered[1])

    def hops_at(self, step: int) -> tuple[int, ...]:
        """The chain lengths of a step: at first only the shortest, after `curriculum_steps` all."""
        if step >= self.curriculum_steps:
            return self.hops
        return self.hops[: 1 + step * len(self.hops) // self.curriculum_steps]

    def gold_turns(self, problem: Problem) -> list[str]:
        """Retrieve the supporting documents with queries from seen text, then answer and cite them.

        A document that no such query finds is neither retrieved nor cited, and the reward is below the maximum.
        """
        search = self._search(_question(problem))
        tools = self.tools(problem)
        calls = [write_call("retrieve_documents", {"query": query}, self.tool_format, tools) for query in search.asked]
        return [*calls, self._final_turn(problem, search)]

    def gold(self, problem: Problem) -> str:
        return self._final_turn(problem, self._search(_question(problem)))

    def usable_for_sft(self, problem: Problem) -> bool:
        """Whether the answer occurs in the question or a result; otherwise training on it would teach guessing."""
        question = _question(problem)
        return self._search(question).shown_answer(question) is not None

    def _search(self, question: Question) -> _Search:
        """The demonstration's queries and their results; each query uses the text of the previous results."""
        asked: list[str] = []
        shown_text, retrieved = "", set[str]()
        while (step := self._next_query(question, retrieved, shown_text)) is not None:
            query, (content, documents) = step
            asked.append(query)
            shown_text += f"\n{content}"
            retrieved |= {document.id for document in documents}
        chain = [question.document(id) for id in question.chain if id in retrieved]
        return _Search(asked, [document for document in chain if document is not None], shown_text)

    def _next_query(
        self, question: Question, retrieved: Collection[str], shown_text: str
    ) -> tuple[str, tuple[str, list[Document]]] | None:
        """The next query that finds a missing supporting document, in the chain's order, and its reply.

        If there is none, the first turn still asks for the first document, since the result may contain a needed name.
        """
        for id in question.chain:
            for query in queries(question, id, shown_text) if id not in retrieved else ():
                reply = self._reply(question, query)
                if any(document.id == id for document in reply[1]):
                    return query, reply
        first = None if shown_text else next(iter(queries(question, question.chain[0], "")), None)
        return None if first is None else (first, self._reply(question, first))

    def _final_turn(self, problem: Problem, search: _Search) -> str:
        cited, question = [document.id for document in search.retrieved], _question(problem)
        answer = search.shown_answer(question) or question.answers[0]
        reasoning = " , ".join([*(document.title for document in search.retrieved), answer])
        if self.answer_style == "complete":
            arguments = {"reasoning": reasoning, "final_answer": answer, "cited_doc_ids": cited}
            return write_call("complete", arguments, self.tool_format, self.tools(problem))
        think = f"<think> {reasoning} </think> " if self.think else ""
        return f"{think}<cite> {' '.join(cited)} </cite> <answer> {answer} </answer>"

    def problem(self, question: Question) -> Problem:
        content = f"{self.instruction}\n{question.text}\n" if self.instruction else f"{question.text}\n"
        problem = Problem(
            key=question.key,
            prompt=[{"role": "user", "content": content}],
            answer=question.answers[0],
            info={"question": question, "hops": question.hops},
        )
        if self.tool_format == "tags":
            return problem
        return replace(problem, tools=[offered.schema for offered in self.tools(problem)])

    def max_reward(self, problem: Problem) -> float:
        """The reward of an episode whose parts are all 1."""
        return score.total(dict.fromkeys(self.weights, 1.0), self.weights, _question(problem).hops, self.hop_factor)

    def start(self, problem: Problem) -> Episode:
        return MultihopEpisode(self, problem)

    def extra_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """The mean of each part, calls per episode, and the fraction of correct answers by the number of hops."""
        rewards = [(g.problem, r) for g in groups for r in g.rewards]
        parts = {name: fmean(r.parts.get(name, 0.0) for _, r in rewards) for name in self.weights}
        calls = fmean(c.counts.get("tool/calls", 0.0) for g in groups for c in g.completions)
        lengths = sorted({_question(p).hops for p, _ in rewards})
        by_hops = {
            f"correct_{n}_hops": fmean(r.parts.get("correct", 0.0) for p, r in rewards if _question(p).hops == n)
            for n in lengths
        }
        return {**parts, "tool_calls": calls, **by_hops}

    def tools(self, problem: Problem) -> tuple[Tool, ...]:
        """The tools of a problem, with the retrieval over its documents."""
        function = partial(self._retrieve, _question(problem))
        bound = replace(self._base, function=function, max_characters=self.max_characters)
        return (bound, *((complete,) if self.answer_style == "complete" else ()), *self.extra_tools)

    @cached_property
    def toolbox(self) -> Toolbox:
        return Toolbox(self.tools, self.tool_format, self.is_answer)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All space-separated words of the worlds' prompts, replies and gold episodes, for a word-level tokenizer.

        It includes the error replies, so that a model can correct its calls.
        """
        if not isinstance(self.source, Worlds):
            raise KeelError("multihop has a closed vocabulary only for its built-in worlds: leave data.path out")
        if self.tool_format != "tags":
            raise KeelError("multihop has a closed vocabulary only for calls in tags: set tool_format: tags")
        marks = [f"<{end}{tag}>" for tag in ("retrieve", "result", "think", "cite", "answer") for end in ("", "/")]
        instruction = (self.instruction or "").split()
        replies = ("No document matches.", "[cut: characters more]", *self._errors())
        reply_words = [word for reply in replies for word in reply.split()]
        return tuple(dict.fromkeys([*world_words(self.source.documents), *marks, ",", *instruction, *reply_words]))

    def _errors(self) -> list[str]:
        """The error replies to an unclosed call and to too many calls."""
        (problem,) = self.sample(1, seed=0, step=0)
        tag = self._base.tag
        wrong = (f"<{tag}>", f"<{tag}>{{</{tag}>" * (MAX_CALLS + 1))
        replies = []
        for text in wrong:
            with play_turns(self, problem, [text]) as (episode, _):
                assert isinstance(episode, MultihopEpisode)
                replies.append(episode.every_result[-1].content)
        return replies

    def _retrieve(self, question: Question, query: str) -> Retrieved:
        return Retrieved(tuple(self.retriever(question, query)[: self.top_n]))

    def _reply(self, question: Question, query: str) -> tuple[str, list[Document]]:
        """The text of a retrieval for the model, and the documents that it contains in full."""
        retrieved = self._retrieve(question, query)
        content = str(retrieved)[: self.max_characters]
        return content, _shown(retrieved, content)

    def is_answer(self, text: str) -> bool:
        """Whether a turn contains an answer in tags, if that is the answer format."""
        return self.answer_style == "tags" and last_tag(text) is not None

    def _problems(self, questions: Sequence[Question]) -> list[Problem]:
        return [self.problem(question) for question in questions]


@dataclass(frozen=True)
class _Search:
    """The queries of a demonstration, the supporting documents that they retrieve, and the text of all results."""

    asked: Sequence[str]
    retrieved: Sequence[Document]
    shown_text: str

    def shown_answer(self, question: Question) -> str | None:
        """The first of the answer and its aliases that occurs, in normal form, in the question or a result."""
        seen = f" {score.normalise(f'{question.text} {self.shown_text}')} "
        normal = ((answer, score.normalise(answer)) for answer in question.answers)
        return next((answer for answer, words in normal if words and f" {words} " in seen), None)


class MultihopEpisode(ToolEpisode):
    """An episode of retrievals and an answer."""

    def __init__(self, task: Multihop, problem: Problem) -> None:
        super().__init__(task.toolbox, problem)
        self.task, self.question = task, _question(problem)

    def reward(self) -> Reward:
        """The parts of an episode, each in [0, 1], and (hops / 2) × their weighted mean.

        A document counts as retrieved if the model has seen all of it: not if it was truncated or requested in the last
        turn.
        """
        question, answer, weights = self.question, self._answer(), self.task.weights
        shown = [document.id for turn in self.results[:-1] for r in turn for document in _shown(r.value, r.content)]
        exact = score.best(score.exact_match, answer.text, question.answers)
        parts = {
            "exact_match": exact,
            "f1": score.best(score.f1, answer.text, question.answers),
            "retrieval_recall": score.recall(shown, question.chain),
            "retrieval_precision": score.precision(shown, question.chain),
            "citation_recall": score.recall(answer.cited, question.chain),
            "format": self._form(answer),
        }
        total = score.total(parts, weights, question.hops, self.task.hop_factor)
        return Reward(total, {"correct": exact, **parts}, parsed=answer.text is not None)

    def counts(self) -> dict[str, float]:
        """Calls and errors of the tools; answers that are missing or lists; cited documents that do not exist.

        A last turn without an answer but with an unknown tag counts as a call of an unknown tool.
        """
        answer, counted = self._answer(), super().counts()
        if self.task.tool_format == "tags" and self.is_over and answer.text is None and not self.results[-1]:
            marks = _TAG.findall(self.turns[-1])
            opened, closed = ({tag for end, tag in marks if end == mark} for mark in ("", "/"))
            for name in ("calls", "errors", "unknown_tool"):
                counted[f"tool/{name}"] += float(bool((opened & closed) - _OWN_TAGS))
        return {
            **counted,
            "answer/missing": float(answer.text is None),
            "answer/list": float(answer.listed),
            "answer/unknown_document": float(sum(self.question.document(id) is None for id in answer.cited)),
        }

    def _answer(self) -> Answer:
        answer = next((r.value for r in self.every_result if isinstance(r.value, Answer)), None)
        if answer is not None:
            return answer
        text = self.turns[-1] if self.turns else ""
        if not self.task.is_answer(text):
            return Answer(None)
        return read_answer((last_tag(text) or "").strip(), last_tag(text, "cite") or "")

    def _form(self, answer: Answer) -> float:
        """1 if there is an answer in the requested format."""
        if answer.text is None:
            return 0.0
        if self.task.answer_style == "complete":
            return float(any(isinstance(result.value, Answer) for result in self.every_result))
        text, tags = self.turns[-1], (*(("think",) if self.task.think else ()), "cite", "answer")
        once = all(text.count(f"<{tag}>") == 1 == text.count(f"</{tag}>") for tag in tags)
        marks = [text.find(f"<{end}{tag}>") for tag in tags for end in ("", "/")]
        return float(once and marks == sorted(marks))


def _shown(value: Any, content: str) -> list[Document]:
    """The documents of a retrieval that the model saw in full."""
    return (
        [document for document in value.documents if str(document) in content] if isinstance(value, Retrieved) else []
    )


def _question(problem: Problem) -> Question:
    question = problem.info["question"]
    assert isinstance(question, Question)
    return question
