"""Every kind of reference, over full weights and LoRA: exact at step 0, moves as its formula says, restores itself."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.models import LoadedModel, fingerprint, load_model
from keel.models.head import frozen_head
from keel.models.pack import pack
from keel.models.scorer import hidden_states, score_tokens
from keel.models.tiny import tiny_config, tiny_tokenizer
from keel.reference.kinds import KINDS, build_reference, check_reference
from keel.reference.weights import OffloadedTensors

LORA = {"r": 3, "alpha": 5, "targets": ["q_proj", "down_proj"]}
SMALL = f"{__name__}:small"
SETUPS = ["full", "fresh", "continued"]


def small(seed: int) -> tuple[nn.Module, Any]:
    """A Llama of two narrow layers: these tests build hundreds."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(tokenizer)
    config.update({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config), tokenizer


def randomise(model: nn.Module, seed: int) -> None:
    """What an optimizer step does to the trainable weights, only larger."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def load(setup: str, adapter: Path) -> LoadedModel:
    if setup == "full":
        return load_model(SMALL, device="cpu")
    if setup == "fresh":
        return load_model(SMALL, device="cpu", lora=LORA)
    return load_model(SMALL, device="cpu", lora={"adapter": str(adapter)})


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved adapter that is not zero, to be continued."""
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    first: Any = load_model(SMALL, device="cpu", lora=LORA).model
    randomise(first, 1)
    first.save_pretrained(folder)
    return folder


def tokens() -> Tensor:
    return torch.randint(5, 119, (2, 11), generator=torch.Generator().manual_seed(3))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens()).logits


def reference_logits(reference: Any) -> Tensor:
    with reference.model() as model:
        return logits(model)


def cases() -> list[tuple[str, str]]:
    return [(kind, setup) for kind in KINDS for setup in SETUPS if (kind, setup) != ("adapter_off", "full")]


