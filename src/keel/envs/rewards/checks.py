"""Check the parameters of rewards before a model is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from keel.base.errors import KeelError
from keel.envs.answers import require_math_verify
from keel.envs.sandbox import SandboxLimits

_KEYS = ("pattern", "tag", "reward")


def _format(params: Mapping[str, Any]) -> None:
    if params.get("pattern") is not None:
        _pattern("format", params["pattern"])
    _tags("format", params)


def _tag_count(params: Mapping[str, Any]) -> None:
    _tags("tag_count", params)


def _regex(params: Mapping[str, Any]) -> None:
    compiled = _pattern("regex", params["pattern"])
    group = params.get("group")
    known = compiled.groupindex if isinstance(group, str) else range(compiled.groups + 1)
    if group is not None and group not in known:
        raise KeelError(f"reward regex: the pattern {params['pattern']!r} has no group {group!r}")


def _ladder(params: Mapping[str, Any]) -> None:
    rungs = params["rungs"]
    if isinstance(rungs, str) or not isinstance(rungs, Sequence) or not rungs:
        raise KeelError(f"reward ladder: rungs is {rungs!r}, it must be a list such as [{{tag: answer, value: 0.2}}]")
    for number, rung in enumerate(rungs):
        where = f"reward ladder: rungs[{number}]"
        if not isinstance(rung, Mapping) or sum(key in rung for key in _KEYS) != 1 or "value" not in rung:
            raise KeelError(f"{where} is {rung!r}, it must have a value and one of {', '.join(_KEYS)}")
        for key in rung:
            if key not in (*_KEYS, "value", *(("at_least",) if "reward" in rung else ())):
                raise KeelError(f"{where} has {key!r}: it takes value, one of {', '.join(_KEYS)}, at_least")
        for key in ("value", "at_least"):
            if key in rung and not _is_number(rung[key]):
                raise KeelError(f"{where}.{key} is {rung[key]!r}, it must be a number")
        if "pattern" in rung:
            _pattern("ladder", rung["pattern"])
        if "tag" in rung:
            _tags("ladder", {"tags": [rung["tag"]]})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _length(params: Mapping[str, Any]) -> None:
    _above_zero("length", params, "scale")


def _cosine(params: Mapping[str, Any]) -> None:
    _above_zero("cosine", params, "max_length")


def _http(params: Mapping[str, Any]) -> None:
    _remote("http", params)
    score = params.get("score", "score")
    if not re.fullmatch(r"[^.\s]+(\.[^.\s]+)*", score):
        raise KeelError(f"reward http: score is {score!r}, it must be a path such as score or results.0.value")


def _chat_judge(params: Mapping[str, Any]) -> None:
    _remote("chat_judge", params)
    compiled = _pattern("chat_judge", params["pattern"]) if "pattern" in params else None
    if compiled is not None and compiled.groups != 1:
        raise KeelError(f"reward chat_judge: pattern {params['pattern']!r} must have one group, around the score")
    if "template" in params and "{completion}" not in params["template"]:
        raise KeelError(
            "reward chat_judge: template has no {completion}: add it, so that the judge sees the completion"
        )
    low, high = params.get("low", 0.0), params.get("high", 10.0)
    if not low < high:
        raise KeelError(f"reward chat_judge: low is {low} and high is {high}: high must be above low")


def _remote(name: str, params: Mapping[str, Any]) -> None:
    url = params["url"]
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise KeelError(f"reward {name}: url is {url!r}, it must begin with http:// or https:// and name a host")
    headers = params.get("headers") or {}
    if not isinstance(headers, Mapping) or not all(isinstance(v, str) for v in headers.values()):
        raise KeelError(f"reward {name}: headers is {headers!r}, it must be names and texts, such as $JUDGE_TOKEN")
    for key in ("timeout_s", "concurrency"):
        _above_zero(name, params, key)
    for key in ("retries", "backoff_s"):
        if params.get(key, 0) < 0:
            raise KeelError(f"reward {name}: {key} is {params[key]}, it must be 0 or more")


def _above_zero(name: str, params: Mapping[str, Any], key: str) -> None:
    if key in params and not params[key] > 0:
        raise KeelError(f"reward {name}: {key} is {params[key]}, it must be above 0")


def _pattern(name: str, pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise KeelError(f"reward {name}: pattern {pattern!r} is not a valid regular expression: {error}") from error


def _tags(name: str, params: Mapping[str, Any]) -> None:
    tags = params.get("tags", ("answer",))
    fine = isinstance(tags, Sequence) and not isinstance(tags, str) and len(tags) > 0
    if not fine or not all(isinstance(tag, str) and re.fullmatch(r"[^<>/\s]+", tag) for tag in tags):
        raise KeelError(f"reward {name}: tags is {tags!r}, it must be a list of names such as [think, answer]")


def _code(params: Mapping[str, Any]) -> None:
    if not 0 <= params.get("partial", 0.0) < 1:
        raise KeelError(f"reward code: partial is {params['partial']}, it must be at least 0 and below 1")
    SandboxLimits.of(params)


CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "math": lambda params: require_math_verify("reward math"),
    "format": _format,
    "tag_count": _tag_count,
    "regex": _regex,
    "ladder": _ladder,
    "length": _length,
    "cosine": _cosine,
    "code": _code,
    "http": _http,
    "chat_judge": _chat_judge,
}
