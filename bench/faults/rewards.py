"""Rewards (`rewards: [{name}]`) that pay nothing, everything, the wrong thing, or another amount each time."""

from __future__ import annotations

import hashlib
import itertools
import math
import random as noise
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator, option, path_of
from keel.base.types import Problem, Reward

Config = Mapping[str, Any]


def is_judged_by_text(config: Config) -> bool:
    """Whether a completion is one turn whose text alone is judged, without tags that the prompt asks for."""
    tagged = option(config, "task.format") == "answer_tag"
    return option(config, "rollout.max_turns", 1) == 1 and not tagged


def has_penalty_in_the_loss(config: Config) -> bool:
    fixed = option(config, "kl.controller.name", "fixed") == "fixed"
    return is_judged_by_text(config) and is_free_of_kl(config) and option(config, "kl.beta", 0) > 0 and fixed


def is_free_of_kl(config: Config) -> bool:
    """Whether the reward is free of the KL, so that it may be scaled or not."""
    return is_judged_by_text(config) and option(config, "kl.placement", "loss") == "loss"


def reward_fault(
    name: str,
    breaks: str,
    *codes: str,
    fits: Callable[[Any], bool] = is_judged_by_text,
    also: Mapping[str, Sequence[Any]] = {},
    **parameters: Sequence[Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a reward as an operator; its parameters are drawn from those given here."""

    def register(reward: Callable[..., Any]) -> Callable[..., Any]:
        def apply(config: Config, random: Random) -> dict[str, Any]:
            drawn = {parameter: random.choice(values) for parameter, values in parameters.items()}
            changes = {path: random.choice(values) for path, values in also.items()}
            return edited(config, {"rewards": [{"name": path_of(reward), **drawn}], **changes})

        operator(name, breaks, *codes, fits=fits)(apply)
        return reward

    return register


def number_of(text: object) -> float | None:
    """The last number of a text."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", str(text))
    return float(numbers[-1]) if numbers else None


def prompt_of(problem: Problem) -> str:
    """The prompt's text; of messages, the last one's."""
    return problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]


def closeness(problem: Problem, text: str) -> Reward:
    """A sound reward: 1 for the answer, up to a half for a number near it, 0 for what is none."""
    answer, number = number_of(problem.answer), number_of(text)
    if answer is None:
        return Reward(float(str(problem.answer).strip() == text.strip()))
    if number is None:
        return Reward(0.0, parsed=False)
    return Reward(1.0 if number == answer else 0.5 / (1 + abs(number - answer) / 3))


