"""Advice that is followed: every proposal is data, loads over the configuration that it is for, and changes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from keel.config import Config, load_config
from keel.config.text import parse
from keel.lab.doctor.advice import option_of
from keel.lab.doctor.diagnosis import Diagnosis

SECTIONS = "|".join(Config.model_fields)
PROPOSED = re.compile(rf"(?<![\w./])((?:{SECTIONS})(?:\.\w+)+)=(?=\S)")
NAMED = re.compile(rf"(?<![\w./:])((?:{SECTIONS})(?:\.[a-z]\w*)+)(?![\w./(:])")


def follow(config: Config, options: Iterable[str]) -> Config:
    """The configuration under a proposal: it loads, it is another one, and nothing in it was so already."""
    words, tree = list(options), config.to_dict()
    changed = load_config(tree, words)
    for word in words:
        name, _, value = word.partition("=")
        assert option_of(tree, name) != parse(value, name), f"{word} is set already"
    assert changed.to_dict() != tree
    return changed


def check_advice(config: Config, diagnosis: Diagnosis) -> None:
    """All that a diagnosis proposes can be followed, and its sentences propose nothing that is not data."""
    for said, options in (
        *((finding.advice, finding.options) for finding in diagnosis.findings),
        *((hypothesis.action, hypothesis.options) for hypothesis in diagnosis.hypotheses),
    ):
        for proposal in options:
            follow(config, proposal)
        offered = {word.partition("=")[0] for proposal in options for word in proposal}
        assert set(PROPOSED.findall(said)) <= offered, said
        for name in NAMED.findall(said):
            assert known(name), f"{name} in {said!r} is no option"


def known(dotted: str) -> bool:
    """Whether the schema has that option; sections with parameters of their own take any name."""
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
