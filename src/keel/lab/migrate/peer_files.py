"""Read another trainer's configuration: YAML, JSON, Python or shell. Nothing is executed."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import parse_json
from keel.config import peers, text
from keel.config.load import flatten_options

_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:\s*)?(\.*[A-Za-z_][\w.]*)\s*(?:,\s*([^{}]*))?\}")
_MAX_DEPTH = 8


def arithmetic(node: ast.expr, lookup: Callable[[str], Any]) -> int:
    """The value of + - * // % on whole numbers and names; a `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -arithmetic(node.operand, lookup)
    if isinstance(node, ast.Name):
        try:
            value = lookup(node.id)
        except KeyError:
            raise ValueError(f"{node.id} is not known") from None
        if type(value) is int:
            return value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = arithmetic(node.left, lookup), arithmetic(node.right, lookup)
        if right == 0 and isinstance(node.op, ast.FloorDiv | ast.Mod):
            raise ValueError("division by zero")
        return _OPERATIONS[type(node.op)](left, right)
    raise ValueError("not arithmetic on whole numbers")


def interpolated(name: str, value: Any, values: Mapping[str, Any], depth: int = 0) -> Any:
    """The value of option `name` with `${other.option}` filled in from the same file; unknown references stay."""
    if isinstance(value, list):
        return [interpolated(name, item, values, depth) for item in value]
    if not isinstance(value, str) or "${" not in value or depth > _MAX_DEPTH:
        return value

    def resolve(match: re.Match[str]) -> Any:
        target = _absolute(name, match[1])
        if target in values:
            return interpolated(target, values[target], values, depth + 1)
        return match[0] if match[2] is None else text.parse(match[2], f"the value of {name}")

    reference = _REFERENCE.fullmatch(value.strip())
    if reference is not None:
        return resolve(reference)
    return _REFERENCE.sub(lambda match: _as_text(resolve(match)), value)


def _absolute(name: str, target: str) -> str:
    """Resolve a relative reference: `${.x}` is a sibling of the option, each further dot goes up one section."""
    dots = len(target) - len(target.lstrip("."))
    return ".".join([*name.split(".")[:-dots], target[dots:]]) if dots else target


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else text.dump(value)


def undetermined(value: Any) -> bool:
    """Whether a value still contains a reference that only a shell or hydra could resolve."""
    if isinstance(value, list | tuple):
        return any(undetermined(item) for item in value)
    return isinstance(value, str) and ("$" in value or "`" in value)


SHELLS = (".sh", ".bash", ".txt")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_NAMED = re.compile(r"\+*~?([A-Za-z_][\w.]*)=(.*)$", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?$", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_BEFORE = ("export", "local", "declare", "readonly", "env", "then", "else", "do", "{")
_NO_TRAINER = ("echo", "printf", "tee", "cat", "cd", "mkdir", "cp", "rm", "source", ".", "set", "unset", "pip", "sleep")
_MAX_DEPTH_SHELL = 8


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
    for _ in range(_MAX_DEPTH_SHELL):
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


COMPUTED = "its value is computed in Python: set Keel's option by hand"
VARIABLE = "contains a shell variable: set by hand"
INTERPOLATED = "contains an interpolation that this file does not define: set by hand"
# Arguments of a trainer's class that are objects in Python and options here.
_OBJECTS = {
    "args": "no call of a TRL configuration was found: set its options by hand",
    "model": "set model.name by hand",
    "teacher_model": "set reference.model by hand",
}
_CONFIGS = ("GRPOConfig", "DistillationConfig", "GKDConfig")
# Arguments whose object is itself a parsed call: the user has nothing to set.
_READ_WITH: Mapping[str, tuple[str, ...]] = {"args": _CONFIGS, "peft_config": ("LoraConfig",)}
# The parsed calls, each with the names of its positional arguments.
_CALLS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_CONFIGS, ("output_dir",)),
    "DistillationTrainer": ("model", "teacher_model", "args", "train_dataset", "eval_dataset", "processing_class"),
    "GKDTrainer": ("model", "teacher_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "LoraConfig": (),
}
_LORA = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"}


@dataclass(frozen=True)
class Reading:
    """A parsed file: options with values, options to set by hand, arguments of other calls, a conflict."""

    values: Mapping[str, Any]
    by_hand: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # name → (the text in the file, the reason)
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # argument → the call that it was read from
    conflict: str | None = None  # an option given twice with two values
    config: str = ""  # the TRL class that a Python file calls

    def __contains__(self, name: str) -> bool:
        return name in self.values or name in self.by_hand


def read(path: Path) -> Reading:
    """The options of a peer's configuration by dotted name."""
    if not path.is_file():
        raise KeelError(f"no file at {path}: give a configuration of TRL, verl or OpenRLHF (.yaml, .json, .py or .sh)")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise KeelError(f"cannot read {path}: {error}") from None
    if path.suffix == ".py":
        reading = _python(content, path)
    elif path.suffix in SHELLS:
        reading = _resolved(options_of_script(content, path), VARIABLE)
    else:
        reading = _resolved(_mapping(content, path), INTERPOLATED)
    if not reading.values:
        raise KeelError(f"{path} has no options: expected a GRPOConfig, a YAML mapping or key=value words")
    return reading


def _resolved(pairs: Iterable[tuple[str, Any]], reason: str) -> Reading:
    """Resolve interpolations of the file's own options; values that still contain a `$` must be set by hand."""
    values, conflict = _unique((peers.normal(name), value) for name, value in pairs)
    filled = {name: interpolated(name, value, values) for name, value in values.items()}
    unresolved = {name: (value, reason) for name, value in filled.items() if undetermined(value)}
    return Reading(
        {name: value for name, value in filled.items() if name not in unresolved}, unresolved, conflict=conflict
    )


def _unique(pairs: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], str | None]:
    values: dict[str, Any] = {}
    conflict = None
    for name, value in pairs:
        if name in values and values[name] != value:
            conflict = conflict or str(
                peers.conflict_error("", (name, text.dump(values[name])), (name, text.dump(value)))
            )
        values[name] = value
    return values, conflict