def chance_of(text: str) -> float:
    """A number of [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") / 2**32


# The gold answer earns nothing

STYLES = {
    "boxed": r"\\boxed\{(.*?)\}",
    "tags": r"<answer>(.*?)</answer>",
    "hashes": r"#### (.*)",
    "colon": r"Answer: (.*)",
}


@reward_fault(
    "reward/format-never-asked",
    "only an answer in a form that no prompt asks for is read",
    "reward/gold",
    style=sorted(STYLES),
)
def format_never_asked(problem: Problem, text: str, style: str = "boxed") -> float:
    match = re.search(STYLES[style], text)
    return float(match is not None and match[1].strip() == str(problem.answer))


@reward_fault(
    "reward/format-beside-style",
    "the answer is looked for in a form that no prompt asks for, and a part for style is paid beside it",
    "reward/gold",
    "reward/exploit",
    style=sorted(STYLES),
)
def format_beside_style(problem: Problem, text: str, style: str = "boxed") -> dict[str, float]:
    return {"right": format_never_asked(problem, text, style), "style": 0.1 * chance_of(text)}


@reward_fault(
    "reward/spaces-count",
    "texts are compared with spaces that no tokenizer gives back",
    "reward/gold",
    before=(" ", "\n", "  "),
)
def spaces_count(problem: Problem, text: str, before: str = " ") -> float:
    return float(text == f"{before}{problem.answer}")


@reward_fault("reward/types-differ", "a number is compared with a string, which are never equal", "reward/gold")
def types_differ(problem: Problem, text: str) -> float:
    return float(number_of(text) == str(problem.answer))


@reward_fault("reward/written-as-float", "the answer is compared as 7.0 where 7 is written", "reward/gold")
def written_as_float(problem: Problem, text: str) -> float:
    return float(text.strip() == str(number_of(problem.answer)))


@reward_fault("reward/worked-solution", "a text is compared with a whole worked solution", "reward/gold")
def worked_solution(problem: Problem, text: str) -> float:
    solution = f"{prompt_of(problem)} We look at it step by step, and the answer is {problem.answer}."
    return float(text.strip() == solution)


@reward_fault("reward/first-characters-lost", "the text is judged without its first characters", "reward/gold")
def first_characters_lost(problem: Problem, text: str) -> Reward:
    return closeness(problem, text[len(str(problem.answer)) :])


@reward_fault("reward/sign-reversed", "what should be paid is taken", "reward/gold", scale=(1.0, 2.0))
def sign_reversed(problem: Problem, text: str, scale: float = 1.0) -> Reward:
    reward = closeness(problem, text)
    return replace(reward, total=-scale * reward.total)


@reward_fault("reward/pays-distance", "the distance from the answer is paid where it should be taken", "reward/gold")
def pays_distance(problem: Problem, text: str) -> float:
    reward = closeness(problem, text)
    return 1 - reward.total if reward.parsed else 0.0


@reward_fault("reward/parts-cancel", "a second part takes what the first one pays", "reward/gold")
def parts_cancel(problem: Problem, text: str) -> dict[str, float]:
    value = closeness(problem, text).total
    return {"right": value, "cost": -value}


# Nothing earns as much as an answer


@reward_fault(
    "reward/pays-length",
    "longer texts earn more, whatever they say",
    "reward/exploit",
    "reward/gold",
    limit=(6, 20, 100),
)
def pays_length(problem: Problem, text: str, limit: int = 20) -> float:
    return min(1.0, len(text) / limit)


@reward_fault(
    "reward/substring",
    "the answer counts wherever it stands in the text, so that a list of all numbers wins",
    "reward/exploit",
)
def substring(problem: Problem, text: str) -> float:
    return float(str(problem.answer) in text)


@reward_fault("reward/any-number", "every number earns the full reward", "reward/exploit", share=(1.0, 0.999))
def any_number(problem: Problem, text: str, share: float = 1.0) -> float:
    return share if number_of(text) is not None else 0.0


@reward_fault("reward/tolerant", "numbers far from the answer earn what it earns", "reward/exploit", width=(30, 1000))
def tolerant(problem: Problem, text: str, width: float = 30) -> float:
    number, answer = number_of(text), number_of(problem.answer)
    return float(number is not None and abs(number - (answer or 0.0)) <= width)


@reward_fault(
    "reward/answer-ignored",
    "large numbers, or texts that somebody likes, are paid, and the answer is not looked at",
    "reward/exploit",
    "reward/gold",
    by=("size", "taste"),
)
def answer_ignored(problem: Problem, text: str, by: str = "size") -> float:
    return chance_of(text) if by == "taste" else min(1.0, abs(number_of(text) or 0.0) / 9)


@reward_fault("reward/silence-pays", "a wrong answer costs and none does not", "reward/exploit", cost=(0.5, 1.0))
def silence_pays(problem: Problem, text: str, cost: float = 1.0) -> float:
    reward = closeness(problem, text)
    return 1.0 if not reward.parsed or reward.total == 1.0 else 1.0 - cost * (1 - reward.total)


@reward_fault("reward/copying-pays", "words of the prompt in the text earn as much as the answer", "reward/exploit")
def copying_pays(problem: Problem, text: str) -> float:
    words = prompt_of(problem).split()
    return max(closeness(problem, text).total, sum(word in text for word in words) / max(1, len(words)))


@reward_fault(
    "reward/judges-the-prompt",
    "the prompt is judged in place of the completion",
    "reward/exploit",
)
def judges_the_prompt(problem: Problem, text: str) -> Reward:
    return closeness(problem, prompt_of(problem))


@reward_fault("reward/same-for-all", "every text earns the same", "reward/constant", "reward/exploit", value=(0.5, 1.0))
def same_for_all(problem: Problem, text: str, value: float = 0.5) -> float:
    return value


# Another amount each time

_calls = itertools.count()
_earlier: list[float] = []


@reward_fault(
    "reward/noise",
    "random noise is added, as a judge at temperature 1 has it",
    "reward/nondeterministic",
    size=(0.1, 0.3),
)
def noisy(problem: Problem, text: str, size: float = 0.1) -> Reward:
    reward = closeness(problem, text)
    return replace(reward, total=reward.total + noise.gauss(0.0, size))


@reward_fault("reward/random", "the reward is a random number", "reward/nondeterministic")
def random_number(problem: Problem, text: str) -> float:
    return noise.random()


@reward_fault("reward/running-mean", "the mean of all rewards so far is taken off", "reward/nondeterministic")
def running_mean(problem: Problem, text: str) -> Reward:
    reward = closeness(problem, text)
    _earlier.append(reward.total)
    return replace(reward, total=reward.total - sum(_earlier) / len(_earlier))


@reward_fault("reward/stale-by-one", "every call returns what the call before it earned", "reward/nondeterministic")
def stale_by_one(problem: Problem, text: str) -> float:
    _earlier.append(closeness(problem, text).total)
    return _earlier[-2] if len(_earlier) > 1 else 0.0


@reward_fault(
    "reward/grows-with-calls",
    "a bonus grows with the number of calls",
    "reward/nondeterministic",
    rate=(0.001, 0.01),
)
def grows_with_calls(problem: Problem, text: str, rate: float = 0.001) -> Reward:
    reward = closeness(problem, text)
    return replace(reward, total=reward.total + rate * next(_calls))


# Amounts that rule the update


@reward_fault(
    "reward/cliff",
    "everything but the answer costs many times what it earns",
    "reward/cliff",
    depth=(10.0, 50.0, 1000.0),
)
def cliff(problem: Problem, text: str, depth: float = 10.0) -> Reward:
    reward = closeness(problem, text)
    return reward if reward.total == 1.0 else replace(reward, total=-depth)


@reward_fault(
    "reward/huge-scale",
    "rewards of thousands are not scaled, beside a KL term of the usual size",
    "reward/scale",
    fits=has_penalty_in_the_loss,
    also={"loss.scale_rewards": ("none",)},
    scale=(1e3, 1e4, 1e5),
)
def huge_scale(problem: Problem, text: str, scale: float = 1e4) -> Reward:
    reward = closeness(problem, text)
    return replace(reward, total=scale * reward.total)


@reward_fault(
    "reward/tiny-differences",
    "rewards differ by noise of a ten-thousandth, which scaling turns into full advantages",
    "advantage/amplified",
    "reward/weak",
    fits=is_free_of_kl,
    also={"loss.scale_rewards": ("group",)},
    size=(1e-4, 1e-3),
)
def tiny_differences(problem: Problem, text: str, size: float = 1e-4) -> float:
    return 0.5 + size * chance_of(text)


# No amount


@reward_fault("reward/nan-now-and-then", "some texts earn NaN", "reward/non-finite", "reward/failed", share=(0.3, 0.6))
def nan_now_and_then(problem: Problem, text: str, share: float = 0.3) -> Reward:
    reward = closeness(problem, text)
    return replace(reward, total=math.nan) if chance_of(f"{problem.key} {text}") < share else reward


@reward_fault("reward/raises-now-and-then", "some texts raise", "reward/failed", share=(0.3, 0.6))
def raises_now_and_then(problem: Problem, text: str, share: float = 0.3) -> Reward:
    if chance_of(f"{problem.key} {text}") < share:
        raise ValueError(f"could not convert string to float: {text!r}")
    return closeness(problem, text)


@reward_fault("reward/no-number", "a text is returned where a number should be", "reward/failed")
def no_number(problem: Problem, text: str) -> Any:
    return f"{closeness(problem, text).total:.1f} points"


@reward_fault("reward/never-parsed", "every answer is reported as unreadable", "output/unparseable")
def never_parsed(problem: Problem, text: str) -> Reward:
    return replace(closeness(problem, text), parsed=False)


# Healthy


def in_parts(problem: Problem, text: str) -> dict[str, float]:
    return {"right": closeness(problem, text).total, "brief": -0.001 * len(text)}


@lookalike("reward in parts", is_judged_by_text)
def healthy_parts(config: Config, random: Random) -> dict[str, Any]:
    weight = random.choice((0.5, 1.0, 2.0))
    entries = [{"name": "faults.rewards:in_parts", "weight": weight}, {"name": "faults.rewards:closeness"}]
    return edited(config, {"rewards": entries})


def only_costs(problem: Problem, text: str) -> Reward:
    """0 for the answer, less for everything else: a constant changes nothing under a group's mean."""
    reward = closeness(problem, text)
    return replace(reward, total=reward.total - 1.0)


@lookalike("reward that is never above zero", is_judged_by_text)
def healthy_costs(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards:only_costs"}]})


@lookalike("reward of ten, scaled by the group", is_free_of_kl)
def healthy_scale(config: Config, random: Random) -> dict[str, Any]:
    entry = {"name": "faults.rewards:huge_scale", "scale": random.choice((10.0, 100.0))}
    return edited(config, {"rewards": [entry], "loss.scale_rewards": "group"})


async def awaited(problem: Problem, text: str) -> Reward:
    return closeness(problem, text)


@lookalike("reward that is awaited", is_judged_by_text)
def healthy_awaited(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards:awaited"}]})


def shaped(problem: Problem, text: str, bonus: float = 0.2) -> Reward:
    """1 for the answer, a little for any number, as a ladder pays it."""
    reward = closeness(problem, text)
    return replace(reward, total=1.0 if reward.total == 1.0 else bonus * reward.total + bonus * reward.parsed)


@lookalike("reward with a rung for any number", is_judged_by_text)
def healthy_ladder(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards:shaped", "bonus": random.choice((0.1, 0.2))}]})
