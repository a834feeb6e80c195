"""The configuration as a page: YAML that loads to the same configuration, each option followed by its sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from keel.base.redact import masked
from keel.config import text
from keel.config.alias import Alias
from keel.config.aliases import tables
from keel.config.declared import own_options
from keel.config.resolve import resolved
from keel.config.schema import Config, plain

COLUMN = 40  # where comments begin


def show_config(config: Config, *, comments: bool = True) -> str:
    """The resolved configuration as YAML; what `null` and `auto` stand for is said in the comment.

    Secrets are masked: the page is for reading.
    """
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
    """The parameters of the plug-in that a section names, with their sentences where it declares them."""
    generic = f"A parameter of this {path.rstrip('.').rpartition('.')[2]}'s own."
    options = own_options(model, path.rstrip("."))
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


MIGRATE_HEAD = """# Coming from TRL, verl or OpenRLHF

`keel migrate FILE` turns a configuration of TRL, verl or OpenRLHF (YAML, JSON, a Python file with `GRPOConfig(…)`, a
shell script of overrides) into Keel's, fills in what the peer does where its file is silent, and lists what has no
counterpart.

Keel also takes the options of other trainers under their own names, in a configuration and on the command line
(`kl_coef: 0.01`, `kl_coef=0.01`, `--kl-coef 0.01`), and says what each became. verl's names may be given without the
sections before them (`kl_loss_coef`, `actor.optim.lr`), and names without a section inside one that trainers have
(`grpo.beta`, `optim.lr`). A name that means another thing from trainer to trainer, as `rollout_batch_size` does, is
refused with what to write instead, and one without a counterpart with the reason, so nothing is accepted and ignored.
A name that nobody has leads to the options that it may mean, by its letters or its words, or to none. This page is
generated from the table that loading uses: `python -m keel.config.show > docs/migrate.md`.

Three defaults differ: Keel's `loss.loss_type` is `grpo` where TRL has `dapo`; `rollout.max_completion_length` is 64
where TRL has 512; `kl.reduction` is `token_mean`, so that β means the same under every loss, where TRL and verl reduce
the KL like the loss (`kl.reduction=loss`).

Units: TRL's steps are optimizer updates, Keel's are batches of rollouts. Where TRL's names give a batch several updates
(`num_iterations`, or `steps_per_generation` above `gradient_accumulation_steps`), `max_steps`, `save_steps`,
`eval_steps`, `warmup_steps` and `ref_model_sync_steps` are divided by their number; beside Keel's own
`loss.num_iterations` and `optim.minibatches` they are batches. verl's steps are batches as Keel's are.

`keel migrate` leaves to you what a file does not settle (a variable of the environment, a value computed in Python, a
length in epochs) and lists it as "by hand". It refuses, with exit status 1, a result that would train otherwise than
the file says: a KL switch that is on while β is 0, `adv_estimator: gae` (verl's default, which needs a critic), two
options that disagree.
"""


def migrate_page() -> str:
    """docs/migrate.md: every name with what it becomes."""
    titles = {
        "Keel": "Short names",
        "TRL": "TRL (GRPOConfig, 1.16)",
        "verl": "verl (YAML)",
        "OpenRLHF": "OpenRLHF (command line)",
        "other": "Other trainers and courses",
    }
    parts = [MIGRATE_HEAD]
    for origin, aliases in tables():
        rows = [_row(alias) for alias in aliases if alias.target]
        parts.append(
            f"## {titles[origin]}\n\n| name | becomes | note |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
        )
        rows = [_row_without_target(alias) for alias in aliases if not alias.target]
        if rows:
            parts.append("Without an option here:\n\n| name | | why |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(alias: Alias) -> str:
    return f"| `{alias.name}` | `{alias.target}` | {alias.note} |"


def _row_without_target(alias: Alias) -> str:
    refused = alias.convert is None or alias.note.startswith("refused")
    return f"| `{alias.name}` | {'refused' if refused else 'not needed'} | {alias.note} |"


if __name__ == "__main__":
    print(migrate_page(), end="")
