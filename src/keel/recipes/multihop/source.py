"""Sources of questions: rows of data, or synthetic worlds of people, places and works in a closed vocabulary."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.dataset import Dataset, NoGrader, split
from keel.envs.layouts import LoadedProblems
from keel.envs.options import SourceOptions
from keel.envs.problems import held_out_problems, seeded_rng, training_problems
from keel.recipes.multihop.question import Document, Question, read_questions, with_noise

MAX_HOPS = 4
_STEMS = {
    "person": (("Al", "Bo", "Cei", "Dar", "Eli", "Fen", "Gor", "Hal"), ("dan", "ra", "mir", "nia", "ton", "vik")),
    "place": (("Ash", "Bir", "Cold", "Dun", "Elm", "Fox", "Gold", "High"), ("ford", "ton", "field", "mouth")),
    "work": (
        ("Amber", "Bright", "Crimson", "Dark", "Ever", "First", "Grey", "Hollow"),
        ("song", "fall", "tide", "gate"),
    ),
    "region": (("Nor", "Sud", "Est", "Ves"), ("land", "mark", "shire")),
}
NAMES: Mapping[str, tuple[str, ...]] = {
    kind: tuple(first + last for first in stems for last in endings) for kind, (stems, endings) in _STEMS.items()
}
# For each kind of entity: its relations, the kinds that they lead to, and their phrases.
RELATIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "work": {"author": ("person", "was written by"), "setting": ("place", "is set in")},
    "person": {"teacher": ("person", "was taught by"), "birthplace": ("place", "was born in")},
    "place": {"mayor": ("person", "is led by"), "region": ("region", "lies in")},
}
_FRAMES = ("What is {} ?", "Document ID: # and .", "the of")


def world_words(documents: int) -> tuple[str, ...]:
    """All space-separated words in questions, documents and answers of worlds with `documents` documents."""
    names = [name for names in NAMES.values() for name in names]
    relations = [name for kinds in RELATIONS.values() for name in kinds]
    phrases = [word for kinds in RELATIONS.values() for _, phrase in kinds.values() for word in phrase.split()]
    framed = [word for frame in _FRAMES for word in frame.replace("{}", "").split()]
    ids = [str(number) for number in range(1, documents + 1)]
    return tuple(dict.fromkeys([*framed, *relations, *phrases, *ids, *names]))


def draw_question(rng: random.Random, hops: Sequence[int], documents: int) -> Question:
    """A world and a question about it: a chain with one fact per hop, and distractors of the same form."""
    length = rng.choice(list(hops))
    names = {kind: iter(rng.sample(pool, len(pool))) for kind, pool in NAMES.items()}  # names, each used once
    kinds, relations = _walk(rng, length)
    chain = [next(names[kind]) for kind in kinds]
    articles = [(chain[i], kinds[i], {relation: chain[i + 1]}) for i, relation in enumerate(relations)]
    others = [rng.choice(list(RELATIONS)) for _ in range(documents - length)]
    articles += [(next(names[kind]), kind, {}) for kind in others]
    mentioned = {kind: [name for name, k, _ in articles if k == kind] for kind in RELATIONS}
    order = list(range(documents))
    rng.shuffle(order)
    written: list[Document] = []
    for number, index in enumerate(order, start=1):
        name, kind, known = articles[index]
        written.append(Document(str(number), name, _article(rng, name, kind, known, mentioned), index < length))
    subject = chain[0]
    for relation in relations:
        subject = f"the {relation} of {subject}"
    ids = {document.title: document.id for document in written}
    text = f"What is {subject} ?"
    identity = "\x1f".join([text, *(str(document) for document in written)])
    key = f"{length}hop-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"
    return Question(key, text, (chain[-1],), tuple(written), tuple(ids[name] for name in chain[:-1]))


def check_size(hops: Sequence[int], documents: int) -> None:
    """Refuse chain lengths and document counts for which no world exists."""
    if min(hops) < 1 or max(hops) > MAX_HOPS:
        raise KeelError(f"multihop hops are {list(hops)}: the built-in worlds have chains of 1 to {MAX_HOPS}")
    if not max(hops) <= documents <= 20:
        raise KeelError(f"multihop documents is {documents}: give {max(hops)} (the longest chain) to 20")


def _walk(rng: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Random kinds and relations of a chain; a region has no relations, so it can only be the end."""
    kinds = [rng.choice(list(RELATIONS))]
    relations: list[str] = []
    while len(relations) < length:
        ways = [
            (relation, target)
            for relation, (target, _) in RELATIONS[kinds[-1]].items()
            if target in RELATIONS or len(relations) == length - 1
        ]
        relation, target = rng.choice(ways)
        relations.append(relation)
        kinds.append(target)
    return kinds, relations


def _article(
    rng: random.Random, name: str, kind: str, known: Mapping[str, str], mentioned: Mapping[str, Sequence[str]]
) -> str:
    """Both facts of an entity; facts outside of the chain name an entity of this world if possible."""
    facts = []
    for relation, (target, phrase) in RELATIONS[kind].items():
        pool = [other for other in mentioned.get(target, ()) if other != name] or list(NAMES[target])
        facts.append(f"{phrase} {known.get(relation) or rng.choice(pool)}")
    return f"{name} {' and '.join(facts)} ."


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
    """Rows in a new order each epoch; with a curriculum, only rows of the current chain lengths."""

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
