"""Each fault of a remote sampler is the preflight's first finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doctor.followed import check_named_first, repeated
from doctor.schooled import fresh_model, schooled_config, schooled_model
from doctor.served import (
    SECRET,
    HalfPrecision,
    HiddenTopK,
    Hotter,
    LoadsNothing,
    LoadsNothingAndDenies,
    ReportsFiltered,
    ReportsOtherTemperature,
    TorchBackend,
    serving,
)
from keel.cli import main
from keel.doctor.findings import Diagnosis
from keel.doctor.preflight import preflight
from keel.models.tiny import CHARACTERS, character_tokenizer

pytestmark = pytest.mark.doctor


LORA = "model.lora={r: 4}"
COLD = "rollout.temperature=0.7"


def by_server(url: str, wait_s: float = 5) -> list[str]:
    options = f"mode: server, url: '{url}', secret: '{SECRET}', wait_s: {wait_s}"
    return ["rollout.engine=vllm", f"rollout.vllm={{{options}}}"]


def omitting(url: str) -> list[str]:
    return [f"rollout.engine={{name: 'doctor.served:OmitsSync', url: '{url}'}}"]


def other_weights() -> tuple[Any, Any]:
    return fresh_model(seed=1)


def other_shape() -> tuple[Any, Any]:
    return fresh_model(width=32)


def other_tokenizer() -> tuple[Any, Any]:
    return schooled_model()[0], character_tokenizer(reversed(CHARACTERS))


Make = Callable[[], tuple[Any, Any]]
FAULTS: dict[str, tuple[str, Callable[[Any, Any], Any], Make, list[str]]] = {
    "a server that loads nothing": ("sampler/stale", LoadsNothing, schooled_model, []),
    "one that loads nothing, on other weights": ("sampler/stale", LoadsNothing, other_weights, []),
    "one that loads nothing and denies it": ("sampler/stale", LoadsNothingAndDenies, schooled_model, []),
    "the same on other weights": ("sampler/stale", LoadsNothingAndDenies, other_weights, []),
    "an adapter that is not loaded": ("sampler/stale", LoadsNothing, schooled_model, [LORA]),
    "drawn at another temperature": ("sampler/temperature", Hotter, schooled_model, []),
    "reported at another temperature": ("sampler/temperature", ReportsOtherTemperature, schooled_model, [COLD]),
    "top-k that nobody is told of": ("sampler/filter", HiddenTopK, schooled_model, []),
    "filtered log-probabilities": ("sampler/filter", ReportsFiltered, schooled_model, []),
    "another shape": ("sampler/other-model", TorchBackend, other_shape, []),
    "another tokenizer": ("sampler/other-model", TorchBackend, other_tokenizer, []),
    "another base under an adapter": ("sampler/other-model", TorchBackend, other_weights, [LORA]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_server_is_named_first(fault: str) -> None:
    code, backend, make, options = FAULTS[fault]
    with serving(backend(*make())) as url:
        whole = not repeated(FAULTS, fault)
        diagnosis = check_named_first(code, [*by_server(url), *options], whole=whole)
    if code in ("sampler/stale", "sampler/other-model"):
        assert not any("weights read back" in note for note in diagnosis.notes)


def test_a_sync_that_is_omitted_is_named_first() -> None:
    with serving(TorchBackend(*schooled_model())) as url:
        check_named_first("sampler/stale", omitting(url))


HEALTHY: dict[str, tuple[Callable[[Any, Any], Any], Make, list[str]]] = {
    "as it is": (TorchBackend, schooled_model, []),
    "started on other weights": (TorchBackend, other_weights, [COLD]),
    "with an adapter": (TorchBackend, schooled_model, [LORA]),
    "in half precision": (HalfPrecision, schooled_model, []),
}


def diagnosed(name: str) -> Diagnosis:
    backend, make, options = HEALTHY[name]
    with serving(backend(*make())) as url:
        return preflight(schooled_config(*by_server(url), *options))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_server_gives_no_alarm_and_what_was_read_back_is_said(name: str) -> None:
    diagnosis = diagnosed(name)
    assert diagnosis.healthy, diagnosis.findings
    assert not [line for line in diagnosis.unchecked if "Error" in line], diagnosis.unchecked
    base = len(dict(schooled_model()[0].named_parameters()))
    tensors = base + 2 * 7 * 2 if name == "with an adapter" else base
    (proof,) = [note for note in diagnosis.notes if "weights read back" in note]
    assert proof == (f"weight sync verified: weights read back: all {tensors} tensors of the sampler are the policy's")
    codes = [finding.code for finding in diagnosis.findings]
    assert ("sampler/precision" in codes) == (name == "in half precision")


def test_the_command_names_a_server_of_another_model_as_a_finding(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "c.yaml"
    with serving(TorchBackend(*other_shape())) as url:
        path.write_text(json.dumps(schooled_config(*by_server(url)).to_dict()))
        assert main(["doctor", str(path), "--json"]) == 1
        (finding,) = json.loads(capsys.readouterr().out)["findings"]
        assert main(["train", str(path), f"run.dir={tmp_path}"]) == 2
    assert finding["code"] == "sampler/other-model"
    assert all(part in finding["evidence"] for part in (url, "hidden_size is 32", "24", "keel serve"))
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.endswith(finding["evidence"])


def test_an_address_where_nothing_listens_is_one_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "c.yaml"
    with serving(TorchBackend(*schooled_model())) as url:
        pass
    path.write_text(json.dumps(schooled_config(*by_server(url, 0.2)).to_dict()))
    assert main(["doctor", str(path), "--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert f"the sampler at {url} has not answered for 0 s" in output.err.splitlines()[-1]
