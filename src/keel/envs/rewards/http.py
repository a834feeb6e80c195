"""Remote rewards: a judge or reward model behind a URL, and a chat model as a judge."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from keel.base.errors import KeelError
from keel.base.json_http import RequestFailed, ask, below, check_reachable, shown
from keel.base.parts import Range
from keel.base.types import Problem
from keel.envs.rewards.text import PATTERN, is_pattern

CONCURRENCY = 8


def _names_a_host(url: Any) -> bool:
    parts = urlsplit(str(url))
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _is_score_pattern(pattern: Any) -> bool:
    return is_pattern(pattern) and re.compile(pattern).groups == 1


def _is_path(score: Any) -> bool:
    return re.fullmatch(r"[^.\s]+(\.[^.\s]+)*", str(score)) is not None


Url = Annotated[str, Range("http:// or https:// and a host", _names_a_host)]
ScorePath = Annotated[str, Range("a path such as score or results.0.value", _is_path)]
ScorePattern = Annotated[str, Range(f"{PATTERN} with one group, around the score", _is_score_pattern)]
Template = Annotated[str, Range("a text with {completion}", lambda template: "{completion}" in str(template))]
Seconds = Annotated[float, Field(gt=0)]
Concurrency = Annotated[int, Field(ge=1)]
Retries = Annotated[int, Field(ge=0)]
Backoff = Annotated[float, Field(ge=0)]
TEMPLATE = (
    "Judge the answer to a question.\n\nQuestion:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to judge:\n"
    "{completion}\n\nSay in one sentence why, then end with a line `Score: N`, N from 0 (wrong) to 10 (right)."
)


def http(
    problem: Problem,
    text: str,
    turns: Sequence[str],
    url: Url,
    score: ScorePath = "score",
    headers: Mapping[str, str] | None = None,
    timeout_s: Seconds = 10.0,
    retries: Retries = 2,
    backoff_s: Backoff = 0.5,
    concurrency: Concurrency = CONCURRENCY,
) -> float:
    """The score that the server at `url` returns.

    The request is `{"key", "prompt", "completion", "turns", "answer"}` as JSON. `score` is the path of the score in the
    JSON answer, such as `score` or `results.0.value`. Connection errors, timeouts (`timeout_s`), status 429 and 5xx are
    retried `retries` times with exponential backoff from `backoff_s`. `headers` and `url` may contain environment
    variables: `{Authorization: Bearer $JUDGE_TOKEN}`. `concurrency` is the number of concurrent requests per group.
    """
    body = {
        "key": problem.key,
        "prompt": problem.prompt if isinstance(problem.prompt, str) else [dict(m) for m in problem.prompt],
        "completion": text,
        "turns": list(turns),
        "answer": problem.answer,
    }
    answered = ask(
        url, body, option="rewards.url", headers=headers, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s
    )
    return _number(_at(answered, score, url), url, score)


def chat_judge(
    problem: Problem,
    text: str,
    url: Url,
    model: str,
    template: Template = TEMPLATE,
    pattern: ScorePattern = r"Score:\s*(-?\d+(?:\.\d+)?)",
    low: float = 0.0,
    high: float = 10.0,
    max_tokens: int = 512,
    headers: Mapping[str, str] | None = None,
    timeout_s: Seconds = 60.0,
    retries: Retries = 2,
    backoff_s: Backoff = 1.0,
    concurrency: Concurrency = CONCURRENCY,
) -> float:
    """The score of a chat model behind an OpenAI-compatible `url` (such as http://host:8000/v1), scaled to [0, 1].

    `template` may contain {prompt}, {completion} and {answer}. The last match of `pattern` is the score, scaled by
    `(score − low) / (high − low)`. A reply without a score, or with one out of range, is a failure and not a 0.
    """
    filled = {"prompt": _plain(problem.prompt), "completion": text, "answer": str(problem.answer)}
    question = re.sub(r"\{(prompt|completion|answer)\}", lambda match: filled[match.group(1)], template)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    endpoint = below(url, "/chat/completions")
    answered = ask(
        endpoint, body, option="rewards.url", headers=headers, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s
    )
    reply = _at(answered, "choices.0.message.content", endpoint)
    scores = re.findall(pattern, str(reply))
    if not scores:
        raise RequestFailed(f"{shown(endpoint)} replied without a score: {str(reply)[:80]!r}")
    value = _number(scores[-1], endpoint, "the reply")
    if not low <= value <= high:
        raise RequestFailed(f"{shown(endpoint)} gave the score {value:g}, outside {low:g} to {high:g}")
    return (value - low) / (high - low)


def check_chat_judge(params: Mapping[str, Any]) -> None:
    """Refuse an empty range of scores."""
    low, high = params.get("low", 0.0), params.get("high", 10.0)
    if not low < high:
        raise KeelError(f"reward chat_judge: low is {low} and high is {high}: high must be above low")


def probe(url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 10.0) -> None:
    """Raise a KeelError if the server at `url` is down or a variable is not set. Sends no request."""
    try:
        check_reachable("the judge", url, headers, option="rewards.url", timeout_s=timeout_s)
    except RequestFailed as error:
        raise KeelError(str(error)) from error


def _at(data: Any, path: str, url: str) -> Any:
    for key in path.split("."):
        try:
            data = data[int(key)] if isinstance(data, list) else data[key]
        except (KeyError, IndexError, ValueError, TypeError):
            holds = (
                f"has {', '.join(map(str, data)) or 'nothing'}" if isinstance(data, dict) else f"is {str(data)[:60]}"
            )
            raise RequestFailed(f"{shown(url)} answered without {path!r}: at {key!r} the answer {holds}") from None
    return data


def _number(value: Any, url: str, where: str) -> float:
    try:
        if isinstance(value, bool | int | float | str):
            return float(value)
    except ValueError:
        pass
    raise RequestFailed(f"{shown(url)} gave {str(value)[:60]!r} at {where}, which is not a number")


def _plain(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(str(message["content"]) for message in prompt)
