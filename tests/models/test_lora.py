"""LoRA: fresh and continued adapters, and the bfloat16 forward, which is as close to fp32 as peft's own."""

from __future__ import annotations

import json
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.models import fuse, load_model
from keel.models import lora as lora_module
from keel.models.fuse import replace_forward
from keel.models.lora import adapter_is_zero, lora_forward, low_rank, trial_adapters

IDS = torch.tensor([[5, 40, 60, 7, 9]])


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_a_fresh_adapter_changes_nothing_and_is_all_that_trains() -> None:
    plain, model = load_model("tiny", device="cpu").model, load_model("tiny", device="cpu", lora={"r": 4}).model
    assert torch.equal(logits(model), logits(plain))
    assert adapter_is_zero(model)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    # 7 linear layers a block, the head left out
    assert len([name for name in trainable if "lora_A" in name]) == 4 * 7


def test_equal_seeds_give_equal_adapters() -> None:
    state = torch.get_rng_state()
    a, b, c = (load_model("tiny", device="cpu", lora={"r": 2}, seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    name = next(name for name, _ in a.named_parameters() if "lora_A" in name)
    assert torch.equal(a.get_parameter(name), b.get_parameter(name))
    assert not torch.equal(a.get_parameter(name), c.get_parameter(name))


def test_continuing_an_adapter(tmp_path: Path) -> None:
    first: Any = load_model(
        "tiny", device="cpu", lora={"r": 3, "alpha": 9, "dropout": 0.1, "targets": ["q_proj"]}
    ).model
    with torch.no_grad():
        for parameter in first.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    first.eval()
    first.save_pretrained(tmp_path)
    again = load_model("tiny", device="cpu", lora={"adapter": str(tmp_path)})
    assert torch.equal(logits(again.model), logits(first))
    assert not adapter_is_zero(again.model)
    assert again.lora is not None
    assert (again.lora.r, again.lora.alpha, again.lora.targets) == (3, 9, ("q_proj",))
    assert [p.shape for p in again.model.parameters() if p.requires_grad] == [
        p.shape for p in first.parameters() if p.requires_grad
    ]
    # dropout that the adapter was trained with is off unless asked for again
    again.model.train()
    assert torch.equal(logits(again.model), logits(again.model))


def test_dropout_that_was_asked_for_is_there() -> None:
    model = load_model("tiny", device="cpu", lora={"r": 3, "dropout": 0.5}).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert model.training
    assert not torch.equal(logits(model), logits(model))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 4}, "unknown option model.lora.rank"),
        ({"r": 0}, "lora.r is 0"),
        ({"dropout": 1.0}, "lora.dropout"),
        ({"targets": ["no_such_layer"]}, "no_such_layer"),
        ({"adapter": "nowhere/adapter"}, "no adapter at"),
    ],
)
def test_bad_settings_are_one_line(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        load_model("tiny", device="cpu", lora=lora)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"r": 5}, {"r": [1]}, {"target_modules": 5}, None],
    ids=["another rank", "a list as rank", "a number as modules", "no weights"],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, wrong: dict[str, Any] | None) -> None:
    model: Any = load_model("tiny", device="cpu", lora={"r": 2}).model
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **(wrong or {})}))
    if wrong is None:
        (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(KeelError, match=str(tmp_path)) as caught:
        load_model("tiny", device="cpu", lora={"adapter": str(tmp_path)})
    assert "\n" not in str(caught.value)


class Two(nn.Module):
    def __init__(self, inside: int, out: int, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inside, out, bias=bias), nn.Linear(out, inside, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.silu(self.first(x)))


def adapted(inside: int = 48, out: int = 80, *, bias: bool = False, seed: int = 0, **config: Any) -> Any:
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 12, "target_modules": ["first", "second"], "init_lora_weights": False} | config
    return get_peft_model(Two(inside, out, bias), LoraConfig(**options))  # type: ignore[arg-type]


