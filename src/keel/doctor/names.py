"""Metric names of other trainers (names.yaml), detection of a log's trainer, and the short names of `--map`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from keel.base.errors import unknown
from keel.base.yaml_text import load_package_yaml
from keel.doctor.history import Series
from keel.doctor.runs import option_of

K3 = "kl/policy_ref/k3/mean"


@dataclass(frozen=True)
class Name:
    """The Keel name of another trainer's metric, its unit, the items averaged over, and the factor to Keel's unit."""

    keel: str
    unit: str
    per: str
    factor: float = 1.0


@dataclass(frozen=True)
class PeerTrainer:
    """One trainer in names.yaml. `options` maps its option names to Keel's."""

    name: str
    about: str
    markers: tuple[str, ...]
    metrics: Mapping[str, Name]
    options: Mapping[str, str]

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Name]]:
        return [(_pattern(theirs), name) for theirs, name in self.metrics.items()]

    def find(self, logged: str) -> tuple[int, Name] | None:
        """(row, Keel's name) of a logged name, with or without the prefix `train/`."""
        for bare in dict.fromkeys((logged, logged.removeprefix("train/"))):
            for row, (pattern, name) in enumerate(self._patterns):
                if match := pattern.fullmatch(bare):
                    keel = name.keel
                    for part in match.groups()[-keel.count("*") :] if "*" in keel else ():
                        keel = keel.replace("*", part, 1)
                    return row, Name(keel, name.unit, name.per, name.factor)
        return None

    def marked(self, names: Iterable[str]) -> int:
        """The number of these names that only this trainer uses."""
        patterns = [_pattern(marker) for marker in self.markers]
        return sum(any(p.fullmatch(n) or p.fullmatch(n.removeprefix("train/")) for p in patterns) for n in names)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("(.+)".join(map(re.escape, name.split("*"))))


def _trainers() -> dict[str, PeerTrainer]:
    rows = load_package_yaml("keel.doctor", "names.yaml")
    return {
        name: PeerTrainer(
            name,
            row["about"],
            tuple(row["markers"]),
            {theirs: Name(*entry) for theirs, entry in row["metrics"].items()},
            row["options"],
        )
        for name, row in rows.items()
    }


TRAINERS = _trainers()

# For `--map kl=column`.
SHORT: dict[str, str] = {
    "step": "step",
    "kl": K3,
    "kl_k1": "kl/policy_ref/k1/mean",
    "kl_exact": "kl/policy_ref/exact/mean",
    "sampler_kl": "kl/sampler_policy/k3/mean",
    "sampler_gap": "logp/sampler_gap_max",
    "beta": "kl/beta",
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "group_std": "reward/within_group_std",
    "zero_variance": "reward/zero_variance_fraction",
    "loss": "loss/total",
    "grad_norm": "grad/norm",
    "learning_rate": "optim/learning_rate",
    "entropy": "entropy/mean",
    "length": "length/mean",
    "truncated": "length/truncated_fraction",
    "prompt_truncated": "prompt/truncated_fraction",
    "parsed": "parse/ok_fraction",
    "clipped": "ratio/clip_fraction",
    "skipped": "guard/skipped",
}

_LAST = 10_000  # sorts Keel's own names after those of a table
_METRICS = load_package_yaml("keel.base", "metrics.yaml").values()
_PREFIXES = {name.partition("/")[0] for section in _METRICS for name in section} | {"advantage"}  # of other trainers
_KEEL = re.compile(rf"^({'|'.join(sorted(_PREFIXES))})/")


def source_of(names: Iterable[str]) -> str | None:
    """The trainer with the most marker names among these; None if no trainer has two, or if the names are Keel's."""
    names = list(names)
    marked = {trainer.name: trainer.marked(names) for trainer in TRAINERS.values()}
    best = max(marked, key=lambda name: marked[name])
    return best if marked[best] >= 2 and not any(name.startswith("kl/policy_ref/") for name in names) else None


