"""Read a study (configuration, grid, seeds) and check it before anything runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.redact import masked
from keel.config import Config, load_config, peers, text
from keel.config.checks import task_specs
from keel.config.load import flatten_options, is_option, unknown_option
from keel.doctor.thresholds import check_thresholds

METRICS = ("accuracy_after", "reward", "retention_after")
_KEYS = ("config", "set", "grid", "points", "seeds", "baseline", "metric", "drift", "text", "target")
_SET_BY_STUDY = {
    "run.seed": "give the seeds with --seeds",
    "run.dir": "give the study's folder with --out",
    "run.name": "points are named by their options",
    "run.if_exists": "finished points are kept, interrupted ones resumed",
}


@dataclass(frozen=True)
class Value:
    """One value of an axis: its label and the options that it sets."""

    label: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """One dimension of the grid: an option with values, a section with mappings, or a name for several options."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Point:
    """One point of the grid; `values` has its label on each axis, empty if a listed point does not set the axis."""

    label: str
    settings: Mapping[str, Any]
    values: Mapping[str, str]
    config: Config

    @property
    def overrides(self) -> list[str]:
        return [f"{name}={text.dump(value)}" for name, value in self.settings.items()]


@dataclass(frozen=True)
class Measurements:
    """Measurements after a run: drift with `prompts` × `samples` per task, held-out text, a band around a target KL."""

    prompts: int = 32
    samples: int = 4
    text: bool = False
    target: float | None = None
    target_unit: str = "per_token"


@dataclass(frozen=True)
class Study:
    """A checked study. `baseline` is the label of the point that the others are compared with."""

    name: str
    config: Config
    axes: tuple[Axis, ...]
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    baseline: str
    metric: str = "accuracy_after"
    measure: Measurements = field(default_factory=Measurements)


def read_study(
    source: Path | str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    grid: Sequence[str] = (),
    seeds: str | None = None,
    baseline: str | None = None,
    metric: str | None = None,
) -> Study:
    """Read a study file, or a configuration with `--grid`; the command line overrides the file.

    A study file is a mapping with `config` (a path relative to it, the name of a shipped configuration, or a mapping),
    and `set`, `grid`, `points`, `seeds`, `baseline`, `metric`, `drift`, `text`, `target` as in docs/studies.md.
    """
    name, data, folder = _read_source(source)
    for key in data:
        if key not in _KEYS:
            raise unknown("key of a study", key, _KEYS)
    shared = [f"{key}={text.dump(value)}" for key, value in _mapping(data, "set").items()]
    config_source = _config_source(data.get("config", "default"), folder)
    axes = [*(_axis(key, value) for key, value in _mapping(data, "grid").items()), *map(parse_axis, grid)]
    listed = data.get("points", [])
    if not isinstance(listed, list) or not all(isinstance(entry, Mapping) and entry for entry in listed):
        raise KeelError("points of a study must be a list of mappings such as {kl.beta: 0}")
    if not axes and not listed:
        raise KeelError("the study has no grid: give --grid kl.beta=0,0.01, or a study file with a grid")
    all_overrides = [*shared, *overrides]
    _check_axes(axes, _option_names(all_overrides))
    config = load_config(load_config(config_source, shared), overrides)  # the command line overrides the file
    check_thresholds(config)
    combined = [_combined(values) for values in itertools.product(*(axis.values for axis in axes))] if axes else []
    combined += [_listed_point(dict(entry)) for entry in listed]
    points = tuple(_point(config, label, settings, axes) for label, settings in combined)
    _check_distinct(points)
    requested_baseline = baseline if baseline is not None else data.get("baseline")
    return Study(
        name=name,
        config=config,
        axes=tuple(axes),
        points=points,
        seeds=_seeds(data.get("seeds", 3) if seeds is None else seeds, config.run.seed),
        baseline=_baseline(points, requested_baseline),
        metric=_one_of("metric", metric or data.get("metric", METRICS[0]), METRICS),
        measure=_measure(data),
    )


def parse_axis(item: str) -> Axis:
    """The axis of `kl.beta=0,0.001,0.01` or of `kl={estimator: k1},{estimator: k3}`; values are YAML."""
    name, equals, values = item.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise KeelError(f"cannot read --grid {item!r}: write option=value,value,… such as kl.beta=0,0.01")
    return _axis(name.strip(), text.parse(f"[{values}]", f"--grid {name}"))


# ------------------------------------------------------------------------------------------------- parts


def _read_source(source: Path | str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Path]:
    """(name, study's mapping, folder that its paths are relative to); a plain configuration becomes a study."""
    if isinstance(source, Mapping):
        data: Mapping[str, Any] = source
        return "study", data if is_study(data) else {"config": data}, Path()
    path = find_study(Path(source))
    data = text.read(path)
    if is_study(data):
        return path.stem, data, path.parent
    return path.stem, {"config": str(path)}, Path()


