"""Secrets: read from the environment when they are used (`fill`), and masked wherever anything is shown.

`masked` is for configurations: what stands where secrets stand, or looks like one, is covered. `hide` is for texts,
such as messages of errors and events: it covers what looks like a secret, and every secret that was met in a
configuration or read from the environment in this process, wherever it turns up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from string import Template
from typing import Any
from urllib.parse import unquote

MASK = "<masked>"
_SHORTEST = 6  # a shorter secret is masked in its place; in texts it would cover words
_NUMBERS_TOO = frozenset(("secret", "password", "passwd", "pwd", "passphrase", "pin"))
_STRONG = frozenset(("apikey", "secret", "password", "passwd", "passphrase", "authorization", "credentials"))
_SHORT = frozenset(("key", "keys", "token", "secrets", "credential", "auth", "bearer", "cookie", "signature", "sig"))
_JOINED = frozenset(("accesstoken", "authtoken", "jwt"))
_WORDS = _NUMBERS_TOO | _STRONG | _SHORT | _JOINED
_ALONE = _WORDS - {"key", "keys", "pin", "sig", "signature"}  # words that name a secret by themselves, in a text
_KEYS = frozenset(("access", "account", "api", "auth", "client", "private", "secret", "service", "signing"))
_OF_TEXT = frozenset(("pad", "eos", "bos", "unk", "sep", "cls", "mask"))  # tokens of a tokenizer
_HARMLESS = frozenset(
    (
        *("accept", "accept-encoding", "accept-language", "cache-control", "connection", "content-type", "user-agent"),
        *("home", "lang", "language", "path", "pwd", "shell", "term", "tz", "user"),
    )
)
_REFERENCE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
_SCHEME = re.compile(r"(?:bearer|basic|token|digest|apikey)\s+", re.IGNORECASE)
_KNOWN_SHAPE = re.compile(
    r"\b(?:hf_[\w-]{8,}|sk-(?=[\w-]*\d)[\w-]{12,}|gh[opsru]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[a-z]-[\w-]{8,}"
    r"|A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?)"
)
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>`]+")
_VALUE = r"(?:\$\{\w+\}|[^\s'\",;\])}])+"
_OPTION = re.compile(rf"(?<![\w-])(--?([A-Za-z][\w-]*))(\s+|=)(\"[^\"]*\"|'[^']*'|{_VALUE})")
_SETTING = re.compile(
    rf"(?<![\w.-])([A-Za-z][\w.-]{{0,63}})(['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic|token|digest)\s+)?)({_VALUE})",
    re.IGNORECASE,
)
_BEARER = re.compile(rf"\b(bearer\s+)({_VALUE})", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?[\d.]+(?:e[-+]?\d+)?%?", re.IGNORECASE)

Cover = Callable[[str], str]
_remembered: set[str] = set()


class NoVariable(LookupError):
    """A text names a variable that the environment does not have, or a dollar sign that begins no name."""


def fill(text: str) -> str:
    """The text with `$NAME` and `${NAME}` read from the environment, now; `$$` is a dollar sign."""
    try:
        values = {name: os.environ[name].rstrip("\r\n") for name in _names(text)}
        filled = Template(text).substitute(values)
    except KeyError as error:
        raise NoVariable(f"names ${error.args[0]}, which the environment does not have: set it") from None
    except ValueError:
        raise NoVariable("has a dollar sign that begins no name: a dollar sign itself is written $$") from None
    for name, value in values.items():
        if names_secret(name) or _random(value):
            _keep(value)
    return filled


def _names(text: str) -> list[str]:
    found = Template.pattern.finditer(text)
    return [match.group("named") or match.group("braced") for match in found if match["named"] or match["braced"]]


def masked(value: Any, name: str = "") -> Any:
    """A configuration, or the value of the option `name`, with its secrets covered; references (`$NAME`) stay."""
    return _walk(value, name, _covered)


def secrets_in(value: Any, name: str = "") -> list[tuple[str, str]]:
    """The secrets that a configuration has written out, each with the dotted name of its option."""
    found: list[tuple[str, str]] = []
    for path, inner in _leaves(value, name):
        parent, _, leaf = path.rpartition(".")

        def note(text: str, path: str = path) -> str:
            if text and _covered(text) != text:
                found.append((path, _SCHEME.sub("", text, count=1) if _SCHEME.match(text) else text))
            return MASK

        _leaf(inner, leaf, parent.rpartition(".")[2].partition("[")[0], note)
    return found


def remember(value: Any, name: str = "") -> None:
    """Cover the secrets of a configuration in every text from now on."""
    for path, secret in secrets_in(value, name):
        if _random(secret) or (names_secret(path.rpartition(".")[2]) and _looks(secret)):
            _keep(secret)
            _keep(unquote(secret))


def _random(text: str) -> bool:
    """Whether a value is unlike a word, a path and a hub's name, so that it may be covered wherever it turns up."""
    return len(text) >= 8 and _looks(text) and not re.search(r"[/\\\s]", text)


def _keep(secret: str) -> None:
    if len(secret) >= _SHORTEST and MASK not in secret:
        _remembered.add(secret)


def hide(text: str) -> str:
    """A text without the secrets that are known or look like one."""
    for secret in sorted(_remembered, key=len, reverse=True):
        if secret in text:
            text = text.replace(secret, MASK)
        if (quoted := repr(secret)[1:-1]) in text:
            text = text.replace(quoted, MASK)
    return _texts(text, _covered)


