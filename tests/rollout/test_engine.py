"""The engines' protocol: what a class need not write, what a wrapper forwards, and who is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.base.errors import KeelError
from keel.base.types import Completion
from keel.config import load_config
from keel.envs import Task
from keel.envs.arithmetic import arithmetic
from keel.envs.judge import Judge
from keel.rollout import Engine, EngineWrapper, Request, SamplingParams, Turn
from keel.rollout.collect import Collector
from keel.rollout.native.engine import NativeEngine
from keel.rollout.options import RolloutOptions
from keel.rollout.registry import build_engine
from keel.rollout.render import Renderer
from keel.run.build import build_policy, build_run

from . import shapes

HERE = "rollout.test_engine"


class Counting(Engine):
    """Completions that name the turn: the smallest engine there is."""

    def __init__(self, model: Any = None, tokenizer: Any = None) -> None:
        self.asked: list[int] = []

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> list[list[Completion]]:
        self.asked.append(len(requests))
        one = Completion((len(self.asked),), (True,), (-1.0,), (-1.0,), "", "eos")
        return [[one for _ in request.drawn(sampling)] for request in requests]


class ByShape:
    """All the methods of an engine, and no base."""

    version = None

    def __init__(self, model: Any, tokenizer: Any) -> None: ...

    def generate(self, requests: Any, sampling: Any, **noise: int) -> Any: ...

    def sync(self, policy: Any, version: int | None = None) -> None: ...


class Mute(Engine):
    def __init__(self, model: Any, tokenizer: Any) -> None: ...


class Tuned(Counting):
    """An engine with parameters of its own."""

    def __init__(self, model: Any, tokenizer: Any, *, slots: int, rollout: RolloutOptions, warm: bool = True) -> None:
        super().__init__()
        self.told = slots, warm, rollout.num_generations


class AfterFilters(Counting):
    logp_after_filters = True


def by_shape(model: Any, tokenizer: Any) -> Any:
    return ByShape(model, tokenizer)


def test_generate_alone_takes_several_turns() -> None:
    engine, said = Counting(), []

    def answer(turns: list[Turn]) -> list[Request]:
        said.append([turn.completion.tokens for turn in turns])
        return [Request("p", (1, 2), samples=(turn.sample,)) for turn in turns[1:]]

    engine.converse([Request("p", (1,))], SamplingParams(num_generations=3), answer)
    assert said == [[(1,)] * 3, [(2,)] * 2, [(3,)]]
    assert engine.asked == [1, 2, 1]


def collector(engine: Any, task: Task, sampling: SamplingParams) -> Collector:
    return Collector(engine, task, Renderer(shapes.tokenizer()), sampling, Judge.of(task))


def test_an_engine_with_weights_of_its_own_must_say_how_it_syncs() -> None:
    model = shapes.model("llama")
    with pytest.raises(KeelError, match=r"engine Counting has no sync: .* or declare shares_weights = True"):
        Counting().sync(model, 1)

    class Shares(Counting):
        shares_weights = True

    Shares().sync(model, 1)


def test_a_wrapper_forwards_everything_that_an_engine_declares() -> None:
    inner = NativeEngine(shapes.model("llama"), shapes.tokenizer())
    wrapper: Any = EngineWrapper(inner)
    names = [name for name in dir(Engine) if not name.startswith("_") and name != "native"]
    assert {"generate", "converse", "sync", "release", "context", "shares_weights", "logp_after_filters"} <= set(names)
    for name in names:
        assert getattr(wrapper, name) == getattr(inner, name), name
    assert inner.native
    assert not wrapper.native, "it may change what is sampled"
    assert wrapper.shares_weights
    assert wrapper.context == inner.context is not None
    seen: list[int] = []
    wrapper.on_finished = seen.append
    sampling = SamplingParams(num_generations=2, max_completion_length=3, ignore_eos=True)
    asked = [Request("p", (3, 4))]
    assert wrapper.generate(asked, sampling, seed=1) == inner.generate(asked, sampling, seed=1)
    assert seen == [2, 2], "what is set on the wrapper is set on the engine that works"


def test_a_wrapper_with_a_generate_of_its_own_is_asked_by_it_for_every_turn() -> None:
    """It inherits a converse that would go past it."""

    class Listening(EngineWrapper):
        heard = 0

        def generate(self, *args: Any, **options: Any) -> Any:
            self.heard += 1
            return super().generate(*args, **options)

    engine = Listening(NativeEngine(shapes.model("llama"), shapes.tokenizer()))
    sampling = SamplingParams(num_generations=1, max_completion_length=2, ignore_eos=True)
    turns = iter([[Request("p", (3, 4, 5, 6), samples=(0,), start=2)], []])
    engine.converse([Request("p", (3, 4))], sampling, lambda _: next(turns))
    assert engine.heard == 2


class Heard:
    """A mixin: counts how often it is asked."""

    heard = 0

    def generate(self, *args: Any, **options: Any) -> Any:
        self.heard += 1
        return super().generate(*args, **options)  # type: ignore[misc]


class FromMixin(Heard, NativeEngine):
    pass


class Derived(FromMixin):
    pass


class Joining(Derived):
    converse = NativeEngine.converse


@pytest.mark.parametrize(("engine_class", "times"), [(FromMixin, 2), (Derived, 2), (Joining, 0)])
def test_a_mixin_with_a_generate_is_asked_by_it_for_every_turn(engine_class: Any, times: int) -> None:
    engine = engine_class(shapes.model("llama"), shapes.tokenizer())
    sampling = SamplingParams(num_generations=1, max_completion_length=2, ignore_eos=True)
    turns = [Request("p", (3, 4, 5, 6), samples=(0,), start=2)]
    engine.converse([Request("p", (3, 4))], sampling, lambda ended: [turns.pop() for _ in ended if turns])
    assert not turns
    assert engine.heard == times


def test_what_a_wrapper_sets_for_itself_is_not_the_inner_engines() -> None:
    inner = NativeEngine(shapes.model("llama"), shapes.tokenizer())
    context = inner.context
    wrapper = EngineWrapper(inner)
    wrapper.context, wrapper.version = 64, 7
    assert (wrapper.context, wrapper.version) == (64, 7)
    assert (inner.context, inner.version) == (context, None)


@pytest.mark.parametrize("name", ["ByShape", "by_shape"])
def test_an_engine_by_shape_is_refused_in_one_line_that_names_the_change(name: str) -> None:
    refused = rf"^rollout.engine={HERE}:{name} does not derive from keel.rollout.Engine: .*class ByShape\(keel.rollout."
    with pytest.raises(KeelError, match=refused):
        build_engine(RolloutOptions(engine=f"{HERE}:{name}"), shapes.model("llama"), shapes.tokenizer())


def test_a_class_by_shape_is_refused_before_a_model_loads() -> None:
    with pytest.raises(KeelError, match=f"rollout.engine={HERE}:ByShape does not derive from keel.rollout.Engine"):
        load_config({}, [f"rollout.engine={HERE}:ByShape"])
    with pytest.raises(KeelError, match=f"rollout.engine={HERE}:Mute has no generate"):
        load_config({}, [f"rollout.engine={HERE}:Mute"])


def test_an_engine_by_shape_given_in_python_is_refused_too() -> None:
    task: Any = arithmetic()
    with pytest.raises(KeelError, match=r"^the engine ByShape does not derive from keel.rollout.Engine"):
        collector(by_shape(None, None), task, SamplingParams()).collect(task.held_out(1))


@pytest.mark.slow
def test_the_engine_of_the_docs_trains_from_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class PlainEngine" in block]
    (tmp_path / "plain.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = {"prompts_per_step": 2, "num_generations": 3, "max_completion_length": 5}
    config = load_config(
        {
            "run": {"dir": str(tmp_path), "max_steps": 2},
            "model": {"device": "cpu"},
            "rollout": {"engine": "plain:PlainEngine", **sizes},
            "log": {"console": "none", "tensorboard": False},
            "eval": {"every": 0, "samples": 2, "k": [1]},
        }
    )
    result = keel.train(config)
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(0 <= line["logp/sampler_gap_max"] < 1e-4 for line in lines), "it samples from the policy that trains"


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_log_probabilities_after_filters_are_kept_as_such(top_p: float) -> None:
    """What they were before the filters is then not known, and NaN says so."""
    sampling = SamplingParams(num_generations=2, top_p=top_p)
    task: Any = arithmetic()
    (group,) = collector(AfterFilters(), task, sampling).collect(task.held_out(1))
    for completion in group.completions:
        assert completion.filtered_logp == (-1.0,)
        assert [math.isnan(logp) for logp in completion.sample_logp] == [top_p < 1]


def test_an_engine_declares_and_receives_its_own_parameters(tmp_path: Path) -> None:
    tuned = {"name": f"{HERE}:Tuned", "slots": 3}
    config = load_config({"rollout": {"engine": tuned, "num_generations": 4}}, ["model.device=cpu"])
    engine: Any = build_run(config, build_policy(config, probe=False)).run.engine
    assert engine.told == (3, True, 4)
    assert load_config(config.to_dict()).rollout == config.rollout  # as a run's config.yaml has it
    given = load_config({}, [f"rollout.engine={{name: {HERE}:Tuned, slots: 5, warm: false}}"])
    assert given.rollout.named_engine.params == {"slots": 5, "warm": False}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (f"{HERE}:Tuned", "engine rollout.test_engine:Tuned needs the parameter 'slots'"),
        (f"{{name: {HERE}:Tuned, slots: 1, wram: true}}", "Tuned parameter 'wram': did you mean 'warm'"),
        (f"{{name: {HERE}:Tuned, slots: 1, model: x}}", "Tuned parameter 'model'"),
        ("{name: native, slots: 1}", "engine native has no parameters: leave 'slots' out"),
        ("{slots: 1}", "rollout.engine.name is required"),
    ],
)
def test_parameters_that_an_engine_does_not_declare_are_one_line(engine: str, message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        load_config({}, [f"rollout.engine={engine}"])
    assert "\n" not in str(caught.value)