def fused(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            replace_forward(module, lora_forward)
    return model


def in_bfloat16(model: Any) -> Any:
    """The base in bfloat16 and adapters in fp32, as peft loads them."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    return model


def gradients(model: Any, x: Tensor, weights: Tensor, *, autocast: bool = False) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = model(x)
    (y.float() * weights).sum().backward()
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return found | {"x": x.grad.double(), "y": y.detach().double()}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (64,)])
@pytest.mark.parametrize("seed", range(3))
def test_errors_are_those_of_peft(seed: int, shape: tuple[int, ...], bias: bool, autocast: bool) -> None:
    exact = adapted(bias=bias, seed=seed)
    rounded = deepcopy(exact) if autocast else in_bfloat16(deepcopy(exact))
    if not autocast:  # the truth is of the rounded weights
        exact.load_state_dict(rounded.state_dict())
    x, weights = torch.randn(*shape, 48), torch.randn(*shape, 48)
    x = x if autocast else x.bfloat16()
    truth = gradients(exact, x.float(), weights)
    theirs = gradients(deepcopy(rounded), x, weights, autocast=autocast)
    mine = gradients(fused(deepcopy(rounded)), x, weights, autocast=autocast)
    assert mine.keys() == theirs.keys() == truth.keys()
    assert sum("lora_" in name for name in mine) == 4
    for name, expected in truth.items():
        size = float(expected.norm())
        errors = [float((found[name] - expected).norm()) / size for found in (mine, theirs)]
        assert errors[0] <= max(1.5 * errors[1], 0.012), (name, errors)


def test_fresh_adapters_leave_every_bit_as_it_is() -> None:
    model = in_bfloat16(adapted(init_lora_weights=True))
    x = torch.randn(33, 48).bfloat16()
    with torch.no_grad(), model.disable_adapter():
        expected = model(x)
    assert torch.equal(fused(model)(x), expected)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(x), expected)


def test_other_adapters_keep_the_forward_of_their_class() -> None:
    x = torch.randn(5, 48).bfloat16()
    for config in ({"use_dora": True}, {"lora_bias": True, "lora_alpha": 3}, {"lora_dropout": 0.5}):
        model = in_bfloat16(adapted(bias=True, **config)).train()
        assert all(low_rank(module) is None for module in model.modules())
        results = []
        for other in (deepcopy(model), fused(deepcopy(model))):
            torch.manual_seed(1)
            results.append(other(x))
        assert torch.equal(*results)
    evaluated = adapted(lora_dropout=0.5).eval()
    assert sum(low_rank(module) is not None for module in evaluated.modules()) == 2
    evaluated.merge_adapter()
    assert all(low_rank(module) is None for module in evaluated.modules())
    several = adapted()
    several.add_adapter("other", LoraConfig(r=2, target_modules=["first"]))
    assert sum(low_rank(module) is not None for module in several.modules()) == 2
    several.base_model.set_adapter(["default", "other"])
    assert low_rank(several.base_model.model.first) is None


def test_trial_adapters_are_half_of_their_layers_output_and_leave_nothing() -> None:
    model = in_bfloat16(adapted(512, 768, init_lora_weights=True))
    before = deepcopy(model.state_dict())
    x = torch.randn(64, 512)
    layer = model.base_model.model.first
    with torch.no_grad(), trial_adapters(model):
        base = layer.base_layer(x.bfloat16()).float()
        assert 0.3 < float((layer(x.bfloat16()).float() - base).std() / base.std()) < 0.8
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trained = adapted()
    values = deepcopy(trained.state_dict())
    with trial_adapters(trained):
        assert all(torch.equal(value, values[name]) for name, value in trained.state_dict().items())


def test_trials_see_adapters_with_dropout_and_leave_the_mode() -> None:
    model = adapted(init_lora_weights=True, lora_dropout=0.1).train()
    with trial_adapters(model):
        assert all(bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)
        assert not any(module.training for module in model.modules())
    assert model.training
    assert not any(bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)


def test_values_come_back_after_an_error() -> None:
    model = adapted(init_lora_weights=True)
    with pytest.raises(ValueError, match="inside"), trial_adapters(model):
        raise ValueError("inside")
    assert not any(bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)


def test_a_fast_path_without_adapters_is_refused_also_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = in_bfloat16(adapted(256, 256, init_lora_weights=True, lora_dropout=0.1)).base_model.model.first.train()
    with trial_adapters(layer):
        assert fuse._matches(layer, lora_forward)
        monkeypatch.setattr(lora_module, "add_low_rank", lambda y, x, adapter: y)
        assert not fuse._matches(layer, lora_forward)


def test_half_precision_with_small_gradients_keeps_pefts_forward() -> None:
    x = torch.randn(5, 48).half()
    model = adapted().half()
    assert torch.equal(fused(deepcopy(model))(x), model(x))


def test_what_a_hook_holds_stays() -> None:
    model = fused(in_bfloat16(adapted()))
    held: list[Tensor] = []
    layer = model.base_model.model.first
    layer.base_layer.register_forward_hook(lambda module, args, out: held.append(out))
    x = torch.randn(5, 48).bfloat16()
    layer(x)
    weight = layer.base_layer.weight
    assert torch.equal(held[0], x @ weight.t())
