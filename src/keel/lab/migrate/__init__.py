"""`keel migrate`: convert a configuration of TRL, verl or OpenRLHF, and list how each option was converted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.config import kl_pairing, peers, text
from keel.config.load import is_option, read_config, set_option
from keel.config.peer_values import DISTILS, IN_LOSS, IN_REWARD, OWN, D, R, data, full
from keel.lab.migrate.peer_files import Reading, read

# The engine if a file names vLLM options but not the engine.
SWITCH: Mapping[str, tuple[str, Any]] = {
    "TRL": ("use_vllm", False),
    "verl": (R + "name", "vllm"),
    "OpenRLHF": ("vllm_num_engines", None),
}
# Keel's option for vLLM switches whose value is only known at run time.
VLLM, VLLM_SWITCHES = {"rollout.engine": "vllm"}, ("use_vllm", "vllm_num_engines")
# TRL's penalty is k3 with the reduction of its loss; Keel's default reduction differs.
TRL_PENALTY: Mapping[str, Any] = {"kl.estimator": "k3", "kl.reduction": "loss"}


@dataclass(frozen=True)
class MigratedOption:
    """One option of the file: its Keel `options`, or the `reason` why there are none; `note` lists differences."""

    name: str
    value: Any
    options: Mapping[str, Any]
    reason: str = ""
    note: str = ""
    silent: bool = False  # a default of the other trainer

    @property
    def by_hand(self) -> bool:
        """Whether the user must set its value."""
        return "by hand" in self.reason


@dataclass(frozen=True)
class Migration:
    """The result: `tree` is Keel's configuration, `rows` list every option of the file."""

    origin: str
    tree: Mapping[str, Any]
    rows: tuple[MigratedOption, ...]
    refused: str | None = None  # why Keel refuses the result
    computes: str | None = None  # the expected gradient of the result's KL term
    missing: str | None = None  # the result is right, but this machine lacks a package that it needs

    @property
    def unmapped(self) -> list[MigratedOption]:
        """The options without a counterpart, or that the user must set."""
        return [row for row in self.rows if row.reason]

    def yaml(self) -> str:
        """The configuration as YAML with only the options that were set."""
        return "".join(f"{line}\n" for line in _yaml(self.tree, ""))


def migrate(path: Path) -> Migration:
    """Read a configuration of TRL, verl or OpenRLHF: YAML, JSON, a shell script, Python with `GRPOConfig(…)`.

    Of TRL also `DistillationConfig(…)` and `GKDConfig(…)`.
    """
    reading = read(path)
    names = [*reading.values, *reading.by_hand]
    origin = _origin(names)
    values = {name: value for name, value in reading.values.items() if (name, value) != ("max_steps", -1)}
    defaults = _peer_defaults(origin, reading, values)
    given = {**defaults, **values, **{name: held for name, (held, _) in reading.by_hand.items()}}
    peer_values = peers.by_name(given, is_option)
    rows = [
        _migrate_option(name, value, peer_values, silent=name in defaults)
        for name, value in {**defaults, **values}.items()
    ]
    rows += [
        MigratedOption(name, held, VLLM if name in VLLM_SWITCHES else {}, reason)
        for name, (held, reason) in reading.by_hand.items()
    ]
    rows += [
        MigratedOption(name, "an object", {}, note=f"read from {call}(…)") for name, call in reading.elsewhere.items()
    ]
    if len(values) < len(reading.values):
        rows.append(MigratedOption("max_steps", -1, {}, note="num_train_epochs sets the length"))
    tree: dict[str, Any] = {}
    for row in sorted(rows, key=lambda row: not row.silent):  # the file's options override the peer's defaults
        for option, value in row.options.items():
            set_option(tree, option, value)
    if "GKDConfig" in _distils(origin, reading):
        rows = [replace(row, note=_GKD_TEMPERATURE) if row.name == "temperature" else row for row in rows]
    elif origin == "TRL" and not _distils(origin, reading) and _number(values.get("beta")):
        named = {name for row in rows for name in row.options}
        added = {option: value for option, value in TRL_PENALTY.items() if option not in named}
        for option, value in added.items():
            set_option(tree, option, value)
        rows.append(MigratedOption("beta", "its KL term", added, note=_KL_NOTE, silent=True))
    rows += _absent(tree, rows)
    problems = [reading.conflict, _disagreement(rows), _estimator(rows), *_penalty(rows, peer_values, tree)]
    refused, missing, computes = _judged(tree)
    refusals = [problem for problem in (*problems, refused) if problem]
    return Migration(origin, tree, tuple(rows), "; ".join(refusals) or None, None if refusals else computes, missing)


