"""Read the options of a shell script that starts another trainer. Nothing is executed."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.config import text
from keel.lab.migrate.interpolate import arithmetic

SHELLS = (".sh", ".bash", ".txt")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_NAMED = re.compile(r"\+*~?([A-Za-z_][\w.]*)=(.*)$", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?$", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_BEFORE = ("export", "local", "declare", "readonly", "env", "then", "else", "do", "{")
_NO_TRAINER = ("echo", "printf", "tee", "cat", "cd", "mkdir", "cp", "rm", "source", ".", "set", "unset", "pip", "sleep")
_MAX_DEPTH = 8


def options_of_script(content: str, path: Path) -> Iterator[tuple[str, Any]]:
    """The `key=value` and `--key value` words of the commands; `name=value` in front of a command is a variable.

    Variables with exactly one value in the script are filled in, and `$((a * b))` is computed; any other `$` stays.
    """
    try:
        commands = [shlex.split(line) for line in _commands(_SUM.sub(_without_spaces, content))]
    except ValueError as error:
        raise KeelError(f"cannot read {path} as a shell script: {error}") from None
    plain = path.suffix == ".txt"  # a list of options, not a script: it has no variables
    variables: dict[str, set[str]] = {}
    trainer_commands: list[list[str]] = []
    for command in commands:
        position = 0
        while position < len(command) and not plain:
            assigned = _ASSIGNED.match(command[position])
            if assigned:
                variables.setdefault(assigned[1], set()).add(assigned[2])
            elif command[position] not in _BEFORE:
                break
            position += 1
        if command[position : position + 1] and command[position] not in _NO_TRAINER:
            trainer_commands.append(command[position:])
    # the value of a name with two values depends on the script's control flow
    known = {name: next(iter(values)) for name, values in variables.items() if len(values) == 1}
    for command in trainer_commands:
        for name, word in _options(command):
            yield name, _value(word, known, path)


def _without_spaces(match: re.Match[str]) -> str:
    return re.sub(r"\s+", "", match[0])


def _commands(content: str) -> Iterator[str]:
    """Split the script into commands: join lines at backslashes, remove comments, keep quotes."""
    command, quote, position = "", "", 0
    while position < len(content):
        letter, pair = content[position], content[position : position + 2]
        position += 1
        if quote:
            if pair == "\\" + quote and quote == '"':
                command, position = command + pair, position + 1
                continue
            quote = "" if letter == quote else quote
        elif pair == "\\\n":
            letter, position = " ", position + 1
        elif letter == "\\":
            letter, position = pair, position + 1
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (not command or command[-1].isspace()):
            end = content.find("\n", position)
            position = len(content) if end < 0 else end
            continue
        elif letter in "\n;&|":
            yield command
            command = ""
            continue
        command += letter
    yield command


def _options(words: list[str]) -> Iterator[tuple[str, str | list[str] | None]]:
    """The options among a command's words; the value of a flag is all words up to the next option."""
    end = next((i for i, word in enumerate(words) if re.match(r"\d*[<>]", word)), len(words))
    position, words = 0, words[:end]
    while position < len(words):
        word = words[position]
        position += 1
        named, flag = _NAMED.match(word), _FLAG.match(word)
        if named:
            yield named[1], _closed(named[2])
        elif flag and flag[2] is not None:
            yield flag[1], _closed(flag[2])
        elif flag:
            start = position
            while position < len(words) and not (_NAMED.match(words[position]) or _FLAG.match(words[position])):
                position += 1
            follows = [word for word in words[start:position] if word not in ("$@", "$*")]
            yield flag[1], (follows if len(follows) > 1 else follows[0]) if follows else None


def _closed(word: str) -> str:
    """A word without the closing bracket of its array."""
    return word[:-1] if word.endswith(")") and word.count(")") > word.count("(") else word


def _value(word: str | list[str] | None, known: Mapping[str, str], path: Path) -> Any:
    if word is None:
        return True  # a flag without a value
    if isinstance(word, list):
        return [_value(item, known, path) for item in word]
    filled = _filled(word, known)
    return filled if "$" in filled else text.parse(filled, f"a value in {path}")


def _filled(word: str, known: Mapping[str, str]) -> str:
    for _ in range(_MAX_DEPTH):
        filled = _SUM.sub(lambda match: _computed(match, known), _VARIABLE.sub(lambda m: _lookup(m, known), word))
        if filled == word:
            break
        word = filled
    return word


def _lookup(match: re.Match[str], known: Mapping[str, str]) -> str:
    name = match[1] or match[3]
    otherwise = match[0] if match[2] is None else match[2].strip("\"'")
    return known.get(name, otherwise)


def _computed(match: re.Match[str], known: Mapping[str, str]) -> str:
    """The value of `$((a * b))`, with the shell's integer division."""
    expression = match[1].strip().replace("//", "/").replace("/", "//")
    try:
        tree = ast.parse(expression, mode="eval").body
        return str(arithmetic(tree, lambda name: int(_filled(known[name], known))))
    except (SyntaxError, ValueError, RecursionError):
        return match[0]
