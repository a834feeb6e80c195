"""Secrets: read from the environment at use (`expand_env`) and masked in all output.

`masked` masks a configuration: values of secret options, and values that look like a secret. `redact_text` masks texts,
such as errors and events: values that look like a secret, and every secret that this process has read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from string import Template
from typing import Any
from urllib.parse import unquote

MASK = "<masked>"
_SHORTEST = 6  # shorter secrets are masked only as option values: in texts they would match words
_NUMBERS_TOO = frozenset(("secret", "password", "passwd", "pwd", "passphrase", "pin"))
_STRONG = frozenset(("apikey", "secret", "password", "passwd", "passphrase", "authorization", "credentials"))
_SHORT = frozenset(("key", "keys", "token", "secrets", "credential", "auth", "bearer", "cookie", "signature", "sig"))
_JOINED = frozenset(("accesstoken", "authtoken", "jwt"))
_SECRET_WORDS = _NUMBERS_TOO | _STRONG | _SHORT | _JOINED
_ALONE = _SECRET_WORDS - {"key", "keys", "pin", "sig", "signature"}  # secret in a text without a prefix such as `api`
_KEY_PREFIXES = frozenset(("access", "account", "api", "auth", "client", "private", "secret", "service", "signing"))
_TOKENIZER_WORDS = frozenset(("pad", "eos", "bos", "unk", "sep", "cls", "mask"))  # a tokenizer's special tokens
# Words before `key` in names of columns, groupings and sort keys.
_COLUMN_WORDS = frozenset(
    ("input", "output", "prompt", "answer", "label", "truth", "truths", "fn", "column", "group", "sort")
)
_NOT_SECRET = frozenset(
    (
        *("accept", "accept-encoding", "accept-language", "cache-control", "connection", "content-type", "user-agent"),
        *("home", "lang", "language", "path", "pwd", "shell", "term", "tz", "user"),
    )
)
_REFERENCE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
_SCHEME = re.compile(r"(?:bearer|basic|token|digest|apikey)\s+", re.IGNORECASE)
_TOKEN_FORMAT = re.compile(
    r"\b(?:hf_(?:(?=[\w-]*[A-Z\d])[\w-]{8,}|[a-z]{24,})|sk-(?=[\w-]*\d)[\w-]{12,}|gh[opsru]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[a-z]-[\w-]{8,}"
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

Mask = Callable[[str], str]
_remembered: set[str] = set()


class UnsetVariable(LookupError):
    """A text refers to an unset environment variable, or has a dollar sign without a name."""


def expand_env(text: str) -> str:
    """Replace `$NAME` and `${NAME}` by environment variables; `$$` is a dollar sign."""
    try:
        values = {name: os.environ[name].rstrip("\r\n") for name in _names(text)}
        filled = Template(text).substitute(values)
    except KeyError as error:
        raise UnsetVariable(f"names ${error.args[0]}, which is not set in the environment: set it") from None
    except ValueError:
        raise UnsetVariable("has a dollar sign without a variable name: write $$ for a dollar sign") from None
    for name, value in values.items():
        if names_secret(name) or _looks_random(value):
            _remember(value)
    return filled


def _names(text: str) -> list[str]:
    matches = Template.pattern.finditer(text)
    return [match["named"] or match["braced"] for match in matches if match["named"] or match["braced"]]


def masked(value: Any, name: str = "") -> Any:
    """Mask the secrets of a configuration, or of the option `name`. References (`$NAME`) stay."""
    return _walk(value, name, _mask)


def secrets_in(value: Any, name: str = "") -> list[tuple[str, str]]:
    """The literal secrets of a configuration, each with its dotted option name."""
    secrets: list[tuple[str, str]] = []
    for path, inner in _leaves(value, name):
        parent, _, leaf = path.rpartition(".")

        def collect(text: str, path: str = path) -> str:
            if text and _mask(text) != text:
                secrets.append((path, _SCHEME.sub("", text, count=1) if _SCHEME.match(text) else text))
            return MASK

        _leaf(inner, leaf, parent.rpartition(".")[2].partition("[")[0], collect)
    return secrets


def register_secrets(value: Any, name: str = "") -> None:
    """Mask a configuration's secrets in all later texts."""
    for path, secret in secrets_in(value, name):
        if _looks_random(secret) or (names_secret(path.rpartition(".")[2]) and _looks_generated(secret)):
            _remember(secret)
            _remember(unquote(secret))


def _looks_random(text: str) -> bool:
    """Whether a value looks random, unlike a word, path or hub name, so that masking it in any text is safe."""
    return len(text) >= 8 and _looks_generated(text) and not re.search(r"[/\\\s]", text)


def _remember(secret: str) -> None:
    if len(secret) >= _SHORTEST and MASK not in secret:
        _remembered.add(secret)


def redact_text(text: str) -> str:
    """A text with registered secrets, and values that look like secrets, masked."""
    for secret in sorted(_remembered, key=len, reverse=True):
        if secret in text:
            text = text.replace(secret, MASK)
        if (quoted := repr(secret)[1:-1]) in text:
            text = text.replace(quoted, MASK)
    return _mask_text(text, _mask)


