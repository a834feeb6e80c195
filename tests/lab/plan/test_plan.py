"""`keel train --plan`: memory counted on fake tensors, compared with the live tensors of real steps."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from keel.base.types import Completion
from keel.cli import main
from keel.config import load_config
from keel.lab.plan.dry_run import decoding_traits, rollout_passes
from keel.lab.plan.plan import Plan, make_it_fit, plan
from keel.lab.plan.shapes import KNOWN, Hardware, find_hardware
from keel.lab.plan.show import measure, obstacle
from keel.models.memory import LiveBytes
from keel.models.tiny import tiny_tokenizer
from keel.rollout import Engine, Request, SamplingParams
from keel.rollout.native.decode import SharedPrefixDecoder
from keel.rollout.native.engine import NativeEngine
from keel.rollout.native.scheduler import RolloutPasses
from keel.run.build import build_policy, build_run
from keel.trainer.state import State
from keel.trainer.step import Step, train_step


class FullLength(Engine):
    """An engine whose completions all have the length that they may have: the worst step, which a plan is about."""

    version = 0

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        pass

    def generate(self, requests: Any, sampling: Any, **_: Any) -> list[list[Completion]]:
        length = sampling.max_completion_length

        def one() -> Completion:
            tokens = torch.randint(10, 100, (length,), generator=self.generator).tolist()
            flat = (-4.6,) * length
            return Completion(tuple(tokens), (True,) * length, flat, flat, "1", "length")

        return [[one() for _ in range(sampling.num_generations)] for _ in requests]


def reward(problem: Any, text: str) -> float:
    reward.calls += 1  # type: ignore[attr-defined]
    return float(reward.calls % 2)  # type: ignore[attr-defined]


reward.calls = 0  # type: ignore[attr-defined]


def small_llama() -> tuple[nn.Module, Any]:
    """Two narrow layers: every path of a large model, in a moment."""
    tokenizer = tiny_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=2, tie_word_embeddings=True, **shape)
    return LlamaForCausalLM(config), tokenizer


def small_gpt2() -> tuple[nn.Module, Any]:
    """GPT-2's shape, with the dropout that its config has by default."""
    tokenizer = tiny_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=2, n_positions=1024)
    return GPT2LMHeadModel(config), tokenizer


BASE = {
    "model.name": "lab.plan.test_plan:small_llama",
    "rollout.engine": "lab.plan.test_plan:FullLength",
    "rewards": "[{name: lab.plan.test_plan:reward}]",
    "rollout.prompts_per_step": 4,
    "rollout.num_generations": 4,
    "rollout.max_completion_length": 24,
    "kl.beta": 0.01,
}
GPT2 = ["model.name=lab.plan.test_plan:small_gpt2"]
HALF = "optim.precision=bfloat16"
JOBS = {
    "full weights, k3": [],
    "exact KL": ["kl.estimator=exact", "kl.exact=true"],
    "LoRA": ["model.lora={r: 4}"],
    "no reference": ["kl.beta=0", "kl.measure_every=0"],
    "small microbatches": ["optim.microbatch_tokens=256"],
    "long completions": ["rollout.max_completion_length=160", "rollout.prompts_per_step=2"],
    "an average as the reference": ["reference={kind: ema, every: 1, alpha: 0.5}"],
    "two updates a batch": ["loss.num_iterations=2", "optim.minibatches=2"],
    "recomputed": ["model.gradient_checkpointing=true", "rollout.max_completion_length=64"],
    "recomputed, exact KL": ["model.gradient_checkpointing=true", "kl.estimator=exact", "kl.exact=true"],
    "recomputed, LoRA": ["model.gradient_checkpointing=true", "model.lora={r: 4}"],
    "recomputed, GPT-2": ["model.gradient_checkpointing=true", *GPT2],
    "GPT-2, whose dropout is off": GPT2,
    "bfloat16 passes": [HALF, "rollout.prompts_per_step=1", "rollout.num_generations=2"],  # slow for real on some CPUs
    "long rows, by their structure": ["rollout.max_completion_length=280", "rollout.prompts_per_step=1"],
    "long rows of GPT-2": [*GPT2, "rollout.max_completion_length=280", "rollout.prompts_per_step=1"],
}


