"""Notes of a run on a GPU: none on a CPU, and every fallback by name where there is one."""

from __future__ import annotations

import pytest
import torch

from keel.base.errors import KeelError
from keel.run.build import Built, build_policy, build_run, device_notes
from keel.trainer.optim import resolve_amp_dtype
from keel.trainer.options import OptimOptions
from trainer.small import small_config


def built(*overrides: str) -> Built:
    config = small_config(*overrides)
    return build_run(config, build_policy(config))


def test_a_cpu_has_no_notes_on_its_device() -> None:
    assert built().notes == ()


def test_a_gpu_has_one_for_each_thing_that_the_options_do_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    run = built("optim.precision=bfloat16").run
    monkeypatch.setattr(type(run.engine), "notes", ("decoding without CUDA graphs: the heads have size 7",))
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    notes = device_notes(run, run.rollout.model_copy(update={"dtype": "bf16"}))
    sampler, decoding, attention, statistics, modules, cudnn = notes
    assert "sampled by a copy of the weights in bfloat16, the policy's own are float32" in sampler
    assert decoding == "decoding without CUDA graphs: the heads have size 7"
    assert "do not use flash attention: there is no CUDA device" in attention
    assert "not fused: there is no CUDA device" in statistics
    assert modules.startswith("LlamaMLP, LlamaRMSNorm have no fused form")
    assert "cuDNN" in cudnn
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    assert device_notes(run, run.rollout) == (decoding, attention, statistics, modules)


def test_bfloat16_is_refused_by_name_where_a_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, precision = torch.device("cuda"), OptimOptions(precision="bfloat16")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    with pytest.raises(KeelError, match=r"optim\.precision=bfloat16: this GPU has no bfloat16"):
        resolve_amp_dtype(precision, torch.float32, gpu)
    assert resolve_amp_dtype(OptimOptions(precision="float16"), torch.float32, gpu) == torch.float16
    assert resolve_amp_dtype(precision, torch.float32, torch.device("cpu")) == torch.bfloat16
