"""Sources of multi-hop questions: rows of data, or synthetic worlds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.dataset import Dataset, NoGrader, split
from keel.envs.layouts import LoadedProblems
from keel.envs.options import SourceOptions
from keel.envs.problems import held_out_problems, seeded_rng, training_problems
from keel.recipes.multihop.question import Question, read_questions, with_noise
from keel.recipes.multihop.world import draw_question


@dataclass(frozen=True)
class Worlds:
    """A new world for each problem, with `documents` documents; a hash of the question decides which are held out."""

    documents: int
    noise_rate: float = 1.0
    notes: tuple[str, ...] = ()

    def sample(self, count: int, seed: int, step: int, hops: Sequence[int]) -> list[Question]:
        rng = seeded_rng("multihop", "train", seed, step)
        return [p.info["question"] for p in training_problems(self._drawer(hops), count, rng)]

    def held_out(self, count: int, seed: int, hops: Sequence[int]) -> list[Question]:
        rng = seeded_rng("multihop", "held-out", seed)
        return [p.info["question"] for p in held_out_problems(self._drawer(hops), count, rng)]

    def filter_problems(self, fits: Callable[[Question], bool]) -> None:
        return None

    def fingerprint(self) -> None:
        return None

    def _drawer(self, hops: Sequence[int]) -> Callable[[random.Random], tuple[str, Problem]]:
        def draw(rng: random.Random) -> tuple[str, Problem]:
            question = with_noise(draw_question(rng, hops, self.documents), self.noise_rate)
            return question.text, Problem(question.key, question.text, info={"question": question})

        return draw


@dataclass(frozen=True)
class QuestionRows:
    """Rows in a new order each epoch; with a curriculum, only those within the current chain length."""

    data: Dataset
    lengths: tuple[int, ...]
    notes: tuple[str, ...] = ()
    _stages: dict[tuple[int, ...], Dataset] = field(default_factory=dict, repr=False, compare=False)

    def sample(self, count: int, seed: int, step: int, hops: Sequence[int]) -> list[Question]:
        drawn = self._stage(tuple(hops)).sample(count, seed=seed, step=step)
        return [replace(p.info["question"], key=p.key) for p in drawn]

    def held_out(self, count: int, seed: int, hops: Sequence[int]) -> list[Question]:
        return [p.info["question"] for p in self.data.held_out(count, seed=seed)]

    def filter_problems(self, fits: Callable[[Question], bool]) -> tuple[QuestionRows, int]:
        data, left_out = self.data.filter_problems(lambda problem: fits(problem.info["question"]))
        return replace(self, data=data, _stages={}), left_out

    def fingerprint(self) -> str:
        """A digest of all questions with their documents, and of the split."""
        questions = [[repr(p.info["question"]) for p in side] for side in (self.data.train, self.data.held)]
        return hashlib.sha256(repr(questions).encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def _stage(self, hops: tuple[int, ...]) -> Dataset:
        if hops not in self._stages:
            train = tuple(p for p in self.data.train if p.info["question"].hops in hops)
            self._stages[hops] = replace(self.data, train=train or self.data.train)
        return self._stages[hops]


def rows_of(source: SourceOptions, noise_rate: float, hops: tuple[int, ...], held_out: int | float) -> QuestionRows:
    """The rows with these numbers of hops, split into training and held-out ones by a hash of the question."""
    counts: dict[int, int] = {}

    def read(options: SourceOptions) -> LoadedProblems:
        loaded = read_questions(options, noise_rate)
        questions = [question for question in loaded.questions if not hops or question.hops in hops]
        if not questions:
            hops_present = sorted({question.hops for question in loaded.questions})
            raise KeelError(f"{loaded.source} has no question of {list(hops)} hops: it has {hops_present}")
        for question in questions:
            counts[question.hops] = counts.get(question.hops, 0) + 1
        problems = tuple(
            Problem(question.key, question.text, question.answers[0], {"question": question}) for question in questions
        )
        return LoadedProblems(loaded.source, problems, loaded.notes)

    train, held, notes = split(source, held_out, None, None, read=read, has_eval_path=False)
    summary = ", ".join(f"{count} of {n} hops" for n, count in sorted(counts.items()))
    return QuestionRows(
        Dataset("multihop", train, held, NoGrader()), tuple(sorted(counts)), (*notes, f"multihop: {summary}")
    )


# Disjoint training and held-out questions; `notes` describe how they were read.
QuestionSource = Worlds | QuestionRows