def is_study(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is a study and not a configuration, by its sections."""
    return any(key in data for key in ("grid", "points", "config"))


def find_study(path: Path) -> Path:
    """The path itself, or the shipped study or configuration of that name."""
    resolved = text.find(path.expanduser())
    if resolved.exists() or path.suffix or len(path.parts) != 1:
        return resolved
    default = text.find(Path("default"))
    shipped = default.parent / "studies" / f"{path.name}.yaml"
    return shipped if shipped.is_file() else resolved


def _config_source(config: Any, folder: Path) -> Path | Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str):
        raise KeelError(f"config of a study is {config!r}: give a path, a name such as default, or a mapping")
    beside = folder / config
    return beside if beside.is_file() else Path(config)


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    mapping = data.get(key) or {}
    if not isinstance(mapping, Mapping) or not all(isinstance(name, str) for name in mapping):
        raise KeelError(f"{key} of a study must be a mapping such as {{kl.beta: …}}")
    return mapping


def _axis(name: str, values: Any) -> Axis:
    """An option's axis from a list; an axis of several options from a mapping of labels to settings."""
    if isinstance(values, Mapping):
        if not values or not all(isinstance(part, Mapping) and part for part in values.values()):
            raise KeelError(f"the axis {name} must map labels to options, such as k1-loss: {{kl.estimator: k1}}")
        return Axis(name, tuple(Value(str(label), dict(part)) for label, part in values.items()))
    if not is_option(native(name)):
        raise unknown_option(name, "the grid")
    if native(name) in _SET_BY_STUDY:
        raise KeelError(f"{name} cannot be in the grid: {_SET_BY_STUDY[native(name)]}")
    if not isinstance(values, list) or not values:
        raise KeelError(f"the grid over {name} needs a list of values, such as {name}: [0, 0.01]")
    return Axis(name, tuple(Value(_label(name, value), {name: value}) for value in values))


def _label(name: str, value: Any) -> str:
    """The label of a value: `beta=0.01`, or all options of a mapping."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={text.dump(masked(inner, key))}" for key, inner in flatten_options("", value))
    return f"{name.rpartition('.')[2]}={text.dump(masked(value, name))}"


def native(name: str) -> str:
    """Keel's name of an option that may be given by another trainer's or a short name."""
    alias = peers.find(peers.normal(name), is_option)
    return name if alias is None or not alias.target or is_option(name) else alias.target


def _options(settings: Mapping[str, Any]) -> set[str]:
    return {native(name) for name, _ in flatten_options("", settings)}


def _overlap(first: str, second: str) -> bool:
    return first == second or first.startswith(f"{second}.") or second.startswith(f"{first}.")


def _option_names(overrides: Sequence[str]) -> list[str]:
    """The options that overrides set; a section is split into its options."""
    names: list[str] = []
    for item in overrides:
        name, _, value = item.partition("=")
        names += [
            native(option) for option, _ in flatten_options("", {name.strip().lstrip("+"): text.parse(value, name)})
        ]
    return names


def _check_axes(axes: Sequence[Axis], fixed: Sequence[str]) -> None:
    """Refuse an option that is set twice: by two axes, or by an axis and for all points."""
    for name in fixed:
        if name in _SET_BY_STUDY and name != "run.seed":
            raise KeelError(f"{name} cannot be set in a study: {_SET_BY_STUDY[name]}")
    seen: dict[str, str] = {}
    for axis in axes:
        options = set().union(*(_options(value.settings) for value in axis.values))
        for option in sorted(options):
            if option in _SET_BY_STUDY:
                raise KeelError(f"{option} cannot be in the grid: {_SET_BY_STUDY[option]}")
            other = next((axis_name for name, axis_name in seen.items() if _overlap(option, name)), None)
            if other is not None:
                raise KeelError(f"{option} is in the grid twice, by the axes {other} and {axis.name}: keep one")
            clash = next((name for name in fixed if _overlap(option, name)), None)
            if clash is not None and all(option in _options(value.settings) for value in axis.values):
                raise KeelError(f"{clash} is in the grid and among the options for all points: leave one out")
        seen.update(dict.fromkeys(options, axis.name))


def _combined(values: Sequence[Value]) -> tuple[str, dict[str, Any]]:
    settings: dict[str, Any] = {}
    for value in values:
        settings |= value.settings
    return " ".join(value.label for value in values), settings


def _listed_point(entry: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    label = entry.pop("name", None)
    for option in sorted(_options(entry)):
        if option in _SET_BY_STUDY:
            raise KeelError(f"{option} cannot be in a point: {_SET_BY_STUDY[option]}")
    return str(label) if label is not None else " ".join(_label(n, v) for n, v in entry.items()), entry


def _point(config: Config, label: str, settings: Mapping[str, Any], axes: Sequence[Axis]) -> Point:
    overrides = [f"{name}={text.dump(value)}" for name, value in settings.items()]
    try:
        checked = load_config(config, overrides)
        check_thresholds(checked)
        check_parts(checked)
    except KeelError as error:
        raise KeelError(f"the point {label}: {error}") from None
    values = {}
    for axis in axes:
        matching = [value for value in axis.values if value.settings.items() <= settings.items()]
        setting = settings.get(axis.name, {})
        closest = max(matching, key=lambda value: len(value.settings), default=None)  # {k1, reward} differs from {k1}
        axis_label = "" if closest is None else closest.label
        values[axis.name] = axis_label if isinstance(setting, Mapping) else text.dump(masked(setting, axis.name))
    return Point(label, dict(settings), values, checked)


def _check_distinct(points: Sequence[Point]) -> None:
    seen: dict[str, str] = {}
    labels: set[str] = set()
    for point in points:
        same = seen.setdefault(fingerprint(point.config), point.label)
        if same is not point.label or point.label in labels:
            other = f"equals the point {same}" if same != point.label else "is listed twice"
            raise KeelError(f"the point {point.label} {other}: leave one out")
        labels.add(point.label)


def fingerprint(config: Config) -> str:
    """A configuration as text without the options that a study sets, so that equal texts are equal runs."""
    settings = config.to_dict()
    settings["run"] = {"max_steps": settings["run"]["max_steps"]}
    return json.dumps(settings, sort_keys=True, default=str)


def _seeds(value: Any, first: int) -> tuple[int, ...]:
    """A number of seeds, counted from run.seed; or the seeds themselves."""
    parsed = text.parse(f"[{value}]", "the seeds") if isinstance(value, str) else value
    if isinstance(parsed, list) and len(parsed) == 1 and isinstance(value, str):
        parsed = parsed[0]
    if isinstance(parsed, int) and not isinstance(parsed, bool) and parsed > 0:
        return tuple(range(first, first + parsed))
    integers = isinstance(parsed, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in parsed)
    if not integers or not parsed or len(set(parsed)) != len(parsed):
        raise KeelError(f"seeds is {value!r}: give a number of seeds such as 3, or different seeds such as 1,2,5")
    return tuple(parsed)


def _baseline(points: Sequence[Point], chosen: Any) -> str:
    """The first point, or the one that a label or options name."""
    if chosen is None:
        return points[0].label
    labels = [point.label for point in points]
    if isinstance(chosen, str) and chosen in labels:
        return chosen
    if isinstance(chosen, str) and "=" in chosen:
        name, _, value = chosen.partition("=")
        chosen = {name: text.parse(value, "the baseline")}
    if not isinstance(chosen, Mapping):
        raise unknown("baseline", chosen, labels)
    matching = [point.label for point in points if dict(chosen).items() <= dict(point.settings).items()]
    if len(matching) != 1:
        what = f"{len(matching)} points ({', '.join(matching)})" if matching else "no point"
        raise KeelError(f"the baseline {text.dump(dict(chosen))} matches {what}: name one of {', '.join(labels)}")
    return matching[0]


def _one_of(kind: str, name: Any, known: Sequence[str]) -> str:
    if name not in known:
        raise unknown(kind, name, known)
    return str(name)


def _measure(data: Mapping[str, Any]) -> Measurements:
    drift, target, text_flag = _mapping(data, "drift"), _mapping(data, "target"), data.get("text", False)
    for section, known in ((drift, ("prompts", "samples")), (target, ("kl", "unit"))):
        for name in section:
            _one_of("key", name, known)
    counts = {name: drift.get(name, getattr(Measurements, name)) for name in ("prompts", "samples")}
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise KeelError(f"drift.{name} of a study is {count!r}: give a whole number, at least 1")
    kl = target.get("kl")
    if kl is not None and not (isinstance(kl, int | float) and kl > 0):
        raise KeelError(f"target.kl of a study is {kl!r}: give nats above 0")
    if not isinstance(text_flag, bool):
        raise KeelError(f"text of a study is {text_flag!r}: give true or false")
    unit = _one_of("unit", target.get("unit", "per_token"), ("per_token", "per_sequence"))
    return Measurements(**counts, text=text_flag, target=kl, target_unit=unit)


def check_parts(config: Config) -> None:
    """Build the tasks, to find errors such as parameters that a task does not take."""
    tasks: dict[str, Any] = {"task": True, "data": True, "eval": True, "warmstart": {"task"}}
    _check_tasks(config.model_dump_json(include=tasks), config)


_built: set[str] = set()


def _check_tasks(key: str, config: Config) -> None:
    """Check each distinct task of the points once."""
    from keel.run.parts import build_named_task

    if key not in _built:
        for _, spec in task_specs(config):
            try:
                build_named_task(spec, config)
            except (TypeError, ValueError) as error:  # a value that the task uses without checking it
                raise KeelError(f"the task {spec.name} cannot be built from its parameters: {error}") from None
        _built.add(key)
