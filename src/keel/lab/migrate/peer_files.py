"""Read another trainer's configuration: YAML, JSON, Python or shell. Nothing is executed."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.config import peers, text
from keel.config.load import flatten_options
from keel.lab.migrate.interpolate import arithmetic, interpolated, undetermined
from keel.lab.migrate.shell import SHELLS, options_of_script

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
    """A parsed file: options with values, options without one and the reason, arguments of other calls, a conflict."""

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
        content = path.read_text(encoding="utf-8")
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
            data = json.loads(content)
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
        raise KeelError(f"{path} is not Python: line {error.lineno}: {error.msg}") from None
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
