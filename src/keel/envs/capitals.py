"""`capitals`: name the capital of a country. The task measures whether training preserves factual knowledge."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from keel.base.types import Problem, Reward
from keel.envs.base import Task
from keel.envs.problems import choose_held_out, seeded_rng

CAPITALS: Mapping[str, str] = {
    "Albania": "Tirana", "Algeria": "Algiers", "Argentina": "Buenos Aires", "Armenia": "Yerevan",
    "Australia": "Canberra", "Austria": "Vienna", "Azerbaijan": "Baku", "Bangladesh": "Dhaka",
    "Belgium": "Brussels", "Brazil": "Brasília", "Bulgaria": "Sofia", "Cambodia": "Phnom Penh",
    "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing", "Colombia": "Bogotá",
    "Croatia": "Zagreb", "Cuba": "Havana", "Cyprus": "Nicosia", "Denmark": "Copenhagen",
    "Ecuador": "Quito", "Egypt": "Cairo", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki", "France": "Paris", "Germany": "Berlin", "Ghana": "Accra",
    "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavik", "India": "New Delhi",
    "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin",
    "Italy": "Rome", "Jamaica": "Kingston", "Japan": "Tokyo", "Jordan": "Amman",
    "Kenya": "Nairobi", "Latvia": "Riga", "Lebanon": "Beirut", "Lithuania": "Vilnius",
    "Malaysia": "Kuala Lumpur", "Malta": "Valletta", "Mongolia": "Ulaanbaatar", "Morocco": "Rabat",
    "Nepal": "Kathmandu", "New Zealand": "Wellington", "Nigeria": "Abuja", "Norway": "Oslo",
    "Pakistan": "Islamabad", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Romania": "Bucharest", "Serbia": "Belgrade", "Slovakia": "Bratislava", "Slovenia": "Ljubljana",
    "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok", "Turkey": "Ankara",
}  # fmt: skip


def _plain(text: str) -> str:
    """Lower case, without accents, with single spaces."""
    bare = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return " ".join(re.findall(r"[a-z]+", bare.casefold()))


@dataclass(frozen=True)
class Capitals(Task):
    """One question per country; `held_out_countries` are never trained on.

    An answer is correct if it names the capital and no other capital of the list.
    """

    held_out_countries: frozenset[str]
    name: str = "capitals"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """Training problems of one step; a repeated country gets another key."""
        rng = seeded_rng("capitals", "train", seed, step)
        names = sorted(CAPITALS.keys() - self.held_out_countries)
        drawn: list[Problem] = []
        while len(drawn) < count:
            turn = len(drawn) // len(names)
            drawn += [_problem(name, f"#{turn}" if turn else "") for name in rng.sample(names, len(names))]
        return drawn[:count]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        names = sorted(self.held_out_countries)
        seeded_rng("capitals", "held-out", seed).shuffle(names)
        return [_problem(name) for name in names[:count]]

    def gold(self, problem: Problem) -> str:
        return str(problem.answer)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """1 if the text names the capital and no other capital of the list."""
        text = f" {_plain(turns[-1] if turns else '')} "
        mentioned = {capital for capital in CAPITALS.values() if f" {_plain(capital)} " in text}
        correct = float(mentioned == {str(problem.answer)})
        return Reward(correct, {"correct": correct}, parsed=bool(mentioned))


def _problem(country: str, again: str = "") -> Problem:
    question = f"What is the capital of {country}? Answer with its name only."
    return Problem(f"capital:{country}{again}", [{"role": "user", "content": question}], CAPITALS[country])


def capitals(held_out: Annotated[int, Field(ge=1, lt=len(CAPITALS))] = 32) -> Capitals:
    """The task `capitals`: 64 countries, of which `held_out` are never trained on."""
    return Capitals(choose_held_out(dict.fromkeys(CAPITALS, 1), held_out))