PARAMS: dict[str, dict[str, Any]] = {"ema": {"alpha": 0.25, "every": 2}, "snapshot": {"every": 2}}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("kind", "setup"), cases())
def test_the_kl_is_exactly_zero_at_step_0_and_the_policy_is_untouched(
    kind: str, setup: str, offload: bool, adapter: Path
) -> None:
    loaded = load(setup, adapter)
    before, mark = logits(loaded.model), fingerprint(loaded.model)
    trainable = {name for name, p in loaded.model.named_parameters() if p.requires_grad}
    state = torch.get_rng_state()
    reference = build_reference(kind, loaded, offload=offload, **PARAMS.get(kind, {}))
    assert torch.equal(reference_logits(reference), before)
    assert torch.equal(logits(loaded.model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert fingerprint(loaded.model) == mark
    assert {name for name, p in loaded.model.named_parameters() if p.requires_grad} == trainable


@pytest.mark.parametrize(("kind", "setup"), cases())
def test_training_the_policy_does_not_move_what_is_held(kind: str, setup: str, adapter: Path) -> None:
    loaded = load(setup, adapter)
    before = logits(loaded.model)
    reference = build_reference(kind, loaded, **PARAMS.get(kind, {}))
    mark = reference.fingerprint()
    randomise(loaded.model, 2)
    assert not reference.update(loaded.model, 1, measured_kl=0.01)
    assert torch.equal(reference_logits(reference), before)
    assert reference.fingerprint() == mark
    assert (logits(loaded.model) - before).abs().max() > 1e-2


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("kind", ["snapshot", "kl_triggered"])
def test_a_snapshot_is_the_policy_of_that_step(kind: str, setup: str, adapter: Path) -> None:
    loaded = load(setup, adapter)
    reference = build_reference(kind, loaded, **PARAMS.get(kind, {}))
    randomise(loaded.model, 2)
    then, mark = logits(loaded.model), fingerprint(loaded.model)
    assert not reference.update(loaded.model, 1, measured_kl=float("nan"))
    assert reference.update(loaded.model, 2, measured_kl=0.3)
    assert reference.fingerprint() == mark
    randomise(loaded.model, 4)
    assert torch.equal(reference_logits(reference), then)


def effective(model: Any) -> dict[str, Tensor]:
    """The dense weights W + sBA of every layer, by peft's own merge."""
    merged = copy.deepcopy(model)
    merged = merged.merge_and_unload() if hasattr(merged, "merge_and_unload") else merged
    return {name: p.detach().clone() for name, p in merged.named_parameters()}


@pytest.mark.parametrize("setup", SETUPS)
def test_an_ema_is_the_average_of_the_effective_weights(setup: str, adapter: Path) -> None:
    loaded = load(setup, adapter)
    plain = load_model(SMALL, device="cpu").model
    average = effective(loaded.model)
    reference = build_reference("ema", loaded, alpha=0.25, every=2)
    for step in range(1, 7):
        randomise(loaded.model, step)
        assert reference.update(loaded.model, step) == (step % 2 == 0)
        if step % 2 == 0:
            now = effective(loaded.model)
            average = {name: 0.25 * now[name] + 0.75 * held for name, held in average.items()}
    plain.load_state_dict(average, strict=False)
    torch.testing.assert_close(reference_logits(reference), logits(plain), atol=2e-5, rtol=1e-4)


def gpt2(seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=119, n_embd=16, n_layer=2, n_head=2)), tiny_tokenizer()


def test_an_ema_over_transposed_weights() -> None:
    """GPT-2's Conv1D keeps W as [in, out]."""
    loaded = load_model(f"{__name__}:gpt2", device="cpu", lora={"r": 2, "targets": ["c_attn", "c_fc"]})
    start = effective(loaded.model)
    reference = build_reference("ema", loaded, alpha=0.25, every=1)
    randomise(loaded.model, 1)
    assert reference.update(loaded.model, 1)
    plain = load_model(f"{__name__}:gpt2", device="cpu").model
    now = effective(loaded.model)
    plain.load_state_dict({name: 0.25 * now[name] + 0.75 * held for name, held in start.items()}, strict=False)
    torch.testing.assert_close(reference_logits(reference), logits(plain), atol=1e-5, rtol=1e-4)


def test_an_ema_of_what_is_no_matrix_on_the_input_is_refused() -> None:
    loaded = load_model(SMALL, device="cpu", lora={"r": 2, "targets": ["embed_tokens", "q_proj"]})
    with pytest.raises(KeelError, match="snapshot"):
        build_reference("ema", loaded)
    randomise(loaded.model, 1)
    before = logits(loaded.model)
    reference = build_reference("snapshot", loaded)
    randomise(loaded.model, 2)
    assert torch.equal(reference_logits(reference), before)


def test_layers_trained_whole_beside_an_adapter_are_held_too() -> None:
    base = load_model(SMALL, device="cpu")
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM")
    loaded = replace(base, model=get_peft_model(base.model, config))
    before = logits(loaded.model)
    reference = build_reference("auto", loaded)
    randomise(loaded.model, 2)
    assert (logits(loaded.model) - before).abs().max() > 1e-2
    assert torch.equal(reference_logits(reference), before)


def test_an_average_of_a_and_b_apart_would_be_something_else(adapter: Path) -> None:
    """The reason for dense deltas, in numbers: mean(B) mean(A) is far from mean(BA)."""
    loaded = load("fresh", adapter)
    reference = build_reference("ema", loaded, alpha=0.5, every=1)
    naive = copy.deepcopy(loaded.model)
    randomise(loaded.model, 1)
    reference.update(loaded.model, 1)
    with torch.no_grad():
        for held, now in zip(naive.parameters(), loaded.model.parameters(), strict=True):
            held.lerp_(now, 0.5)
    assert (reference_logits(reference) - logits(naive)).abs().max() > 1e-3


def test_a_bf16_average_does_not_stall() -> None:
    loaded = load_model(SMALL, device="cpu", dtype="bf16")
    reference = build_reference("ema", loaded, alpha=0.001, every=1)
    start = next(loaded.model.parameters()).detach().float()
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.5)
    for step in range(1, 21):
        reference.update(loaded.model, step)
    with reference.model() as model:
        moved = next(model.parameters()).float()
    # 1 + 0.5 (1 − 0.999²⁰) = 1.0099: 2 or 3 steps of bf16, each of 20 updates below one
    torch.testing.assert_close(moved, start * 1.0099, rtol=2**-8, atol=0)
    assert (moved != start).float().mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("kind", "setup"), cases())