def find_name(logged: str, source: str | None = None) -> tuple[int, Name] | None:
    """Look up a name in the trainer's table. Without a known trainer: an exact match, Keel's name, or a pattern."""
    bare = logged.removeprefix("train/")
    keel = (_LAST, Name(bare, "", "")) if _KEEL.match(bare) else None
    if source in TRAINERS:
        return TRAINERS[source].find(logged) or keel
    exact = ((row, trainer.metrics[bare]) for row, trainer in enumerate(TRAINERS.values()) if bare in trainer.metrics)
    patterns = (row for trainer in TRAINERS.values() if (row := trainer.find(logged)) is not None)
    return next(exact, None) or keel or next(patterns, None)


def canonical(name: str, source: str | None = None) -> str | None:
    """Keel's name of another trainer's metric, with or without the prefix `train/`; None if Keel has none."""
    row = find_name(name, source)
    return row[1].keel if row is not None else None


def option_name(dotted: str, source: str) -> str:
    """The option name to show to a user: that trainer's own if it has one, otherwise Keel's."""
    if source not in TRAINERS:
        return dotted
    return next((theirs for theirs, ours in TRAINERS[source].options.items() if ours == dotted), dotted)


def keel_options(source: str, args: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of a trainer that have a Keel name, under that name: {section: {option: value}}."""
    options: dict[str, dict[str, Any]] = {}
    for theirs, ours in TRAINERS[source].options.items() if source in TRAINERS else ():
        value = args.get(theirs) if theirs in args else option_of(args, theirs)
        if value is not None:
            section, name = ours.split(".")
            options.setdefault(section, {})[name] = value
    if source == "verl" and option_of(args, "actor_rollout_ref.actor.use_kl_loss") is False:
        options.setdefault("kl", {})["beta"] = 0.0  # β has a default value although nothing uses it
    return options


def from_map(name: str) -> str:
    """Keel's metric for a name given to `--map`: a short name or Keel's own."""
    if name in SHORT:
        return SHORT[name]
    if _KEEL.match(name):
        return name
    raise unknown("name in --map", name, SHORT)


def renamed(
    series: Mapping[str, Series], mapping: Mapping[str, str], source: str | None = None
) -> tuple[dict[str, Series], list[str]]:
    """(series under Keel's names and units, names that no check reads).

    If several metrics have one Keel name, the first row of names.yaml is used. `mapping` comes from `--map`,
    {name: column}; its columns get no other name.
    """
    rows = {name: find_name(name, source) for name in series if name not in mapping.values()}
    unused = [name for name, row in rows.items() if row is None]
    named: dict[str, Series] = {}
    for name, row in sorted(((n, r) for n, r in rows.items() if r is not None), key=lambda item: item[1][0]):
        named.setdefault(row[1].keel, series[name].scaled(row[1].factor))
    unused += [name for name, row in rows.items() if row is not None and row[1].keel.startswith("other/")]
    mapped = {from_map(name): series[column] for name, column in mapping.items() if column in series}
    return derived(named | mapped), unused


def derived(series: dict[str, Series]) -> dict[str, Series]:
    """Add metrics that follow from logged ones: zero-variance groups, and complements (1 − the logged share)."""
    none, every = series.get("reward/solved_none_fraction"), series.get("reward/solved_all_fraction")
    if none is not None and every is not None:
        at = dict(zip(every.steps, every.values, strict=True))
        pairs = ((s, v + at[s]) for s, v in zip(none.steps, none.values, strict=True) if s in at)
        series = {"reward/zero_variance_fraction": Series.of(pairs)} | series
    for whole, rest in COMPLEMENTS.items():
        if whole in series:
            pairs = ((s, 1 - v) for s, v in zip(series[whole].steps, series[whole].values, strict=True))
            series = {rest: Series.of(pairs)} | series
    return series


COMPLEMENTS = {
    "reward/differing_fraction": "reward/zero_variance_fraction",
    "length/ended_fraction": "length/truncated_fraction",
}
