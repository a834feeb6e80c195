"""`keel migrate`: a configuration of TRL or verl as one of Keel's, and what of it has no counterpart."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config import aliases, text
from keel.config.load import is_option, leaves, put, read_config
from keel.errors import KeelError

# What a peer does where its configuration is silent and Keel does something else. `None` is said, not set.
TRL_DEFAULTS: Mapping[str, Any] = {
    "loss_type": "dapo",
    "max_completion_length": 512,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "gradient_checkpointing": True,
    "save_steps": 500,
    "seed": 42,
}
VERL_DEFAULTS: Mapping[str, Any] = {
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    "data.max_prompt_length": 512,
}
# TRL's penalty is plain k3, reduced as its loss is; Keel's own defaults are other and better ones.
TRL_PENALTY: Mapping[str, Any] = {"kl.estimator": "k3", "kl.gradient": "plain", "kl.reduction": "loss"}
# Arguments of a trainer's class that are objects in Python and options here.
_OBJECTS = {
    "reward_funcs": "rewards are named in rewards: [{name, weight}]; a function of yours is module:attr",
    "train_dataset": "give the file or hub name as data.path",
    "eval_dataset": "give the file or hub name as task.eval_path",
    "peft_config": "LoRA is model.lora: {r, alpha, dropout, targets}",
    "args": "read from the GRPOConfig call",
    "processing_class": "the tokenizer comes with model.name",
    "callbacks": "give them to keel.train(callbacks=[…])",
    "tools": "tools belong to the task",
    "model": "set model.name",
}
_LORA = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"}


@dataclass(frozen=True)
class Became:
    """One option of the peer's file: what it became, or why nothing (`reason`); `note` says what differs."""

    name: str
    value: Any
    options: Mapping[str, Any]
    reason: str = ""
    note: str = ""
    silent: bool = False  # a default of the peer's that its file does not name


@dataclass(frozen=True)
class Migration:
    """The whole result: `tree` is Keel's configuration, `rows` account for every option of the file."""

    origin: str
    tree: Mapping[str, Any]
    rows: tuple[Became, ...]
    refused: str | None = None  # why Keel does not take the result as it is

    @property
    def without(self) -> list[Became]:
        """The options that have no counterpart."""
        return [row for row in self.rows if row.reason]

    def yaml(self) -> str:
        """The configuration as a page that `keel train` takes: the options that were set, and no others."""
        return "".join(f"{line}\n" for line in _yaml(self.tree, ""))


def migrate(path: Path) -> Migration:
    """Read a configuration of TRL or verl: YAML, JSON, a Python file with `GRPOConfig(…)`, or a shell script."""
    given, values = read(path)
    origin = "verl" if any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in values) else "TRL"
    peer = dict(aliases.tables())[origin]
    known = {**aliases.table(), **{alias.name: alias for alias in peer}}
    silent = _silent(origin, values)
    everything = {**silent, **values}
    tree: dict[str, Any] = {}
    rows = [_became(name, value, everything, known, silent=name in silent) for name, value in everything.items()]
    rows += [Became(name, "an object", {}, reason) for name, reason in given.items()]
    for row in sorted(rows, key=lambda row: not row.silent):  # what the file says overrides what the peer would do
        for option, value in row.options.items():
            put(tree, option, value, str(path))
    if origin == "TRL" and _number(values.get("beta")):
        for option, value in TRL_PENALTY.items():
            if option not in {name for row in rows for name in row.options}:
                put(tree, option, value, str(path))
        rows.append(Became("beta", "its KL term", TRL_PENALTY, note=_KL_NOTE, silent=True))
    if tree.get("rollout", {}).get("engine") == "vllm":
        put(tree, "rollout.engine", "native", str(path))
        rows.append(Became("vllm", "its engine", {"rollout.engine": "native"}, note=_ENGINE_NOTE, silent=True))
    return Migration(origin, tree, tuple(rows), _refusal(tree))


_ENGINE_NOTE = "Keel samples with its own engine, which shares the policy's weights"
_KL_NOTE = (
    "as TRL computes it: plain k3 pulls along ∇KL(ref‖policy); leave kl.gradient and kl.reduction out for the KL that "
    "is measured, with a β that means the same under every loss"
)