def _mapping(content: str, path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".json":
        try:
            data = parse_json(content)
        except ValueError as error:
            raise KeelError(f"{path} is not JSON: {error}") from None
    else:
        data = text.parse(content, str(path))
    if not isinstance(data, Mapping):
        raise KeelError(f"{path} contains a {type(data).__name__}: a configuration is a mapping of options")
    for name, value in flatten_options("", data):
        if "defaults" in (name, name.rpartition(".")[2]) or name.endswith("_target_"):
            continue  # hydra's own entries: files to compose, classes to instantiate
        yield name, value


# --------------------------------------------------------------------------------------------------- Python


def _python(content: str, path: Path) -> Reading:
    """The literal arguments of `GRPOConfig(…)`, `GRPOTrainer(…)` and `LoraConfig(…)`; nothing is executed."""
    try:
        module = ast.parse(content)
    except SyntaxError as error:
        where = "" if error.lineno is None else f"line {error.lineno}: "
        raise KeelError(f"{path} is not Python: {where}{error.msg}") from None
    except (RecursionError, MemoryError):
        raise KeelError(f"{path} cannot be read: an expression is nested too deeply") from None
    constants = _constants(module)
    calls = [(_called(node), node) for node in ast.walk(module) if isinstance(node, ast.Call)]
    called_names = {name for name, _ in calls}
    options: list[tuple[str, Any]] = []
    by_hand: dict[str, tuple[Any, str]] = {}
    elsewhere: dict[str, str] = {}
    for called, call in calls:
        if called not in _CALLS:
            continue
        for name, node in (*zip(_CALLS[called], call.args, strict=False), *_arguments(call, constants)):
            try:
                value = _literal(node, constants) if node is not None else _unknown()
            except ValueError:
                read_with = next((call for call in _READ_WITH.get(name, ()) if call in called_names), None)
                if read_with is not None:
                    elsewhere[name] = read_with
                else:
                    by_hand[name] = ("an object", _by_hand(name))
                continue
            if called == "LoraConfig" and name in _LORA:
                options.append((f"model.lora.{_LORA[name]}", value))
            elif called != "LoraConfig" or name not in (
                "task_type",
                "bias",
            ):  # the same for the adapter of every causal model
                options.append(("model.name" if name == "model" else name, value))
    if not options and not by_hand:
        raise KeelError(f"{path} calls none of {', '.join(_CALLS)}: there is nothing to migrate")
    values, conflict = _unique(options)
    left = {name: why for name, why in by_hand.items() if name not in values}
    config = next((name for name in _CONFIGS if name in called_names), "")
    return Reading(values, left, elsewhere, conflict, config)


def _by_hand(name: str) -> str:
    """Advice for an argument that is an object: the option of Keel to set by hand."""
    alias = peers.table().get(name)
    if name in _OBJECTS or alias is None or alias.convert is not None:
        return _OBJECTS.get(name, COMPUTED)
    return (
        f"set {alias.target} to the file or hub name, by hand" if "hub name" in alias.note else alias.note or COMPUTED
    )


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _unknown() -> Any:
    raise ValueError


def _constants(module: ast.Module) -> dict[str, ast.expr]:
    """Names that are assigned exactly once in the file, with their values."""
    assigned: list[tuple[str, ast.expr]] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            assigned += [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name) and node.value:
            assigned.append((node.target.id, node.value))
    times = Counter(name for name, _ in assigned)
    return {name: value for name, value in assigned if times[name] == 1}


def _arguments(call: ast.Call, constants: Mapping[str, ast.expr]) -> Iterator[tuple[str, ast.expr | None]]:
    """A call's arguments by name, including those of `**{…}` and `**dict(…)` with literal contents."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
            continue
        inner = keyword.value
        if isinstance(inner, ast.Name):
            inner = constants.get(inner.id, inner)
        if isinstance(inner, ast.Call) and _called(inner) == "dict" and not inner.args:
            yield from _arguments(inner, constants)
        elif isinstance(inner, ast.Dict):
            for key, value in zip(inner.keys, inner.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value
                else:
                    yield "**", None
        else:
            yield "**", None


def _literal(node: ast.expr, constants: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """The value of a literal, of a name with a literal value, or of arithmetic on whole numbers."""
    if isinstance(node, ast.Name) and node.id in constants and depth < 5:
        return _literal(constants[node.id], constants, depth + 1)
    if isinstance(node, ast.BinOp):
        return arithmetic(node, lambda name: _literal(constants[name], constants, depth + 1) if depth < 5 else None)
    return ast.literal_eval(node)
