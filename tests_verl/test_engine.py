"""Keel's loss in verl's own FSDP engine: its microbatches, forward, backward, clip and optimizer, on the CPU.

verl builds that engine for accelerators only, so that a small model is put into it here without sharding.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed
from tensordict import TensorDict
from test_loss import keel_loss, verls_loss
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl

from conftest import nested

pytestmark = pytest.mark.peers


LENGTHS, PROMPT, VOCABULARY = (5, 3, 6, 2), 3, 32


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    """A group of one process, which the engine reduces its counts over."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(transformer_impl, "get_device_name", lambda: "cpu")


def engine():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **shape)).double()
    made = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    made.module, made.pad_to_length, made.use_ulysses_sp, made._autocast_dtype = model, False, False, torch.float32
    made.ulysses_sequence_parallel_size, made.ulysses_device_mesh, made._qat_enabled = 1, None, False
    made.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    made.optimizer_config = SimpleNamespace(clip_grad=1.0)
    made.engine_config = SimpleNamespace(use_no_sync_for_gradient_accumulation=False)
    return made


def batch():
    noise = torch.Generator().manual_seed(1)

    def draw(n):
        return torch.randn(n, generator=noise, dtype=torch.float64)

    ids = [torch.randint(0, VOCABULARY, (PROMPT + n,), generator=noise) for n in LENGTHS]
    mask = [torch.ones(n, dtype=torch.int64) for n in LENGTHS]
    mask[0][1] = 0
    columns = {
        "input_ids": ids,
        "position_ids": [torch.arange(PROMPT + n) for n in LENGTHS],
        "prompts": [x[:PROMPT] for x in ids],
        "responses": [x[PROMPT:] for x in ids],
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": [-3.4 + 0.1 * draw(n) for n in LENGTHS],
        "ref_log_prob": [-3.4 + 0.5 * draw(n) for n in LENGTHS],
        "advantages": [draw(1).expand(n).clone() for n in LENGTHS],
    }
    data = TensorDict({name: nested(values) for name, values in columns.items()}, len(LENGTHS))
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        global_batch_size=len(LENGTHS),
        micro_batch_size_per_gpu=2,
        use_dynamic_bsz=False,
        use_remove_padding=False,
        use_fused_kernels=False,
    )
    return data


def trained(loss, steps=3):
    """Weights after some updates of two microbatches each, and the metrics of the last."""
    made = engine()
    for _ in range(steps):
        metrics = made.train_batch(batch(), loss)["metrics"]
    return torch.cat([parameter.detach().flatten() for parameter in made.module.parameters()]), metrics


def named(loss):
    """As the engine calls it: by names, with the group of ranks."""
    return lambda model_output, data, dp_group: loss(model_output, data)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_with_verls_formula_the_weights_are_verls(mode):
    theirs, of_theirs = trained(named(verls_loss("low_var_kl", mode)))
    ours, of_ours = trained(keel_loss(mode, gradient="plain", reduction="loss", allow_biased=True))
    without, _ = trained(keel_loss(mode, beta=0.0))
    assert (theirs - without).abs().max() > 1e-3  # the KL has moved them
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert of_ours["grad_norm"] == pytest.approx(of_theirs["grad_norm"], abs=1e-6)
    assert of_ours["loss/kl"].aggregate() == pytest.approx(0.3 * of_theirs["kl_loss"].aggregate(), abs=1e-6)


def test_an_update_that_is_not_finite_is_verls_to_skip():
    """The FSDP engine leaves the weights as they are."""

    def broken(model_output, data, dp_group):
        loss, metrics = keel_loss()(model_output, data)
        return loss * float("nan"), metrics

    start = torch.cat([parameter.detach().flatten() for parameter in engine().module.parameters()])
    assert torch.equal(trained(broken, steps=1)[0], start)