def job(*overrides: str) -> list[str]:
    """The base with these in their place."""
    return [f"{key}={value}" for key, value in (BASE | dict(item.split("=", 1) for item in overrides)).items()]


@cache
def cpu() -> Hardware:
    return find_hardware("cpu")


@cache
def planned(*overrides: str, hardware: str = "cpu", prompt: int | None = None) -> Plan:
    """A plan of the base with these in their place, made once."""
    return plan(load_config({}, job(*overrides)), cpu() if hardware == "cpu" else KNOWN[hardware], prompt)


def measured_peak(overrides: list[str]) -> int:
    """Bytes of live tensors at the peak of the second real step, weights and all."""
    config = load_config({}, overrides)
    loaded = build_policy(config)
    run = build_run(config, loaded).run
    state = train_step(run, State(kl=run.controller.init())).state
    live = LiveBytes()
    live.hold((*loaded.model.parameters(), *loaded.model.buffers()))
    if run.reference is not None:
        with run.reference.model() as held:
            live.hold((*held.parameters(), *held.buffers()))
    live.hold(x for moments in run.optimizer.inner.state.values() for x in moments.values() if torch.is_tensor(x))
    with live:
        train_step(run, state)
    return live.peak


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_the_predicted_peak_is_the_measured_one_within_15_percent(name):
    overrides = job(*JOBS[name])
    foretold = planned(*JOBS[name])
    measured = measured_peak(overrides)
    assert foretold.peak == pytest.approx(measured, rel=0.15), (foretold.parts, foretold.phases)


def test_nothing_of_a_recomputed_layer_is_held():
    layers = [nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh()) for _ in range(2)]
    x = torch.ones(8, 16, requires_grad=True)
    live = LiveBytes()
    before = live.hold((x, *(layer[0].weight for layer in layers)))
    with live:
        hidden = checkpoint(layers[1], layers[0](x), use_reentrant=False)
        hidden.sum().backward()
        del hidden
    assert live.now == 2 * before  # a gradient for each, and nothing else


def test_the_tracker_counts_by_hand():
    live = LiveBytes()
    with live:
        a = torch.zeros(1000, dtype=torch.float32)
        assert live.now == 4000
        b = a.view(10, 100)  # the same storage
        assert live.now == 4000
        c = a.double()
        assert live.now == 12000
        del c
        assert live.now == 4000
        del a, b
    assert (live.now, live.peak) == (0, 12000)


def test_parts_by_hand():
    """AdamW keeps two numbers a parameter, gradients one, a frozen reference a second model; LoRA needs none."""
    full = planned()
    assert full.trainable == full.parameters
    buffers = full.parts["weights"] - 4 * full.parameters
    assert 0 <= buffers < 10_000
    assert full.parts["gradients"] == 4 * full.parameters
    assert full.parts["optimizer"] == pytest.approx(8 * full.parameters, rel=1e-3)
    assert full.parts["reference"] == full.parts["weights"]
    lora = planned("model.lora={r: 4}")
    assert lora.parts["reference"] == 0
    assert lora.trainable < full.trainable / 2


@pytest.mark.slow
def test_offloaded_parts_rest_in_main_memory_and_come_back_for_their_own_phase():
    there = planned(hardware="h200")
    resting = planned("reference={kind: frozen, offload: true}", "optim.offload=true", hardware="h200")
    moments, host = there.parts["optimizer"], resting.host
    assert moments + 0.8 * there.parts["reference"] < host < moments + there.parts["reference"]  # its head stays
    assert resting.phases["update"] == there.phases["update"] - host
    assert resting.phases["reference"] == there.phases["reference"] - moments
    assert resting.phases["optimizer step"] == there.phases["optimizer step"] - (host - moments)


@pytest.mark.slow
def test_an_average_of_half_precision_weights_is_kept_in_fp32_too():
    half = planned("model.dtype=bfloat16", "reference={kind: ema}")
    assert half.parts["reference"] == half.parts["weights"] + 4 * half.parameters


