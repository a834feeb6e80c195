"""Drift agrees with a naive computation from the models' own full logits, and is exactly 0 where nothing differs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch

import keel
from keel.base.errors import KeelError
from keel.base.types import Completion
from keel.lab.compare import default_reference, load_pair, measure_drift, read_prompts, resolve
from keel.models.load import load_model
from keel.models.options import LoadedModel
from keel.rollout import Engine, Request, SamplingParams
from keel.rollout.native.engine import NativeEngine
from trainer.small import small_config

MODEL = "trainer.small:small_model"
PROMPTS = ["2+3=", "sort 312 =", "a longer prompt than the others:"]
QUICK: dict[str, Any] = {"samples": 3, "max_tokens": 9}


def small(seed: int) -> LoadedModel:
    return load_model(MODEL, seed=seed, device="cpu")


def naive(policy: LoadedModel, reference: LoadedModel, temperature: float, attempt: int = 0) -> list[list[Any]]:
    """For each prompt, for each completion: (tokens, log π, log p of them, exact KL, exact KL the other way)."""
    tokenizer = policy.tokenizer
    prompts = [tuple(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    requests = [Request(str(i), tokens) for i, tokens in enumerate(prompts, start=1)]
    sampling = SamplingParams(temperature=temperature, max_completion_length=9, num_generations=3)
    drawn = NativeEngine(policy.model, tokenizer).generate(requests, sampling, seed=5, attempt=attempt)
    found = []
    for prompt, completions in zip(prompts, drawn, strict=True):
        found.append([])
        for completion in completions:
            ids = torch.tensor([[*prompt, *completion.tokens]])
            with torch.no_grad():
                pi, p = (
                    torch.log_softmax(side.model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature, -1)
                    for side in (policy, reference)
                )
            tokens = torch.tensor(completion.tokens)
            row = [x.gather(-1, tokens[:, None])[:, 0] for x in (pi, p)]
            kls = [(pi.exp() * (pi - p)).sum(-1), (p.exp() * (p - pi)).sum(-1)]
            found[-1].append((tokens, *row, *kls))
    return found


def clustered(groups: list[list[torch.Tensor]]) -> tuple[float, float]:
    """Mean over all values and its standard error with a prompt as the unit, written out."""
    flat = torch.cat([x for group in groups for x in group])
    mean = flat.mean().item()
    residuals = [sum((x - mean).sum().item() for x in group) for group in groups]
    k = len(groups)
    return mean, math.sqrt(k / (k - 1) * sum(r * r for r in residuals)) / len(flat)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_two_models_agree_with_full_logits(temperature: float) -> None:
    policy, reference = small(0), small(1)
    drift = measure_drift(policy, reference, PROMPTS, temperature=temperature, seed=5, **QUICK)
    assert drift.ref_policy is not None
    assert drift.clustered_by == "prompt"
    cases = ((drift.policy_ref, policy, reference, 0), (drift.ref_policy, reference, policy, 1))
    for direction, sampler, other, attempt in cases:
        groups = naive(sampler, other, temperature, attempt)
        formulas = {
            "k1": lambda pi, p: pi - p,
            "k2": lambda pi, p: (pi - p) ** 2 / 2,
            "k3": lambda pi, p: (p - pi).exp() - 1 - (p - pi),
            "abs": lambda pi, p: (pi - p).abs(),
        }
        values = {name: [[of(c[1], c[2]) for c in g] for g in groups] for name, of in formulas.items()}
        values["exact"] = [[c[3] for c in g] for g in groups]
        assert set(direction.per_token) == set(values)
        for name, found in values.items():
            token, sequence = direction.per_token[name], direction.per_sequence[name]
            assert (token.mean, token.se) == pytest.approx(clustered(found), abs=1e-5)
            sums = [[x.sum()[None] for x in group] for group in found]
            assert (sequence.mean, sequence.se) == pytest.approx(clustered(sums), abs=1e-5)
        back = clustered([[c[4] for c in g] for g in groups])
        assert (direction.other_way.mean, direction.other_way.se) == pytest.approx(back, abs=1e-5)
        assert direction.per_token["exact"].mean > 0.05, "the two models must differ for this to prove anything"


class Fixed(Engine):
    """Answers every prompt by the same tokens, whatever the model."""

    models: ClassVar[list[Any]] = []
    tokens = (5, 6, 7, 8)

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.models.append(model)

    def generate(self, requests: Any, sampling: Any, **noise: int) -> list[list[Completion]]:
        logp = (0.0,) * len(self.tokens)
        one = Completion(self.tokens, (True,) * len(self.tokens), logp, logp, "", "eos")
        return [[one for _ in request.drawn(sampling)] for request in requests]


def test_any_engine_may_sample() -> None:
    """The KL is then of the states that it reached, exactly, and of nothing that it says of itself."""
    policy, reference = small(0), small(1)
    Fixed.models.clear()
    drift = measure_drift(policy, reference, PROMPTS, engine=f"{Fixed.__module__}:Fixed", **QUICK)
    assert Fixed.models == [policy.model, reference.model]
    expected = []
    for prompt in PROMPTS:
        ids = [*policy.tokenizer(prompt)["input_ids"], *Fixed.tokens]
        with torch.no_grad():
            pi, p = (
                torch.log_softmax(side.model(torch.tensor([ids])).logits[0, -5:-1].double(), -1)
                for side in (policy, reference)
            )
        expected.append((pi.exp() * (pi - p)).sum(-1))
    assert drift.policy_ref.sampled_tokens == 3 * 3 * 4
    assert drift.policy_ref.per_token["exact"].mean == pytest.approx(torch.cat(expected).mean().item(), abs=1e-5)


def test_positions_tokens_and_the_largest_agree_with_full_logits() -> None:
    policy, reference = small(0), small(1)
    direction = measure_drift(policy, reference, PROMPTS, seed=5, reverse_samples=False, **QUICK).policy_ref
    groups = naive(policy, reference, 1.0)
    completions = [c for group in groups for c in group]
    total = sum(c[3].sum().item() for c in completions)
    for place in direction.positions:
        at = place.first - 1
        here = [[c[3][at : at + 1] for c in g if len(c[3]) > at] for g in groups]
        assert place.count == sum(len(x) for g in here for x in g)
        assert place.exact.mean == pytest.approx(torch.cat([x for g in here for x in g]).mean().item(), abs=1e-5)
        if all(here):
            assert place.exact.se == pytest.approx(clustered(here)[1], abs=1e-5)
    assert (
        sum(p.count for p in direction.positions) == sum(p.count for p in direction.bands) == direction.sampled_tokens
    )
    assert [(b.first, b.last) for b in direction.bands] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 9)]
    assert sum(b.share for b in direction.bands) == pytest.approx(1)
    assert direction.bands[2].share * total == pytest.approx(sum(c[3][2:4].sum().item() for c in completions), abs=1e-4)

    every = {}
    for tokens, pi, p, *_ in completions:
        for token, u in zip(tokens.tolist(), (pi - p).tolist(), strict=True):
            every.setdefault(token, []).append(u)
    k3 = {token: sum(math.exp(-u) - 1 + u for u in us) for token, us in every.items()}
    assert {t.id for t in direction.tokens} == set(every)
    for found in direction.tokens:
        assert found.count == len(every[found.id])
        assert found.log_ratio == pytest.approx(sum(every[found.id]) / found.count, abs=1e-5)
        assert found.share == pytest.approx(k3[found.id] / sum(k3.values()), abs=1e-5)
        assert found.text == policy.tokenizer.decode([found.id])
    assert [t.share for t in direction.tokens] == sorted((t.share for t in direction.tokens), reverse=True)

    worst = max(completions, key=lambda c: c[3].sum().item())
    assert direction.largest.exact == pytest.approx(worst[3].tolist(), abs=1e-5)
    assert direction.largest.log_ratio == pytest.approx((worst[1] - worst[2]).tolist(), abs=1e-5)
    assert direction.largest.tokens == tuple(policy.tokenizer.decode([t]) for t in worst[0].tolist())


def test_one_token_needs_no_luck() -> None:
    """At the first token the exact KL has no sampling error, and k1 and k3 come to it as samples grow."""
    drift = measure_drift(small(0), small(1), ["2+3="], samples=2000, max_tokens=1)
    for direction in (drift.policy_ref, drift.ref_policy):
        assert direction is not None
        exact = direction.per_token["exact"]
        assert exact.se == pytest.approx(0, abs=1e-7)
        for name in ("k1", "k3"):
            estimate = direction.per_token[name]
            assert estimate.se is not None
            assert abs(estimate.mean - exact.mean) < 4 * estimate.se
    assert drift.clustered_by == "completion"
    assert drift.ref_policy is not None
    assert drift.policy_ref.other_way.mean == pytest.approx(drift.ref_policy.per_token["exact"].mean, abs=1e-6)


def everything(drift: Any) -> list[float]:
    """Every mean, error, log-ratio and share of a drift."""
    found = []
    for direction in (drift.policy_ref, drift.ref_policy):
        estimates = [*direction.per_token.values(), *direction.per_sequence.values(), direction.other_way]
        estimates += [p.exact for p in direction.positions]
        found += [x for e in estimates for x in (e.mean, e.se or 0.0)]
        found += [t.log_ratio for t in direction.tokens] + [t.share for t in direction.tokens]
    return found


def save(loaded: LoadedModel, folder: Path) -> str:
    loaded.model.save_pretrained(str(folder))
    loaded.tokenizer.save_pretrained(str(folder))
    return str(folder)


def save_adapter(base: str, folder: Path, seed: int, targets: Any = ("q_proj", "down_proj")) -> tuple[str, str]:
    """An adapter whose B is not 0, and the same merged into a model of its own."""
    loaded = load_model(base, device="cpu", lora={"r": 4, "targets": list(targets)}, seed=seed)
    with torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    loaded.model.save_pretrained(str(folder / "adapter"))
    merged = loaded.model.merge_and_unload()
    merged.save_pretrained(str(folder / "merged"))
    loaded.tokenizer.save_pretrained(str(folder / "merged"))
    return str(folder / "adapter"), str(folder / "merged")


@pytest.mark.filterwarnings("ignore:.*:UserWarning:peft")  # it says that an adapter on a tied head is unusual
def test_a_model_against_itself_is_exactly_zero(tmp_path: Path) -> None:
    first = save(small(3), tmp_path / "a")
    shutil.copytree(first, tmp_path / "b")
    adapter, _ = save_adapter(first, tmp_path / "lora", 0, ("q_proj", "lm_head"))
    shutil.copytree(adapter, tmp_path / "copy")
    for policy, reference in ((first, str(tmp_path / "b")), (first, first), (adapter, str(tmp_path / "copy"))):
        drift = measure_drift(policy, reference, PROMPTS, temperature=0.8, **QUICK)
        assert set(everything(drift)) == {0.0}


@pytest.mark.slow
def test_adapters_agree_with_merged_models_and_share_their_base(tmp_path: Path) -> None:
    base = save(small(0), tmp_path / "base")
    one, one_merged = save_adapter(base, tmp_path / "one", 1)
    two, two_merged = save_adapter(base, tmp_path / "two", 2, ("q_proj", "v_proj"))
    for (policy, reference), (plain_policy, plain_reference) in (
        ((one, base), (one_merged, base)),
        ((base, one), (base, one_merged)),
        ((one, two), (one_merged, two_merged)),
    ):
        first, second = load_pair(resolve(policy), resolve(reference))
        assert first.loaded is second.loaded
        drift = measure_drift(first, second, PROMPTS, **QUICK)
        plain = measure_drift(plain_policy, plain_reference, PROMPTS, **QUICK)
        assert everything(drift) == pytest.approx(everything(plain), abs=1e-4)
        assert drift.policy_ref.per_token["exact"].mean == pytest.approx(
            plain.policy_ref.per_token["exact"].mean, abs=1e-5
        )
        assert drift.policy_ref.per_token["exact"].mean > 0.01
    source = resolve(one)
    assert default_reference(source).base == base
    assert default_reference(source).adapter is None


def test_an_adapter_takes_the_base_that_is_given(tmp_path: Path) -> None:
    base = save(small(0), tmp_path / "base")
    adapter, _ = save_adapter(base, tmp_path / "one", 1)
    moved = shutil.move(base, tmp_path / "moved")
    assert resolve(adapter, base=str(moved)).base == str(moved)
    config = Path(adapter) / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(KeelError, match="does not name its base model: give it with --base"):
        resolve(adapter)
    assert isinstance(load_pair(resolve(adapter, base=str(moved)), resolve(str(moved)))[0].loaded.model, peft.PeftModel)


@pytest.mark.parametrize(
    "wrong",
    [{"r": [1]}, {"target_modules": 5}, {"target_modules": [1]}, None],
    ids=["r", "a number", "a list", "weights"],
)
def test_a_damaged_second_adapter_is_one_line(tmp_path: Path, wrong: dict[str, Any] | None) -> None:
    base = save(small(0), tmp_path / "base")
    first, _ = save_adapter(base, tmp_path / "one", 1)
    second = Path(shutil.copytree(first, tmp_path / "two"))
    config = second / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **(wrong or {})}))
    if wrong is None:
        (second / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(KeelError, match="two") as error:
        load_pair(resolve(first), resolve(str(second)))
    assert "\n" not in str(error.value)


def test_microbatches_and_waves_change_nothing() -> None:
    policy, reference = small(0), small(1)
    whole = measure_drift(policy, reference, PROMPTS, **QUICK)
    pieces = measure_drift(policy, reference, PROMPTS, microbatch_tokens=24, max_batch=2, **QUICK)
    assert everything(pieces) == pytest.approx(everything(whole), abs=1e-5)


def test_one_completion_has_no_error_of_its_sum() -> None:
    drift = measure_drift(small(0), small(1), ["2+3="], samples=1, max_tokens=6)
    assert drift.clustered_by == "token"
    assert drift.policy_ref.per_sequence["exact"].se is None
    assert drift.policy_ref.per_token["exact"].se is not None
    assert json.loads(json.dumps(drift.as_dict(), allow_nan=False))["policy_ref"]["per_sequence"]["k1"]["se"] is None


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_against_its_own_start(tmp_path: Path, lora: bool) -> None:
    extra = ["model.lora.r=4"] if lora else ["warmstart.steps=2", "warmstart.batch_size=4"]
    config = small_config(f"run.dir={tmp_path}", "run.max_steps=2", "checkpoint.every=1", *extra)
    run = keel.train(config).directory
    policy = resolve(str(run))
    reference = default_reference(policy)
    assert (policy.name, reference.name) == (f"{run}@2", f"{run}@start")
    sides = load_pair(policy, reference)
    assert (sides[0].loaded is sides[1].loaded) == lora
    moved = measure_drift(*sides, ["1:0="], **QUICK).policy_ref.per_token["exact"].mean
    assert moved > 0
    by_name = measure_drift(str(run / "checkpoints" / "step-2"), f"{run}@start", ["1:0="], **QUICK)
    assert by_name.policy_ref.per_token["exact"].mean == moved
    earlier = measure_drift(f"{run}@1", f"{run}@start", ["1:0="], **QUICK).policy_ref.per_token["exact"].mean
    assert 0 < earlier != moved
    assert set(everything(measure_drift(f"{run}@start", f"{run}@start", PROMPTS, **QUICK))) == {0.0}


def test_prompts_of_a_file(tmp_path: Path) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\ntwo\n")
    assert [(p.key, p.prompt) for p in read_prompts(text)] == [("1", "one"), ("3", "two")]
    text.write_bytes("\ufeffone\u2028still one\r\ntwo".encode())
    assert [(p.key, p.prompt) for p in read_prompts(text)] == [("1", "one\u2028still one"), ("2", "two")]
    messages = [{"role": "user", "content": "hi"}]
    lines.write_text(json.dumps({"prompt": "one"}) + "\n" + json.dumps({"prompt": messages}) + "\n")
    assert [p.prompt for p in read_prompts(lines)] == ["one", messages]
    others = {
        "p.csv": "question,answer\none,1\ntwo,2\n",
        "p.json": '[{"problem": "one"}, {"problem": "two"}]',
        "chats.jsonl": "".join(
            json.dumps({"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "x"}]}) + "\n"
            for said in ("one", "two")
        ),
    }
    for name, content in others.items():
        (tmp_path / name).write_text(content)
        found = [p.prompt for p in read_prompts(tmp_path / name)]
        asked = [said if isinstance(said, str) else said[0]["content"] for said in found]
        assert asked == ["one", "two"], name
    (tmp_path / "p.py").write_text("one\n")
    with pytest.raises(KeelError, match=r"unknown file type '\.py', use one of \.txt, \.jsonl"):
        read_prompts(tmp_path / "p.py")
    drift = measure_drift(small(0), small(0), read_prompts(lines), samples=1, max_tokens=2)
    assert drift.prompts == 2
