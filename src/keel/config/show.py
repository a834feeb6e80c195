"""Print a configuration as YAML that loads to the same configuration, with each option's description as a comment.

`resolved` gives the values that `null` and `auto` stand for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from keel.base.redact import masked
from keel.config import text
from keel.config.checks import kl_pairing, kl_terms
from keel.config.declared import plugin_options
from keel.config.schema import Config, plain
from keel.losses import loss_defaults

COLUMN = 40  # where comments begin


def show_config(config: Config, *, comments: bool = True) -> str:
    """The configuration as YAML with comments, which also give the values of `null` and `auto`. Secrets are masked."""
    return "\n".join(_lines(config, "", "", resolved(config), comments)) + "\n"


def _lines(model: BaseModel, path: str, indent: str, resolved_values: dict[str, Any], comments: bool) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        value, dotted = getattr(model, name), path + name
        sentence = field.description or ""
        if dotted in resolved_values:
            sentence += f" Here: {text.dump(resolved_values[dotted])}."
        if isinstance(value, BaseModel):
            yield _line(f"{indent}{name}:", sentence, comments)
            yield from _lines(value, dotted + ".", indent + "  ", resolved_values, comments)
        else:
            yield _line(f"{indent}{name}: {text.dump(masked(_data(value), name))}", sentence, comments)
    for name, value, sentence in _parameters(model, path):
        yield _line(f"{indent}{text.dump(name)}: {text.dump(masked(_data(value), name))}", sentence, comments)


def _parameters(model: BaseModel, path: str) -> Iterator[tuple[str, Any, str]]:
    """The parameters of the plug-in that a section names, with their descriptions if it declares them."""
    generic = f"A parameter of this {path.rstrip('.').rpartition('.')[2]}."
    options = plugin_options(model, path.rstrip("."))
    if options is None:
        yield from ((name, value, generic) for name, value in (model.model_extra or {}).items())
        return
    for name, field in type(options).model_fields.items():
        if name not in type(model).model_fields:
            yield name, getattr(options, name), field.description or generic


def _data(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    return [_data(item) for item in value] if isinstance(value, tuple | list) else value


def _line(setting: str, sentence: str, comments: bool) -> str:
    return f"{setting:<{COLUMN}}  # {sentence}" if comments and sentence else setting


def resolved(config: Config) -> dict[str, Any]:
    """Map dotted options to the values that their `null` or `auto` stands for in this configuration."""
    stands_for = {f"loss.{name}": value for name, value in loss_defaults(config.loss).items()}
    for option, term in kl_terms(config.kl).items():
        if term.gradient == "auto":
            pairing = kl_pairing(config, term)
            in_loss = pairing.placement == "loss" and pairing.level == "token"
            stands_for[f"{option}.gradient"] = str(pairing.form) if in_loss else "default of the pairing"
        if term.needs_exact and not term.exact:
            stands_for[f"{option}.exact"] = True
    if config.reference.kind == "auto":
        stands_for["reference.kind"] = "adapter_off" if config.model.lora else "frozen"
    if config.optim.decay_steps is None and config.optim.schedule != "constant":
        stands_for["optim.decay_steps"] = config.run.max_steps
    if config.eval.temperature is None:
        stands_for["eval.temperature"] = config.rollout.temperature
    return stands_for
