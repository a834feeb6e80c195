"""vLLM in the process, by a stand-in of its calls: what is called when, and what is left alone."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from keel.base.errors import KeelError
from keel.base.world import SINGLE_PROCESS, World
from keel.models.fingerprint import fingerprint_tensors
from keel.rollout import Request, SamplingParams
from keel.rollout.options import RolloutOptions
from keel.rollout.registry import PLACEHOLDER_URL, build_engine, check_vllm
from keel.rollout.vllm.colocated import ColocatedSampler
from keel.rollout.vllm.engine import VllmEngine
from keel.rollout.vllm.transfer import Part, adapter_of
from rollout import shapes

OPTIONS = RolloutOptions(engine="vllm")
SAMPLING = SamplingParams(num_generations=2, max_completion_length=4)
EOS = 257


class FakeLLM:
    """Takes weights as a worker does, ends every row at once, and seeds its process as vLLM does."""

    made: ClassVar[list[FakeLLM]] = []

    def __init__(self, **arguments: Any) -> None:
        random.seed(arguments.get("seed", 0))
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        if arguments["model"] == "":
            raise ValueError("no model\nat all")
        self.arguments, self.calls, self.tensors = arguments, list[Any](), dict[str, Any]()
        self.requests: dict[str, Any] = {}
        self.prompts, self.token, self.logp = list[Any](), EOS, -1.0
        config = SimpleNamespace(max_model_len=arguments["max_model_len"], get_vocab_size=lambda: shapes.VOCABULARY)
        self.llm_engine = SimpleNamespace(
            model_config=config,
            add_request=self.add_request,
            add_lora=lambda request: self.calls.append(("add_lora", request.load_inplace)),
            step=self.step,
            has_unfinished_requests=lambda: bool(self.requests),
            abort_request=self.abort_request,
            output_processor=SimpleNamespace(request_states=self.requests),
            engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")),
        )
        FakeLLM.made.append(self)

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        if method == "keel_load":
            self.calls.append(method)
            self.tensors = {name: tensor.clone() for name, tensor in args[0]}
            return [None]
        if method == "keel_parts":
            return [list(dict(self.policy.named_parameters()))]
        if method == "keel_adapter":
            return [adapter_of(self.policy, torch.float32).digests()]
        self.calls.append(method)
        return [{name: Part(name).digest(tensor) for name, tensor in self.tensors.items()}]

    policy: Any = None

    def add_request(self, row: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        self.calls.append("add_request")
        self.requests[row] = lora_request
        self.prompts.append(prompt)

    def abort_request(self, ids: list[str], internal: bool = False) -> None:
        if internal:  # other names are the caller's, under which nothing runs
            self.requests.clear()

    def step(self) -> list[Any]:
        one = SimpleNamespace(token_ids=[self.token], logprobs=[{self.token: SimpleNamespace(logprob=self.logp)}])
        ended = [SimpleNamespace(request_id=row, outputs=[one], finished=True) for row in self.requests]
        self.requests.clear()
        return ended

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """The stand-in, where `import vllm` looks for it."""

    def module(name: str, **contents: Any) -> None:
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    module("vllm", LLM=FakeLLM, SamplingParams=SimpleNamespace)
    module("vllm.sampling_params", RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
    module("vllm.lora")
    module("vllm.lora.request", LoRARequest=lambda *a, load_inplace=False: SimpleNamespace(load_inplace=load_inplace))
    module("vllm.distributed")
    ends = ("cleanup_dist_env_and_memory", "destroy_model_parallel")
    module("vllm.distributed.parallel_state", **dict.fromkeys(ends, lambda: None))
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM


class OnDevice(nn.Parameter):
    """A parameter that says it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def built(vllm: type[FakeLLM], *, cuda: bool = False, world: World = SINGLE_PROCESS, lora: bool = False) -> Any:
    model = shapes.model("llama")
    vllm.policy = model
    if lora:
        model = vllm.policy = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    if cuda:
        model.model.embed_tokens.weight = OnDevice(model.model.embed_tokens.weight.detach())
    engine = VllmEngine(ColocatedSampler(model, shapes.tokenizer(), OPTIONS, world), model, shapes.tokenizer())
    return engine, model, vllm.made[-1]