def test_a_reference_restores_itself_into_a_new_process(kind: str, setup: str, offload: bool, adapter: Path) -> None:
    loaded = load(setup, adapter)
    randomise(loaded.model, 7)  # as a warm start would: the reference is not what the files hold
    reference = build_reference(kind, loaded, **PARAMS.get(kind, {}))
    for step in (1, 2):
        randomise(loaded.model, step)
        reference.update(loaded.model, step, measured_kl=0.3)
    expected = reference_logits(reference)
    buffer = io.BytesIO()
    torch.save(reference.state_dict(), buffer)
    buffer.seek(0)

    again = load(setup, adapter)
    restored = build_reference(kind, again, offload=offload, **PARAMS.get(kind, {}))
    restored.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(reference_logits(restored), expected)
    assert restored.fingerprint() == reference.fingerprint()
    assert torch.equal(logits(again.model), logits(load(setup, adapter).model))


@pytest.mark.parametrize(("kind", "setup"), cases())
def test_a_wrong_fingerprint_is_refused(kind: str, setup: str, adapter: Path) -> None:
    loaded = load(setup, adapter)
    reference = build_reference(kind, loaded, **PARAMS.get(kind, {}))
    state = reference.state_dict()
    with pytest.raises(KeelError, match="fingerprint"):
        reference.load_state_dict({**state, "fingerprint": "0" * 32})
    for step in (1, 2):
        randomise(loaded.model, step)
        reference.update(loaded.model, step, measured_kl=0.3)
    now, mark = reference_logits(reference), reference.fingerprint()
    with pytest.raises(KeelError, match="fingerprint"):
        reference.load_state_dict({**state, "fingerprint": "0" * 32})
    assert reference.fingerprint() == mark  # a refused state has changed nothing
    assert torch.equal(reference_logits(reference), now)


def test_another_base_model_is_refused() -> None:
    state = build_reference("auto", load_model(SMALL, device="cpu", lora=LORA)).state_dict()
    other = build_reference("auto", load_model(SMALL, device="cpu", lora=LORA, seed=1))
    with pytest.raises(KeelError, match="base model"):
        other.load_state_dict(state)


def test_another_kind_is_refused() -> None:
    loaded = load_model(SMALL, device="cpu")
    with pytest.raises(KeelError, match="snapshot"):
        build_reference("frozen", loaded).load_state_dict(build_reference("snapshot", loaded).state_dict())


@pytest.mark.parametrize("kind", ["adapter_off", "ema", "snapshot"])
@pytest.mark.parametrize("setup", ["fresh", "continued"])
def test_an_error_inside_the_context_leaves_the_policy_whole(kind: str, setup: str, adapter: Path) -> None:
    loaded = load(setup, adapter)
    model: Any = loaded.model
    frozen_one = next(p for p in model.parameters() if p.requires_grad)
    frozen_one.requires_grad_(False)  # a flag that peft would flip back on by itself
    model.train()
    reference = build_reference(kind, loaded, **PARAMS.get(kind, {}))
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    randomise(model, 2)
    reference.update(model, 2)
    before, active = logits(model), list(model.active_adapters)

    def fail() -> None:
        with reference.model() as inside:
            assert not inside.training
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(logits(model), before)
    assert list(model.active_adapters) == active
    assert model.training
    assert torch.is_grad_enabled()
    after = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: after[name] for name in flags} == flags
    assert not any(flag for name, flag in after.items() if name not in flags)


@pytest.mark.parametrize("kind", ["adapter_off", "ema", "snapshot"])
def test_scoring_the_reference_between_forward_and_backward_leaves_the_gradient_alone(kind: str, adapter: Path) -> None:
    def gradients(visit: bool) -> list[Tensor]:
        loaded = load("continued", adapter)
        reference = build_reference(kind, loaded, **PARAMS.get(kind, {}))
        randomise(loaded.model, 2)
        loss = loaded.model(input_ids=tokens()).logits.logsumexp(-1).sum()
        if visit:
            reference_logits(reference)
        loss.backward()
        return [p.grad for p in loaded.model.parameters() if p.grad is not None]

    plain, visited = gradients(False), gradients(True)
    assert len(plain) == len(visited) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, visited, strict=True))


def test_fresh_lora_holds_nothing_and_a_continued_adapter_holds_one_more(adapter: Path) -> None:
    fresh, continued = load("fresh", adapter), load("continued", adapter)
    assert build_reference("auto", fresh).state_dict()["weights"] == {}
    reference = build_reference("auto", continued)
    assert reference.kind == "adapter_off"
    assert list(continued.model.peft_config) == ["default", "reference"]  # type: ignore[arg-type]
    assert reference.fingerprint() == fingerprint(continued.model)
    assert build_reference("auto", load("full", adapter)).kind == "frozen"


