"""Load the two models of a comparison; they share one copy of a common base."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from keel.base.errors import KeelError, first_line
from keel.lab.compare.sources import ModelSource
from keel.models.head import evaluating
from keel.models.load import align_parameters
from keel.models.loaded import LoadedModel
from keel.models.lora import check_bias
from keel.trainer.integrity import check_model

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
    except (ValueError, RuntimeError, KeyError, OSError) as error:
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
