"""The two models of a comparison: resolve their names, load them with one copy of a common base, read prompt files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from keel.base.errors import KeelError, first_line
from keel.base.types import Problem
from keel.config import Config, text
from keel.envs.layouts import PROMPT, PROMPTS, Columns, problem_of
from keel.envs.rows import READERS, BrokenRow, read_rows
from keel.models.head import evaluating
from keel.models.load import align_parameters, load_model
from keel.models.lora import check_bias
from keel.models.options import LoadedModel
from keel.run.model_ref import ModelRef, adapter_base, resolve_model
from keel.trainer.integrity import check_model


@dataclass(frozen=True)
class ModelSource:
    """A model to load: the argument of `load_model`, its LoRA adapter, and the configuration of both.

    `run` is whether the configuration comes from a run or the user. Its tasks and prompts are used only then.
    """

    name: str
    base: str
    adapter: Path | None
    config: Config
    run: bool = False

    def load(self, adapter: Path | None) -> LoadedModel:
        """Load the base as configured, with an adapter, without training features."""
        model = self.config.model
        for folder in (Path(self.base), *(() if adapter is None else (adapter,))):
            check_model(folder.expanduser())
        lora = None if adapter is None else {"adapter": str(adapter)}
        plain: dict[str, Any] = {"dropout": False, "gradient_checkpointing": False, "compile": False}
        return load_model(model, name=self.base, lora=lora, seed=self.config.run.seed, **plain)

    def same_base(self, other: ModelSource) -> bool:
        """Whether both have the same base weights and loading options."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[Any, ...]:
        model, path = self.config.model, Path(self.base).expanduser()
        loading = (model.dtype, model.device, model.attn_implementation, model.quantization, model.trust_remote_code)
        if self.base != "tiny" and path.exists():  # the seed does not matter for a folder with weights
            return (path.resolve(), *loading)
        return (self.base, self.config.run.seed, *loading)


def resolve(
    name: str,
    *,
    base: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSource:
    """Find the model that `name` refers to.

    `name` is a model as in `load_model`; a folder with a LoRA adapter, on `base` or on the base that the adapter names;
    a run's folder (its newest checkpoint), `RUN@N` (the checkpoint of step N), `RUN@best`, `RUN@start` (the initial
    policy, which is the reference); or a checkpoint inside a run. `dtype` and `device` default to those of the run.
    Python code shipped with a model is executed if the run did so, or with `trust_remote_code`.
    """
    return _source(resolve_model(name, _overrides(name, base, dtype, device, trust_remote_code)))


def default_reference(policy: ModelSource, **options: Any) -> ModelSource:
    """The default reference: the start of the policy's run, or its adapter's base. `options` are those of `resolve`."""
    path = Path(policy.name.rpartition("@")[0] or policy.name).expanduser()
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    if policy.run and (run / "config.yaml").is_file():
        return resolve(f"{run}@start", **options)
    if policy.adapter is not None:
        return ModelSource(policy.base, policy.base, None, policy.config)
    raise KeelError(
        f"{policy.name!r} has no default reference: give a REFERENCE (only runs and adapters have a default)"
    )


def _overrides(name: str, base: str | None, dtype: str, device: str | None, trust_remote_code: bool) -> Sequence[str]:
    path = Path(name).expanduser()
    adapter = (path / "adapter_config.json").is_file()
    if adapter and base is None and path.parent.name != "checkpoints" and not adapter_base(path):
        raise KeelError(f"the adapter {name} does not name its base model: give it with --base")
    overrides = {
        "model.name": base if adapter else None,
        "model.dtype": None if dtype == "auto" else dtype,
        "model.device": device,
        "model.trust_remote_code": trust_remote_code or None,
    }
    return [f"{key}={text.dump(value)}" for key, value in overrides.items() if value is not None]


def _source(model_ref: ModelRef) -> ModelSource:
    model, weights = model_ref.config.model, model_ref.weights
    if model.lora is None:
        return ModelSource(model_ref.name, str(weights or model.name), None, model_ref.config, model_ref.has_tasks)
    folder = weights or (Path(model.lora.adapter) if model.lora.adapter else None)
    adapter = None if folder is None else folder.expanduser()
    return ModelSource(model_ref.name, model.name, adapter, model_ref.config, model_ref.has_tasks)


TEXT = ".txt"


def read_prompts(path: Path) -> list[Problem]:
    """Read one prompt per line of a .txt file, or per row of a data file (column with text or messages).

    Blank lines are skipped. The key of a prompt is its line number or the location of its row.
    """
    path = path.expanduser()
    if path.suffix.lower() not in (TEXT, *READERS):
        known = ", ".join((TEXT, *READERS))
        raise KeelError(f"cannot read --prompts {path}: unknown file type {path.suffix!r}, use one of {known}")
    if not path.is_file():
        raise KeelError(f"cannot read --prompts {path}: file not found")
    problems = _lines(path) if path.suffix.lower() == TEXT else _rows(path)
    if not problems:
        raise KeelError(f"--prompts {path} has no prompts: write one per line")
    return problems


def _lines(path: Path) -> list[Problem]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # str.splitlines would also cut at U+2028
    except UnicodeDecodeError:
        raise KeelError(f"--prompts {path} is not UTF-8 text: save it as UTF-8, one prompt per line") from None
    except OSError as error:
        raise KeelError(f"cannot read --prompts {path}: {error.strerror or error}") from None
    return [Problem(str(number), line) for number, line in enumerate(lines, start=1) if line.strip()]


def _rows(path: Path) -> list[Problem]:
    rows = read_rows(str(path))
    columns = (PROMPT, *PROMPTS)
    column = next((name for name in columns if name in rows.columns), None)
    if column is None and rows.rows:
        raise KeelError(
            f"--prompts {path} has no column of prompts: it has {', '.join(rows.columns)}, and needs one called "
            f"{', '.join(columns[:-1])} or {columns[-1]}"
        )
    layout = Columns(column or PROMPT, None, messages=column == "messages")
    parsed = [*rows.broken, *(problem_of(row, layout) for row in rows.rows)]
    broken = next((item for item in parsed if isinstance(item, BrokenRow)), None)
    if broken is not None:
        raise KeelError(f"--prompts {path}, {broken.location}: {broken.why}")
    return [item for item in parsed if isinstance(item, Problem)]


Switch = Callable[[Any], AbstractContextManager[Any]]
_FIRST, _SECOND = "default", "second"  # peft's name of the first adapter


def _no_switch(_: Any) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True)
class Side:
    """One of the two models; `switch` activates this side's adapter in a shared model."""

    name: str
    loaded: LoadedModel
    switch: Switch = _no_switch

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        """The model with this side's weights, without dropout and gradients."""
        with evaluating(self.loaded.model), self.switch(self.loaded.model):
            yield self.loaded.model