def redact_data(value: Any) -> Any:
    """Plain data with `redact_text` applied to every string."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {name: redact_data(item) for name, item in value.items()}
    return [redact_data(item) for item in value] if isinstance(value, list | tuple) else value


def names_secret(name: str) -> bool:
    """Whether the name is that of a secret: api_key, HF_TOKEN, clientSecret, Authorization."""
    words = _split_name(name)
    if _SECRET_WORDS.isdisjoint(words):
        return False
    if words[-1] == "key" and words[-2:-1] and words[-2] in _COLUMN_WORDS:
        return not _SECRET_WORDS.isdisjoint(words[:-1])
    return not (words[-1] == "token" and _TOKENIZER_WORDS & set(words))


def _split_name(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def _mask(text: str) -> str:
    """Mask a secret but keep its scheme (Bearer, Basic); references to the environment stay."""
    scheme = match[0] if (match := _SCHEME.match(text)) else ""
    secret = text[len(scheme) :]
    if not _REFERENCE.sub("", secret).strip(":@ ") or secret == MASK:
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


def _walk(value: Any, name: str, mask: Mask, parent: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _walk(item, str(key), mask, name) for key, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        return [_walk(item, name, mask, parent) for item in value]
    return _leaf(value, name, parent, mask)


def _leaf(value: Any, name: str, parent: str, mask: Mask) -> Any:
    """Mask a value that is not a mapping, by its section, its name or its format."""
    name = re.sub(r"\[\d+\]", "", name)
    in_secret_section = (_holds_secrets(parent) and name.lower() not in _NOT_SECRET) or names_secret(parent)
    secret = in_secret_section or _holds_secrets(name) or names_secret(name)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return mask(str(value)) if in_secret_section or not _NUMBERS_TOO.isdisjoint(_split_name(name)) else value
    if isinstance(value, list | tuple):
        items = []
        for before, item in zip(("", *value), value, strict=False):
            option = isinstance(before, str) and before.startswith("-") and "=" not in before and names_secret(before)
            items.append(mask(item) if (secret or option) and isinstance(item, str) else _leaf(item, "", "", mask))
        return items
    if not isinstance(value, str) or not value:
        return value
    return mask(value) if secret else _mask_text(value, mask)


def _holds_secrets(name: str) -> bool:
    """Whether all values of this section may be secrets: headers, extra_headers, env, environment."""
    return name.lower().endswith("headers") or name.lower() in ("env", "environment")


def _mask_text(text: str, mask: Mask) -> str:
    """Mask likely secrets in a text: parts of URLs, options and settings, tokens of known formats."""
    if "://" in text:
        text = _URL.sub(lambda match: _mask_url(match[0], mask), text)
    text = _OPTION.sub(lambda match: _mask_option(match, mask), text)
    text = _SETTING.sub(lambda match: _mask_setting(match, mask), text)
    text = _BEARER.sub(lambda match: match[1] + (mask(match[2]) if _looks_generated(match[2]) else match[2]), text)
    return _TOKEN_FORMAT.sub(lambda match: mask(match[0]), text)


def _looks_generated(text: str) -> bool:
    return any(c.isdigit() for c in text) or len(text) >= 16


def _mask_option(match: re.Match[str], mask: Mask) -> str:
    if not names_secret(match[2]) or match[4].startswith("-") or match[4] == MASK:
        return match[0]
    if "=" not in match[3] and not _looks_generated(match[4]):
        return match[0]  # prose about the option
    quote = match[4][0] if match[4][0] in "'\"" else ""
    return f"{match[1]}{match[3]}{quote}{mask(match[4].strip(quote) if quote else match[4])}{quote}"


def _mask_setting(match: re.Match[str], mask: Mask) -> str:
    """`api_key=…`, `token: …`, `Authorization: Bearer …`, if the value looks like a secret or is a password.

    Only the last word of a name counts: access_token is a secret; KeyError, token_mean and group_key are not.
    """
    words, value = _split_name(match[1]), match[3]
    last = words[-1] if words else ""
    secret_name = last in _ALONE or (last == "key" and not _KEY_PREFIXES.isdisjoint(words[:-1]))
    secret_name = secret_name and not (last == "token" and _TOKENIZER_WORDS & set(words))
    prose = not _looks_generated(value) and not {"password", "passwd", "passphrase", "secret"} & set(words)
    if not secret_name or prose or value == MASK or _is_number(value):
        return match[0]
    if value.lower() in ("null", "none", "true", "false") or value.startswith(("{", "[", "//")):
        return match[0]
    return match[1] + match[2] + mask(value)


def _is_number(value: str) -> bool:
    return bool(_NUMBER.fullmatch(value)) and ("." in value or len(value) < _SHORTEST)


def _mask_url(url: str, mask: Mask) -> str:
    """Mask a URL's user and password, and secret or long values in its query and fragment."""
    scheme, _, remainder = url.partition("://")
    location, separator, query = re.match(r"([^?#]*)([?#]?)(.*)", remainder, re.DOTALL).groups()  # type: ignore[union-attr]
    authority, slash, path = location.partition("/")
    userinfo, at, host = authority.rpartition("@")
    if at:
        user, colon, password = userinfo.partition(":")
        is_reference = password and not _REFERENCE.sub("", password)  # then the user name is not a token
        user, password = (user if is_reference or not user else mask(user)), mask(password) if password else ""
        authority = f"{user}{colon}{password}@{host}"

    def mask_parameter(match: re.Match[str]) -> str:
        name, equals, parameter = match[0].partition("=")
        if not equals:
            return mask(name) if len(name) >= _SHORTEST and _looks_generated(name) else name
        return name + equals + (mask(parameter) if names_secret(name) or len(parameter) >= _SHORTEST else parameter)

    masked_query = re.sub(r"[^&;#?]+", mask_parameter, query)
    return f"{scheme}://{authority}{slash}{path}{separator}{masked_query}"
