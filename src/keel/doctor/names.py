"""What other trainers call what Keel measures (names.yaml), whose log it is, and the short names of `--map`."""

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
    """A metric of another trainer: Keel's name, its unit, what it is a mean over, and the factor to Keel's unit."""

    keel: str
    unit: str
    per: str
    factor: float = 1.0


@dataclass(frozen=True)
class PeerTrainer:
    """One of the trainers of names.yaml; `options` are theirs → Keel's."""

    name: str
    about: str
    markers: tuple[str, ...]
    metrics: Mapping[str, Name]
    options: Mapping[str, str]

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Name]]:
        return [(_pattern(theirs), name) for theirs, name in self.metrics.items()]

    def find(self, logged: str) -> tuple[int, Name] | None:
        """(row, Keel's name and unit) of a logged name, with or without a `train/` before it."""
        for bare in dict.fromkeys((logged, logged.removeprefix("train/"))):
            for row, (pattern, name) in enumerate(self._patterns):
                if match := pattern.fullmatch(bare):
                    keel = name.keel
                    for part in match.groups()[-keel.count("*") :] if "*" in keel else ():
                        keel = keel.replace("*", part, 1)
                    return row, Name(keel, name.unit, name.per, name.factor)
        return None

    def marked(self, names: Iterable[str]) -> int:
        """How many of the names are this trainer's own."""
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

# `--map kl=column`: what the checks read, under short names.
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

_METRIC_PREFIXES = (
    *("kl", "reward", "loss", "logp", "entropy", "ratio", "grad", "optim", "guard", "length", "parse", "prompt"),
    *("turn", "tool", "answer", "mismatch", "rollout", "advantage"),
)
_LAST = 10_000  # rows of a table come before names that are Keel's already
_KEEL = re.compile(rf"^({'|'.join(_METRIC_PREFIXES)})/")


def source_of(names: Iterable[str]) -> str | None:
    """The trainer whose names these are: the one with most names of its own; None where none has two."""
    names = list(names)
    marked = {trainer.name: trainer.marked(names) for trainer in TRAINERS.values()}
    best = max(marked, key=lambda name: marked[name])
    return best if marked[best] >= 2 and not any(name.startswith("kl/policy_ref/") for name in names) else None


def find_name(logged: str, source: str | None = None) -> tuple[int, Name] | None:
    """Of the trainer's own table where it is known; otherwise of the first that has exactly that name, then Keel's."""
    bare = logged.removeprefix("train/")
    keel = (_LAST, Name(bare, "", "")) if _KEEL.match(bare) else None
    if source in TRAINERS:
        return TRAINERS[source].find(logged) or keel
    exact = ((row, trainer.metrics[bare]) for row, trainer in enumerate(TRAINERS.values()) if bare in trainer.metrics)
    patterns = (row for trainer in TRAINERS.values() if (row := trainer.find(logged)) is not None)
    return next(exact, None) or keel or next(patterns, None)


def canonical(name: str, source: str | None = None) -> str | None:
    """Keel's name of a peer's metric, with or without a `train/` before it; None where Keel has none."""
    row = find_name(name, source)
    return row[1].keel if row is not None else None


def option_name(dotted: str, source: str) -> str:
    """What the user of that trainer has to change: the trainer's own option where there is one, Keel's otherwise."""
    if source not in TRAINERS:
        return dotted
    return next((theirs for theirs, ours in TRAINERS[source].options.items() if ours == dotted), dotted)


def keel_options(source: str, args: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """As much of a trainer's options as has a Keel name, under it: {section: {option: value}}."""
    options: dict[str, dict[str, Any]] = {}
    for theirs, ours in TRAINERS[source].options.items() if source in TRAINERS else ():
        value = args.get(theirs) if theirs in args else option_of(args, theirs)
        if value is not None:
            section, name = ours.split(".")
            options.setdefault(section, {})[name] = value
    if source == "verl" and option_of(args, "actor_rollout_ref.actor.use_kl_loss") is False:
        options.setdefault("kl", {})["beta"] = 0.0  # the coefficient has a value although nothing reads it
    return options


def from_map(name: str) -> str:
    """Keel's name of a name given to `--map`: a short one, or Keel's own."""
    if name in SHORT:
        return SHORT[name]
    if _KEEL.match(name):
        return name
    raise unknown("name in --map", name, SHORT)


def renamed(
    series: Mapping[str, Series], mapping: Mapping[str, str], source: str | None = None
) -> tuple[dict[str, Series], list[str]]:
    """(series under Keel's names and in Keel's units, names that no check reads); the first row for a name counts.

    `mapping` is that of `--map`, {name: column}; its columns are read under these names alone.
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
    """What follows from what was logged: groups without spread are those that solved none or all, or were filtered."""
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