def load_pair(policy: ModelSource, reference: ModelSource) -> tuple[Side, Side]:
    """Both models; adapters of one base, and a base against its adapter, share one copy of the base's weights."""
    if not policy.same_base(reference):
        first, second = (Side(source.name, source.load(source.adapter)) for source in (policy, reference))
        return first, second
    adapters = list(dict.fromkeys(a.resolve() for a in (policy.adapter, reference.adapter) if a is not None))
    loaded = policy.load(next(iter(adapters), None))
    if len(adapters) == 2:
        _add_second_adapter(loaded.model, adapters[1])
    names = dict(zip(adapters, (_FIRST, _SECOND), strict=False))

    def side(source: ModelSource) -> Side:
        if not adapters:
            return Side(source.name, loaded)
        active = None if source.adapter is None else names[source.adapter.resolve()]
        return Side(source.name, loaded, _adapters_off if active is None else _active(active))

    return side(policy), side(reference)


def _add_second_adapter(model: Any, folder: Path) -> None:
    from peft import LoraConfig, PeftConfig

    check_model(folder)
    try:
        config = PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, LoraConfig):
            raise KeelError(f"the adapter at {str(folder)!r} is {config.peft_type}, not LoRA: give a LoRA adapter")
        check_bias(config, f"the adapter at {str(folder)!r}")
        model.load_adapter(str(folder), adapter_name=_SECOND)
    except KeelError:
        raise
    except Exception as error:  # a wrong type in adapter_config.json, a broken file of weights: many types
        raise KeelError(f"the adapter at {str(folder)!r} does not fit the model: {first_line(error)}") from error
    align_parameters(model)


def _adapters_off(model: Any) -> AbstractContextManager[Any]:
    off: AbstractContextManager[Any] = model.disable_adapter()
    return off


def _active(name: str) -> Switch:
    @contextmanager
    def switch(model: Any) -> Iterator[None]:
        before = model.active_adapters[0]
        model.set_adapter(name, inference_mode=True)
        try:
            yield
        finally:
            model.set_adapter(before, inference_mode=True)

    return switch