def _absent(tree: Mapping[str, Any], rows: Sequence[MigratedOption]) -> list[MigratedOption]:
    """Rows for a missing model or missing data, for which Keel's defaults would be used."""
    found = [peers.find(row.name, is_option) for row in rows if row.by_hand]
    left = {alias.target for alias in found if alias is not None} | {row.name for row in rows if row.by_hand}
    model, data = tree.get("model", {}).get("name"), tree.get("data", {}).get("path") or tree.get("task")
    absent = {} if model or left & {"model", "model.name"} else {"model.name": "no model: set model.name by hand"}
    if not data and "data.path" not in left:
        absent["data.path"] = "no data: set data.path or task.name by hand"
    return [MigratedOption(name, None, {}, f"the file names {why}", silent=True) for name, why in absent.items()]


_GKD_TEMPERATURE = "TRL samples at this temperature but computes GKD's divergence at 1; Keel uses it for both"
_KL_NOTE = (
    "as in TRL; leave out kl.reduction for a β that is comparable between losses, and kl.gradient for Keel's choice of "
    "the gradient"
)


def _origin(names: Sequence[str]) -> str:
    """The trainer whose option names these are."""
    if any(name.startswith(("actor_rollout_ref.", "algorithm.", "distillation.")) for name in names):
        return "verl"
    return "TRL" if OWN.isdisjoint(names) else "OpenRLHF"


def _distils(origin: str, reading: Reading) -> tuple[str, ...]:
    """TRL's distillation classes whose defaults apply, the most specific last; empty for other jobs."""
    special = reading.config == "GKDConfig" or "lmbda" in reading or "seq_kd" in reading
    teacher = "teacher_model_name_or_path" in reading or "teacher_model" in reading
    if origin != "TRL" or not (special or teacher or reading.config == "DistillationConfig"):
        return ()
    return ("DistillationConfig", "GKDConfig") if special else ("DistillationConfig",)


def _peer_defaults(origin: str, reading: Reading, values: Mapping[str, Any]) -> dict[str, Any]:
    """The peer's defaults for options that its file does not set."""
    defaults, switches = peers.defaults(origin), dict[str, bool]()
    if distils := _distils(origin, reading):
        defaults = {name: value for config in distils for name, value in peers.defaults(f"TRL with {config}").items()}
        if "GKDConfig" in distils:
            del defaults["max_completion_length"]  # GKDConfig calls it max_new_tokens
    elif origin == "TRL":
        if values.get("loss_type", "dapo") not in ("grpo", "bnpo", "dr_grpo", "dapo"):
            del defaults["epsilon"]  # the losses above clip between 1 ± epsilon
        samples = values.get("use_vllm", "use_vllm" in reading.by_hand) is True
        switches = {
            "beta": bool(_number(values.get("beta"))),
            "a correction": samples and values.get("vllm_importance_sampling_correction") is not False,
            "a server": samples and values.get("vllm_mode") == "server",
        }
    else:
        switches = {switch: origin == "verl" and values.get(switch) is True for switch in (IN_LOSS, IN_REWARD, DISTILS)}
    for switch, on in switches.items():
        defaults |= peers.defaults(f"{origin} with {switch}") if on else {}
    found = [alias for name in values if (alias := peers.find(name, is_option))]
    if any("vllm" in alias.name or alias.target.startswith("rollout.vllm") for alias in found):
        switch, engine = SWITCH[origin]
        defaults[switch] = engine
    if {**defaults, **values}.get(R + "name") == "vllm":
        defaults |= peers.defaults("verl with vllm")
    named = {name for name in (*values, *reading.by_hand) if values.get(name, "") is not None}
    replaced = {full(origin, name): names for name, names in data()["replaced"].items()}
    return {
        name: value
        for name, value in defaults.items()
        if name not in reading and not any(full(origin, other) in named for other in replaced.get(name, "").split())
    }