def test_lora_dropout_is_off_in_the_reference() -> None:
    loaded = load_model(SMALL, device="cpu", lora={**LORA, "dropout": 0.5})
    randomise(loaded.model, 1)
    assert loaded.model.training
    reference = build_reference("auto", loaded)
    assert torch.equal(reference_logits(reference), reference_logits(reference))
    assert not torch.equal(logits(loaded.model), logits(loaded.model))


def test_parameters_are_checked_before_a_model_is_needed() -> None:
    check_reference("ema", alpha=0.5)
    with pytest.raises(KeelError, match="every"):
        check_reference("ema", evry=3)
    with pytest.raises(KeelError, match="did you mean 'snapshot'"):
        check_reference("snapshots")
    loaded = load_model(SMALL, device="cpu")
    for kind, params in [("ema", {"alpha": 0.0}), ("snapshot", {"every": 0}), ("kl_triggered", {"threshold": 0.0})]:
        with pytest.raises(KeelError, match=r"reference\."):
            build_reference(kind, loaded, **params)
    with pytest.raises(KeelError, match="needs LoRA"):
        build_reference("adapter_off", loaded)


def test_all_but_the_head_is_offloaded() -> None:
    loaded = load_model(SMALL, device="cpu")
    reference: Any = build_reference("frozen", loaded, offload=True)
    offloaded = reference._weights._offloaded
    head = loaded.model.lm_head.weight  # type: ignore[union-attr]
    total = sum(p.numel() for p in loaded.model.parameters())
    assert sum(t.numel() for t, _ in offloaded.pairs if isinstance(t, nn.Parameter)) == total - head.numel()  # type: ignore[operator]
    assert torch.equal(reference_logits(reference), logits(loaded.model))


def test_the_optimizer_flag_reaches_the_caller() -> None:
    loaded = load_model(SMALL, device="cpu")
    assert build_reference("snapshot", loaded, every=5, reset_optimizer=True).reset_optimizer
    assert not build_reference("snapshot", loaded, every=5).reset_optimizer


def my_reference(loaded: LoadedModel, *, offload: bool = False) -> Any:
    return build_reference("frozen", loaded, offload=offload)


def test_a_users_own_factory() -> None:
    name = f"{__name__}:my_reference"
    assert build_reference(name, load_model(SMALL, device="cpu"), offload=True).kind == "frozen"
    with pytest.raises(KeelError, match="offload"):
        check_reference(name, offlod=True)


@pytest.mark.parametrize(
    ("kind", "name", "value", "expected"),
    [
        ("ema", "alpha", 0, "a number in (0, 1]"),
        ("ema", "alpha", True, "a number in (0, 1]"),
        ("ema", "every", 0, "a whole number of steps, at least 1"),
        ("snapshot", "every", 1.5, "a whole number of steps, at least 1"),
        ("kl_triggered", "threshold", "much", "a positive number of nats per token"),
        ("frozen", "offload", 1, "true or false"),
        ("auto", "offload", 1, "true or false"),
    ],
)
def test_ranges_are_refused_before_a_model_is_needed(kind: str, name: str, value: Any, expected: str) -> None:
    with pytest.raises(KeelError) as caught:
        check_reference(kind, **{name: value})
    assert str(caught.value) == f"reference.{name} is {value!r}: expected {expected}"


def one_group() -> Group:
    def completion(row: Tensor) -> Completion:
        drawn = tuple(row[5:].tolist())
        zeros = (0.0,) * len(drawn)
        return Completion(drawn, (True,) * len(drawn), zeros, zeros, "", "length")

    return Group(Problem("p", ""), tuple(tokens()[0, :5].tolist()), tuple(completion(row) for row in tokens()))