def test_asleep_during_the_update_awake_before_it_samples(vllm: type[FakeLLM]) -> None:
    engine, model, llm = built(vllm, cuda=True)
    assert llm.arguments["enable_sleep_mode"] is True
    for _ in range(2):
        llm.calls.clear()
        engine.generate([Request("p", (1, 2))], SAMPLING)
        engine.release()
        engine.release()
        engine.sync(model, 1)
        engine.generate([Request("p", (1, 2))], SAMPLING)
        assert llm.calls == [
            *("add_request", "add_request", ("sleep", 1)),
            *(("wake_up", "weights"), "keel_load", "keel_digests", "reset_prefix_cache"),
            *(("wake_up", "kv_cache"), "add_request", "add_request"),
        ]
    llm.calls.clear()
    engine.release()
    engine.generate([Request("p", (1, 2))], SAMPLING)  # without a sync: an evaluation
    assert llm.calls[:2] == [("sleep", 1), ("wake_up", "weights", "kv_cache")]


def test_without_a_gpu_nothing_sleeps(vllm: type[FakeLLM]) -> None:
    engine, model, llm = built(vllm)
    engine.release()
    engine.sync(model, 1)
    assert llm.arguments["enable_sleep_mode"] is False
    assert not [call for call in llm.calls if call[0] in ("sleep", "wake_up")]


def test_random_streams_go_on_as_they_were(vllm: type[FakeLLM]) -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)

    model = shapes.model("llama")
    vllm.policy = model
    seed()
    expected = numbers()
    seed()
    ColocatedSampler(model, shapes.tokenizer(), OPTIONS, SINGLE_PROCESS)
    assert numbers() == expected


@pytest.mark.parametrize("world", [SINGLE_PROCESS, World(1, 2)])
def test_each_of_several_ranks_has_an_engine_of_its_own(vllm: type[FakeLLM], world: World) -> None:
    _, _, llm = built(vllm, world=world)
    expected = "external_launcher" if world.size > 1 else None
    assert llm.arguments.get("distributed_executor_backend") == expected


def test_a_base_that_vllm_has_read_otherwise_is_refused(vllm: type[FakeLLM]) -> None:
    """The base of an adapter comes from files that vLLM reads itself."""
    with pytest.raises(KeelError, match="vLLM in this process has other tensors than the policy"):
        built(vllm, lora=True)
    llm = vllm.made[-1]
    assert (llm.arguments["enable_lora"], llm.arguments["max_lora_rank"]) == (True, 8)
    assert "load_format" not in llm.arguments