@pytest.mark.slow
def test_half_precision_passes_hold_more_on_cuda():
    """GPT-2's activation computes a power, which autocast keeps in fp32 there; the same passes on a CPU do not."""
    overrides = [HALF, "rollout.max_completion_length=64", *GPT2]
    here, cuda = planned(*overrides, prompt=40), planned(*overrides, hardware="h200", prompt=40)
    assert cuda.parts["activations"] > 1.1 * here.parts["activations"]
    again = planned(*overrides, "model.gradient_checkpointing=true", hardware="h200", prompt=40)
    assert again.parts["activations"] < cuda.parts["activations"]


@pytest.mark.slow
def test_contexts_kept_between_turns_are_counted_up_to_their_limit():
    native = [override for override in job("rollout.join_turns=false") if not override.startswith("rollout.engine=")]
    one, several = (load_config({}, [*native, f"rollout.max_turns={turns}"]) for turns in (1, 3))
    small = load_config({}, [*native, "rollout.max_turns=3", "rollout.kv_cache_gib=0.00005"])
    cache, both, limited = (plan(config, cpu()).parts["cache"] for config in (one, several, small))
    assert both == 2 * cache
    joining = plan(load_config({}, [*native[:-1], "rollout.max_turns=3"]), cpu()).parts["cache"]
    assert both < joining < both + cache, "rows that join are moved, their prompts are not"
    assert limited == cache + int(0.00005 * 2**30)


def waves(max_batch: int | None) -> Any:
    overrides = [override for override in job() if not override.startswith("rollout.engine=")]
    return load_config({}, overrides if max_batch is None else [*overrides, f"rollout.max_batch={max_batch}"])


@pytest.mark.parametrize("max_batch", [None, 4, 7, 8, 3])
def test_the_planned_passes_are_those_that_a_step_makes(max_batch, monkeypatch):
    """Groups of 4 are sampled whole: 7 slots hold one, and 3 slots cut each in two."""
    prefills, steps = [], []
    prefill, step = SharedPrefixDecoder.prefill, SharedPrefixDecoder.step

    def prefilled(self, prompts, prompt_of, length):
        prefills.append((len(prompts), len(prompt_of)))
        return prefill(self, prompts, prompt_of, length)

    def stepped(self, tokens):
        steps.append(len(tokens))
        return step(self, tokens)

    config = waves(max_batch)
    loaded = build_policy(config)
    run = build_run(config, loaded).run
    monkeypatch.setattr(SharedPrefixDecoder, "prefill", prefilled)
    monkeypatch.setattr(SharedPrefixDecoder, "step", stepped)
    requests = [Request(f"p{i}", (5, 6, i)) for i in range(config.rollout.prompts_per_step)]
    run.engine.generate(requests, SamplingParams.of(config.rollout, ignore_eos=True))
    planned = rollout_passes(config, decoding_traits(config, loaded, cpu()))
    assert planned == RolloutPasses(tuple(prefills), tuple(steps))