def plain_logp(model: nn.Module, group: Group) -> Tensor:
    """Log-probabilities of all words at each completion's tokens, by a plain forward each."""
    rows = []
    for completion in group.completions:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*group.prompt_tokens, *completion.tokens]])).logits[0]
        rows.append(logits[len(group.prompt_tokens) - 1 : -1].log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("moves", [0, 1, 2])
@pytest.mark.parametrize("kind", ["adapter_off", "frozen", "ema", "snapshot", "kl_triggered"])
def test_the_exact_kl_against_each_kind_with_an_adapter_on_the_head(kind: str, moves: int) -> None:
    loaded = load_model(SMALL, device="cpu", lora={**LORA, "targets": ["q_proj", "lm_head"]})
    params = {"ema": {"alpha": 0.25, "every": 1}, "snapshot": {"every": 1}}.get(kind, {})
    reference = build_reference(kind, loaded, **params)
    for step in range(1, moves + 1):
        randomise(loaded.model, step)
        reference.update(loaded.model, step, measured_kl=0.3)
    group = one_group()
    packed = pack([group], loaded.pad_id)
    with reference.model() as model:
        ref_hidden, ref_head = hidden_states(model, packed), frozen_head(model)
        q = plain_logp(model, group)
    scores = score_tokens(loaded.model, packed, exact_kl=True, ref_hidden=ref_hidden, ref_head=ref_head)
    assert moves or scores.exact_kl.abs().max() < 1e-7
    randomise(loaded.model, 9)
    p = plain_logp(loaded.model, group)
    scores = score_tokens(loaded.model, packed, exact_kl=True, ref_hidden=ref_hidden, ref_head=ref_head)
    expected = (p.exp() * (p - q)).sum(-1)
    assert expected.mean() > 1e-3
    torch.testing.assert_close(scores.exact_kl, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_adapters_that_train_the_base_are_refused(bias: Any, tmp_path: Path) -> None:
    """Their biases live in the base that policy and reference share: a "frozen" reference would move."""
    base = load_model(f"{__name__}:gpt2", device="cpu")
    config = LoraConfig(r=2, target_modules=["c_attn"], bias=bias, task_type="CAUSAL_LM", fan_in_fan_out=True)
    loaded = replace(base, model=get_peft_model(base.model, config))
    for kind in KINDS:
        with pytest.raises(KeelError, match="bias='none'"):
            build_reference(kind, loaded)
    loaded.model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(KeelError, match="bias='none'"):
        load_model(f"{__name__}:gpt2", device="cpu", lora={"adapter": str(tmp_path)})


def test_a_device_too_full_for_a_visit_leaves_all_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    offloaded = OffloadedTensors(tensors)
    resting = [tensor.data_ptr() for tensor in tensors]

    def to(tensor: Tensor, device: torch.device) -> Tensor:
        if len(tensor) == 3:
            raise torch.OutOfMemoryError
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", to)
    with pytest.raises(torch.OutOfMemoryError), offloaded.on_device():
        pass
    assert [tensor.data_ptr() for tensor in tensors] == resting


def test_a_switch_of_adapters_that_fails_leaves_the_policy_active(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load("continued", adapter)
    model: Any = loaded.model
    reference = build_reference("auto", loaded)
    randomise(model, 2)
    before, switch = logits(model), type(model).set_adapter

    def fail(self: Any, name: str, **options: Any) -> None:
        switch(self, name, **options)
        if name == "reference":
            raise ZeroDivisionError

    monkeypatch.setattr(type(model), "set_adapter", fail)
    with pytest.raises(ZeroDivisionError):
        reference_logits(reference)
    assert list(model.active_adapters) == ["default"]
    assert torch.equal(logits(model), before)


def buffered(seed: int) -> tuple[nn.Module, Any]:
    """A model with state that is no parameter."""
    model, tokenizer = small(seed)
    model.register_buffer("steps", torch.tensor(0))
    model.register_buffer("running", torch.zeros(2))
    return model, tokenizer


def test_buffers_of_the_state_are_held_averaged_and_restored() -> None:
    loaded = load_model(f"{__name__}:buffered", device="cpu")
    model: Any = loaded.model
    copied, average = build_reference("snapshot", loaded, every=1), build_reference("ema", loaded, every=1, alpha=0.5)
    model.steps += 4
    model.running += 4
    for reference in (copied, average):
        reference.update(model, 1)
    assert copied.fingerprint() == fingerprint(model)
    with average.model() as held:
        assert (int(held.steps), held.running.tolist()) == (4, [2.0, 2.0])  # type: ignore[arg-type, operator, union-attr]
    again = build_reference("ema", load_model(f"{__name__}:buffered", device="cpu"), every=1, alpha=0.5)
    again.load_state_dict(average.state_dict())
    assert again.fingerprint() == average.fingerprint()