def test_weights_that_are_not_held_are_refused(vllm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model, llm = built(vllm)
    rpc = llm.collective_rpc
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def asleep(method: str, args: Any = ()) -> list[Any]:
        result = rpc(method, args)
        llm.tensors |= zeros if method == "keel_load" else {}
        return result

    llm.collective_rpc = asleep
    with pytest.raises(KeelError, match="vLLM in this process does not have the policy's weights"):
        engine.sync(model, 1)


def test_what_vllm_refuses_is_one_line(vllm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.rollout.vllm.colocated.engine_arguments", lambda *a, **b: {"model": ""})
    with pytest.raises(KeelError, match=r"^vLLM could not start on this model: no model$"):
        built(vllm)


def test_rows_given_up_leave_the_engine(vllm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, llm = built(vllm)
    step = llm.step
    llm.llm_engine.step = lambda: [llm.requests.update(other=None), step()[:1], llm.requests.update(other=None)][1]

    def fails(turns: Any) -> Any:
        assert llm.requests, "others run on"
        raise RuntimeError("the task fails")

    with pytest.raises(RuntimeError, match="the task fails"):
        engine.converse([Request("p", (1,))], SAMPLING, fails)
    assert not llm.requests


def test_nothing_of_other_weights_is_read_from_the_cache(vllm: type[FakeLLM]) -> None:
    """vLLM does not empty its prefix cache while blocks are in use."""
    engine, model, llm = built(vllm)
    for _ in range(2):
        engine.generate([Request("p", (1, 2))], SAMPLING)
        engine.sync(model, 1)
    salts = [prompt["cache_salt"] for prompt in llm.prompts]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert all(salts)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"token": 260}, "the token 260 of 260"), ({"logp": float("nan")}, "a log-probability that is not finite")],
)
def test_what_cannot_be_trained_on(vllm: type[FakeLLM], change: dict[str, Any], message: str) -> None:
    engine, _, llm = built(vllm)
    vars(llm).update(change)
    with pytest.raises(KeelError, match=f"vLLM in this process .*{message}"):
        engine.generate([Request("p", (1, 2))], SAMPLING)


def test_a_model_with_state_beside_its_parameters() -> None:
    model = shapes.model("llama")
    model.model.norm.register_buffer("scale", torch.ones(1))
    with pytest.raises(KeelError, match=r"the buffer model\.norm\.scale beside its parameters"):
        build_engine(OPTIONS, model, shapes.tokenizer())


def test_several_gpus_need_a_server() -> None:
    options = RolloutOptions(engine="vllm", vllm={"tensor_parallel_size": 2})  # type: ignore[arg-type]
    with pytest.raises(KeelError, match="tensor_parallel_size above 1 needs a server"):
        check_vllm(options)


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        ({"wait_s": 3}, "wait_s is for a server"),
        ({"transfer": "nccl"}, "transfer is for a server"),
        ({"secret": "$NAME"}, "secret is for a server"),
    ],
)
def test_options_of_a_server_are_refused_without_one(vllm: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        check_vllm(RolloutOptions(engine="vllm", vllm=vllm))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"vllm": {"tensor_parallel_size": 2}}, "vllm.tensor_parallel_size .* --tensor-parallel-size"),
        ({"vllm": {"gpu_memory_utilization": 0.5}}, "vllm.gpu_memory_utilization .* --gpu-memory-utilization"),
        ({"vllm": {"max_model_len": 64}}, "vllm.max_model_len .* --max-model-len"),
        ({"vllm": {"cuda_graphs": False}}, "vllm.cuda_graphs .* --no-cuda-graphs"),
        ({"dtype": "fp32"}, "dtype .* --dtype"),
    ],
)
def test_options_of_the_engine_are_the_servers_unless_it_is_placed(options: dict[str, Any], flag: str) -> None:
    server = {"mode": "server", "url": "http://a:1", **options.pop("vllm", {})}
    rollout = RolloutOptions(engine="vllm", vllm=server, **options)  # type: ignore[arg-type]
    with pytest.raises(KeelError, match=f"rollout.{flag}$"):
        check_vllm(rollout)
    check_vllm(rollout, placed=True)
    check_vllm(rollout.model_copy(update={"vllm": rollout.vllm.model_copy(update={"url": PLACEHOLDER_URL})}))


def test_without_vllm_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(KeelError, match="needs vLLM, which cannot be imported here"):
        build_engine(OPTIONS, shapes.model("llama"), shapes.tokenizer())


def test_digests_are_of_values_and_names() -> None:
    one = torch.ones(2, 3)
    assert Part("a").digest(one) == fingerprint_tensors([("a", one)]) != Part("b").digest(one)
    assert Part("a", 0, 1, 1).of(one).shape == (1, 3)
    assert Part.parse(str(Part("a.b", 1, 2, 1))) == Part("a.b", 1, 2, 1)
