"""Apply advice: every proposal is data, loads over its configuration and changes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from unittest.mock import patch

from doctor.schooled import schooled_config
from keel.config import Config, load_config
from keel.config.text import parse
from keel.doctor.findings import Diagnosis
from keel.doctor.preflight import MEASURES, preflight
from keel.doctor.runs import option_of

SECTIONS = "|".join(Config.model_fields)
PROPOSED = re.compile(rf"(?<![\w./])((?:{SECTIONS})(?:\.\w+)+)=(?=\S)")
NAMED = re.compile(rf"(?<![\w./:])((?:{SECTIONS})(?:\.[a-z]\w*)+)(?![\w./(:])")


def follow(config: Config, options: Iterable[str]) -> Config:
    """The configuration with a proposal: it loads, and every option changes."""
    overrides, tree = list(options), config.to_dict()
    changed = load_config(tree, overrides)
    for override in overrides:
        name, _, value = override.partition("=")
        assert option_of(tree, name) != parse(value, name), f"{override} is set already"
    assert changed.to_dict() != tree
    return changed


def check_advice(config: Config, diagnosis: Diagnosis) -> None:
    """Check that all proposals of a diagnosis can be applied and that its sentences contain no other options."""
    for advice, options in (
        *((finding.advice, finding.options) for finding in diagnosis.findings),
        *((hypothesis.action, hypothesis.options) for hypothesis in diagnosis.hypotheses),
    ):
        for proposal in options:
            follow(config, proposal)
        offered = {override.partition("=")[0] for proposal in options for override in proposal}
        assert set(PROPOSED.findall(advice)) <= offered, advice
        for name in NAMED.findall(advice):
            assert is_option(name), f"{name} in {advice!r} is no option"


# What looks at the kind of thing that a code is about, with what it builds on.
LOOKING = {
    "mask": ("masks",),
    "scoring": ("masks", "scoring"),
    "sampler": ("travel", "masks", "scoring", "sampler", "weight sync"),
    "reference": ("reference",),
    "loss": ("objective",),
    "kl": ("reference", "objective", "kl_term"),
    "reward": ("collection", "advantage"),
    "output": ("collection", "travel"),
    "prompt": ("prompts", "prompt format", "travel"),
    "model": ("model", "loading", "prompts", "travel"),
    "task": ("prompts",),
    "advantage": ("advantage",),
    "optim": ("update", "reach"),
}


def preflight_of(config: Config, *areas: str) -> Diagnosis:
    """A preflight with the probes for these areas only."""
    looking = {name for area in areas for name in LOOKING[area]}
    assert looking <= {measure.name for measure in MEASURES}
    chosen = [measure for measure in MEASURES if measure.name in looking]
    with patch("keel.doctor.preflight.MEASURES", chosen):
        return preflight(config)


Faults = Mapping[str, tuple[str, *tuple[Any, ...]]]


def repeated(faults: Faults, fault: str, *elsewhere: Faults) -> bool:
    """Whether another fault has the same code. Such a fault is tested with the probes of its area only."""
    code = faults[fault][0]
    others = {entry[0] for table in elsewhere for entry in table.values()}
    first = next(name for name, entry in faults.items() if entry[0] == code)
    return code.partition("/")[0] in LOOKING and (code in others or first != fault)


def check_named_first(code: str, overrides: Iterable[str], *, whole: bool = True) -> Diagnosis:
    """A planted fault must be the first finding and an alarm with evidence, and its proposals must be applicable.

    First among all probes' findings if `whole`, else among those of its area.
    """
    config = schooled_config(*overrides)
    diagnosis = preflight(config) if whole else preflight_of(config, code.partition("/")[0])
    check_advice(config, diagnosis)
    assert [finding.code for finding in diagnosis.findings][:1] == [code], diagnosis.findings
    first = diagnosis.findings[0]
    assert first.severity in ("error", "warning")
    assert first.evidence
    assert first.advice
    return diagnosis


def is_option(dotted: str) -> bool:
    """Whether the schema has that option. Sections with free parameters accept any name."""
    model: Any = Config
    for part in dotted.split("."):
        fields = getattr(model, "model_fields", None)
        if fields is None:
            return True
        if part not in fields:
            return bool(model.model_config.get("extra") == "allow")
        inner = [
            a
            for a in (fields[part].annotation, *getattr(fields[part].annotation, "__args__", ()))
            if hasattr(a, "model_fields")
        ]
        model = inner[0] if inner else object
    return True