def hidden(value: Any) -> Any:
    """Plain data with `hide` applied to every text in it."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {name: hidden(item) for name, item in value.items()}
    return [hidden(item) for item in value] if isinstance(value, list | tuple) else value


def names_secret(name: str) -> bool:
    """Whether a value of this name is a secret: api_key, HF_TOKEN, clientSecret, Authorization."""
    words = _words(name)
    return not _WORDS.isdisjoint(words) and not (words[-1] == "token" and _OF_TEXT & set(words))


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def _covered(text: str) -> str:
    """What is shown in the place of a secret: nothing of it but its scheme; references to the environment stay."""
    scheme = match[0] if (match := _SCHEME.match(text)) else ""
    rest = text[len(scheme) :]
    plain = _REFERENCE.sub("", rest)
    if not plain.strip(":@ ") or rest == MASK:
        return text
    return scheme + MASK


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{number}]")
    else:
        yield path, value


def _walk(value: Any, name: str, cover: Cover, parent: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _walk(item, str(key), cover, name) for key, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        return [_walk(item, name, cover, parent) for item in value]
    return _leaf(value, name, parent, cover)


def _leaf(value: Any, name: str, parent: str, cover: Cover) -> Any:
    """A value that is no mapping, masked by where it stands, by its name, or by its looks."""
    name = re.sub(r"\[\d+\]", "", name)
    inside = (_is_whole(parent) and name.lower() not in _HARMLESS) or names_secret(parent)
    whole = inside or _is_whole(name) or names_secret(name)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return cover(str(value)) if inside or not _NUMBERS_TOO.isdisjoint(_words(name)) else value
    if isinstance(value, list | tuple):
        items = []
        for before, item in zip(("", *value), value, strict=False):
            option = isinstance(before, str) and before.startswith("-") and "=" not in before and names_secret(before)
            named = whole or option
            items.append(cover(item) if named and isinstance(item, str) else _leaf(item, "", "", cover))
        return items
    if not isinstance(value, str) or not value:
        return value
    return cover(value) if whole else _texts(value, cover)


def _is_whole(name: str) -> bool:
    """Whether every value of a section of this name may be a secret: headers, extra_headers, env, environment."""
    return name.lower().endswith("headers") or name.lower() in ("env", "environment")


def _texts(text: str, cover: Cover) -> str:
    """A text with what looks like a secret covered: parts of URLs, options and settings, tokens of known shapes."""
    if "://" in text:
        text = _URL.sub(lambda match: _url(match[0], cover), text)
    text = _OPTION.sub(lambda match: _option(match, cover), text)
    text = _SETTING.sub(lambda match: _setting(match, cover), text)
    text = _BEARER.sub(lambda match: match[1] + (cover(match[2]) if _looks(match[2]) else match[2]), text)
    return _KNOWN_SHAPE.sub(lambda match: cover(match[0]), text)


def _looks(word: str) -> bool:
    return any(c.isdigit() for c in word) or len(word) >= 16


def _option(match: re.Match[str], cover: Cover) -> str:
    if not names_secret(match[2]) or match[4].startswith("-") or match[4] == MASK:
        return match[0]
    if "=" not in match[3] and not _looks(match[4]):
        return match[0]  # a sentence about the option
    quote = match[4][0] if match[4][0] in "'\"" else ""
    return f"{match[1]}{match[3]}{quote}{cover(match[4].strip(quote) if quote else match[4])}{quote}"


def _setting(match: re.Match[str], cover: Cover) -> str:
    """`api_key=…`, `token: …`, `Authorization: Bearer …`, where the value looks like a secret or is a password.

    The last word names the thing: access_token is one, KeyError, token_mean and group_key are none.
    """
    words, value = _words(match[1]), match[3]
    last = words[-1] if words else ""
    named = last in _ALONE or (last == "key" and not _KEYS.isdisjoint(words[:-1]))
    named = named and not (last == "token" and _OF_TEXT & set(words))
    spoken = not _looks(value) and not {"password", "passwd", "passphrase", "secret"} & set(words)
    if not named or spoken or value == MASK or _is_figure(value):
        return match[0]
    if value.lower() in ("null", "none", "true", "false") or value.startswith(("{", "[", "//")):
        return match[0]
    return match[1] + match[2] + cover(value)


def _is_figure(value: str) -> bool:
    return bool(_NUMBER.fullmatch(value)) and ("." in value or len(value) < _SHORTEST)


def _url(url: str, cover: Cover) -> str:
    """Name and password before the host, and the values of the query and the fragment unless they are short."""
    start, _, rest = url.partition("://")
    place, mark, query = re.match(r"([^?#]*)([?#]?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    authority, slash, path = place.partition("/")
    userinfo, at, host = authority.rpartition("@")
    if at:
        user, colon, password = userinfo.partition(":")
        referred = password and not _REFERENCE.sub("", password)  # then the name is no token
        user, password = (user if referred or not user else cover(user)), cover(password) if password else ""
        authority = f"{user}{colon}{password}@{host}"

    def value(match: re.Match[str]) -> str:
        name, equals, given = match[0].partition("=")
        if not equals:
            return cover(name) if len(name) >= _SHORTEST and _looks(name) else name
        return name + equals + (cover(given) if names_secret(name) or len(given) >= _SHORTEST else given)

    shown = re.sub(r"[^&;#?]+", value, query)
    return f"{start}://{authority}{slash}{path}{mark}{shown}"