def _silent(origin: str, values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = dict(TRL_DEFAULTS if origin == "TRL" else VERL_DEFAULTS)
    if origin == "TRL" and "generation_batch_size" in values:
        defaults.pop("per_device_train_batch_size")
    if origin == "verl" and values.get("algorithm.use_kl_in_reward") is True:
        defaults.pop("actor_rollout_ref.actor.use_kl_loss")
    return {name: value for name, value in defaults.items() if name not in values}


def _became(
    name: str, value: Any, given: Mapping[str, Any], known: Mapping[str, aliases.Alias], *, silent: bool
) -> Became:
    alias = known.get(name)
    if alias is None and is_option(name):
        return Became(name, value, {name: value}, silent=silent)
    if alias is None:
        return Became(name, value, {}, "neither Keel nor its table of options knows it", silent=silent)
    try:
        options = alias.apply(value, given)
    except KeelError as error:
        reason = re.sub(rf"^{re.escape(name)}(=\S+)? has no counterpart: ", "", str(error))
        return Became(name, value, {}, reason, silent=silent)
    return Became(name, value, options, note=alias.note, silent=silent)


def _refusal(tree: Mapping[str, Any]) -> str | None:
    try:
        read_config(tree)
    except KeelError as error:
        return str(error)
    return None


# ------------------------------------------------------------------------------------------------- reading


def read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """(arguments that are Python objects, with the advice on each; options by dotted name)."""
    if not path.is_file():
        raise KeelError(f"no file at {path}: give a TRL or verl configuration (.yaml, .json, .py or .sh)")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KeelError(f"cannot read {path}: {error}") from None
    objects: dict[str, str] = {}
    if path.suffix == ".py":
        objects, values = _python(content, path)
    elif path.suffix in (".sh", ".bash", ".txt"):
        values = dict(_words(content, path))
    else:
        values = dict(_mapping(content, path))
    if not values:
        raise KeelError(f"{path} names no option: expected a GRPOConfig, a YAML mapping or key=value words")
    return objects, {aliases.normal(name): value for name, value in values.items()}


def _mapping(content: str, path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".json":
        try:
            data = json.loads(content)
        except ValueError as error:
            raise KeelError(f"{path} is not JSON: {error}") from None
    else:
        data = text.parse(content, str(path))
    if not isinstance(data, Mapping):
        raise KeelError(f"{path} holds a {type(data).__name__}: a configuration is a mapping of options")
    for name, value in leaves("", data):
        if "defaults" in (name, name.rpartition(".")[2]) or name.endswith("_target_"):
            continue  # hydra's own: which files to compose, which class to make
        yield name, value


def _words(content: str, path: Path) -> Iterator[tuple[str, Any]]:
    """The `key=value` and `--key value` words of a shell command."""
    try:
        words = shlex.split(content.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise KeelError(f"cannot read {path} as a shell script: {error}") from None
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        named = re.match(r"\+*([A-Za-z_][\w.]*)=(.*)$", word, re.DOTALL)
        flag = re.match(r"--([A-Za-z_][\w.-]*)(?:=(.*))?$", word, re.DOTALL)
        if named and not named[1].isupper():  # NAME=value is a variable of the shell
            yield named[1], _scalar(named[2], path)
        elif flag and flag[2] is not None:
            yield flag[1], _scalar(flag[2], path)
        elif flag:
            follows = position < len(words) and not words[position].startswith("--")
            yield flag[1], _scalar(words[position], path) if follows else True
            position += follows


def _scalar(word: str, path: Path) -> Any:
    return text.parse(word, f"a value in {path}") if "$" not in word else word


def _python(content: str, path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The literal arguments of `GRPOConfig(…)`, `GRPOTrainer(…)` and `LoraConfig(…)`; nothing is executed."""
    try:
        module = ast.parse(content)
    except SyntaxError as error:
        raise KeelError(f"{path} is not Python: line {error.lineno}: {error.msg}") from None
    constants = {
        node.targets[0].id: node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    objects: dict[str, str] = {}
    values: dict[str, Any] = {}
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for keyword in call.keywords if called in ("GRPOConfig", "GRPOTrainer", "LoraConfig") else ():
            name = keyword.arg or "**"
            try:
                value = _literal(keyword.value, constants)
            except ValueError:
                objects[name] = _OBJECTS.get(name, "its value is computed in Python: set Keel's option by hand")
                continue
            if called == "LoraConfig" and name in _LORA:
                values[f"model.lora.{_LORA[name]}"] = value
            elif called == "LoraConfig" and name in ("task_type", "bias"):
                continue  # what every causal model's adapter says
            else:
                values["model.name" if name == "model" else name] = value
    if not values and not objects:
        raise KeelError(f"{path} calls no GRPOConfig, GRPOTrainer or LoraConfig: there is nothing to migrate")
    return objects, values


def _literal(node: ast.expr, constants: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """The value of a literal, or of a name that a literal was assigned to."""
    if isinstance(node, ast.Name) and node.id in constants and depth < 5:
        return _literal(constants[node.id], constants, depth + 1)
    return ast.literal_eval(node)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _yaml(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _yaml(value, indent + "  ")
        else:
            yield f"{indent}{key}: {text.dump(value)}"


__all__ = ["Became", "Migration", "migrate", "read"]