@pytest.mark.slow
def test_what_does_not_fit_is_told_how_to(capsys):
    overrides = job("optim.microbatch_tokens=1024", "rollout.max_completion_length=64", "rollout.prompts_per_step=8")
    config = load_config({}, overrides)
    needed = plan(config, cpu()).peak
    memory = 0.8 * needed / 2**30
    tight = find_hardware(f"cpu:{memory}")
    assert not plan(config, tight).fits
    tried = make_it_fit(config, tight)
    assert tried[-1][1].fits
    assert tried[0][0] == ["optim.microbatch_tokens=512"]
    words = ["train", "default", *overrides, "--plan"]
    assert main([*words, "--hardware", f"cpu:{memory}"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "optim.microbatch_tokens=" in shown
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] is True
    assert data["peak"] == max(data["phases"].values())
    assert data["timing"] == "not measured: rollout.engine=lab.plan.test_plan:FullLength is not measured"
    assert data["seconds"] == {}


@pytest.mark.slow
def test_a_gpu_with_less_memory_is_planned_with_the_smaller_passes_that_a_run_makes_there():
    config = load_config({}, job("rollout.max_completion_length=160", "rollout.prompts_per_step=8"))
    roomy = plan(config, KNOWN["a100"])
    held = roomy.parts["weights"] + roomy.parts["reference"] + roomy.parts["workspaces"]
    need = roomy.parts["optimizer"] + roomy.parts["gradients"] + 0.5 * roomy.parts["activations"]
    tight = plan(config, find_hardware(f"a100:{(held + need / 0.8) / 2**30}"))
    assert tight.fits
    assert 256 <= tight.pass_tokens <= 0.5 * roomy.pass_tokens
    assert tight.parts["activations"] < 0.6 * roomy.parts["activations"]


@pytest.mark.slow
def test_a_large_model_is_planned_without_its_weights(tmp_path):
    """A folder with a config and a tokenizer is enough; a 7B shape in bf16 has the weights it should have."""
    LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=2,
        num_attention_heads=32,
        vocab_size=32000,
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = load_config({}, job(f"model.name={tmp_path}", "rollout.engine=native", "rewards=[{name: task}]"))
    found = plan(config, KNOWN["h200"])
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert found.parameters == 2 * layer + 2 * 32000 * 4096 + 4096
    assert found.parts["weights"] == pytest.approx(2 * found.parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "--hardware", "h2000"], "h200"),
        (["--plan", "model.name=./nowhere"], "nowhere"),
        (["--plan", "--hardware", "cpu:0"], "give the memory in GiB after the colon, such as cpu:24"),
        (["--plan", "--hardware", "cpu:much"], "give the memory in GiB"),
        (["--plan", "--prompt-tokens", "0"], "at least one token"),
        (["--plan", "--dry-run"], "trains nothing"),
        (["--plan", "--on", "ray"], "trains nothing"),
        (["--hardware", "h200"], "--hardware needs --plan"),
        (["--json"], "--json needs --plan"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    assert main(["train", "default", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_not_measured_says_why(capsys):
    words = ["train", "default", *job("rollout.engine=native"), "--plan", "--json"]
    for more, said in (
        (["--hardware", "h200"], "not measured: --hardware is given"),
        (["rollout.max_turns=2"], "not measured: rollout.max_turns above 1 is not measured"),
    ):
        assert main([*words, *more]) == 0
        assert json.loads(capsys.readouterr().out)["timing"] == said
    assert obstacle(load_config({}, job("rollout.engine=native")), kind="cpu", fits=False) == "a step does not fit"


@pytest.mark.slow
def test_a_whole_step_is_timed(capsys):
    words = ["train", "default", *job("rollout.engine=native"), "--plan"]
    assert main([*words, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1] == "timing a step of 4 of 4 groups …"
    data = json.loads(shown.out)
    assert data["timing"] == "measured here on random weights, all groups, completions of full length"
    phases = {name: value for name, value in data["seconds"].items() if name != "step"}
    assert all(phases[name] > 0 for name in ("rollout", "score", "update"))
    assert sum(phases.values()) == pytest.approx(data["seconds"]["step"], rel=0.2)  # medians of each
    assert main(words) == 0
    assert "a step: rollout" in capsys.readouterr().out


def test_a_long_step_is_timed_on_some_of_its_groups(monkeypatch):
    """With a clock that counts sampled tokens, the largest number of groups within the limit is taken."""
    config = load_config({}, job("rollout.engine=native", "rollout.prompts_per_step=16", "optim.minibatches=2"))
    sampled = []
    generate = NativeEngine.generate

    def generated(self, requests, sampling, **more):
        rows = generate(self, requests, sampling, **more)
        sampled.append([len(c.tokens) for row in rows for c in row])
        return rows

    def timed(part, state):
        after, metrics, rest = train_step(part, state)
        return Step(after, metrics | {"time/total_s": part.rollout.prompts_per_step}, rest)

    monkeypatch.setattr(NativeEngine, "generate", generated)
    monkeypatch.setattr("keel.lab.plan.show.train_step", timed)
    found = measure(config)
    assert (found.groups, found.of, found.seconds["step"]) == (4, 16, 4)  # 8 groups would take more than 5 s
    assert [len(lengths) for lengths in sampled] == [8, 8, 16, 16]
    assert {length for lengths in sampled for length in lengths} == {24}