def _migrate_option(name: str, value: Any, peer_values: Mapping[str, Any], *, silent: bool) -> MigratedOption:
    alias = peers.find(name, is_option)
    if alias is None and is_option(name):
        return MigratedOption(name, value, {name: value}, silent=silent)
    if alias is None:
        return MigratedOption(name, value, {}, "unknown option", silent=silent)
    try:
        options = alias.apply(value, peer_values)
    except KeelError as error:
        reason = re.sub(rf"^{re.escape(name)}(=\S+)? has no counterpart: ", "", str(error))
        return MigratedOption(name, value, {}, reason, silent=silent)
    return MigratedOption(name, value, options, note=alias.note, silent=silent)


# ------------------------------------------------------------------------------------------------- refusals


def _disagreement(rows: Sequence[MigratedOption]) -> str | None:
    """An error if two options of the file set one Keel option to different values."""
    values: dict[str, tuple[Any, str, str]] = {}
    for row in rows:
        for target, value in row.options.items() if not row.silent else ():
            if target in values and values[target][0] != value:
                return str(peers.conflict_error(target, values[target][1:], (row.name, text.dump(row.value))))
            values[target] = (value, row.name, text.dump(row.value))
    return None


def _estimator(rows: Sequence[MigratedOption]) -> str | None:
    """An error if the file selects a method that Keel does not have."""
    estimators = {"algorithm.adv_estimator": "verl", "advantage_estimator": "OpenRLHF", "lmbda": "GKD", "seq_kd": "GKD"}
    estimators[D + "loss_mode"] = "verl"
    row = next((row for row in rows if row.name in estimators and row.reason), None)
    if row is None:
        return None
    default = f", {estimators[row.name]}'s default" if row.silent else ""
    return f"{row.name}={text.dump(row.value)}{default}: {row.reason}"


def _penalty(rows: Sequence[MigratedOption], peer_values: Mapping[str, Any], tree: Mapping[str, Any]) -> Iterator[str]:
    """Errors if the KL term of the file would be lost."""
    enabled = [switch for switch in (IN_LOSS, IN_REWARD) if peer_values.get(switch) is True]
    beta = tree.get("kl", {}).get("beta")
    if enabled and not _number(beta):
        yield f"{enabled[0]} is on but β is {beta or 0}: set kl.beta above 0, or turn the switch off"
    read_now = {"beta", "init_kl_coef", "kl_estimator", IN_LOSS, IN_REWARD}
    read_now |= {name for switch in enabled for name in peers.defaults(f"verl with {switch}")}
    for row in rows:
        if row.name in read_now and row.reason:
            yield f"the KL term depends on {row.name}={text.dump(row.value)}: {row.reason}"


def _judged(tree: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
    """(why Keel refuses the result, the packages missing on this machine, the expected gradient of its KL term)."""
    try:
        config, *_ = read_config(tree, installed=False)
    except KeelError as error:
        return str(error), None, None
    computes = kl_pairing(config).note if config.kl.penalizes else None
    try:
        read_config(tree)
    except KeelError as error:
        return None, str(error), computes
    return None, None, computes


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _yaml(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _yaml(value, indent + "  ")
        else:
            yield f"{indent}{key}: {text.dump(value)}"
