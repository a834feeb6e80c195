"""GGUF: a file written by the gguf package gives back the model it was made from; a damaged one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from keel.base.errors import KeelError
from keel.models import load_model
from keel.models.gguf import check_gguf

from .gguf_file import write


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return path, write(path)


def test_it_is_the_model_it_was_made_from(file: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    path, source = file
    loaded = load_model(str(path), device="cpu")
    ids = torch.tensor([[5, 77, 130, 9, 200, 31]])
    with torch.no_grad():
        expected = source(input_ids=ids).logits
        torch.testing.assert_close(loaded.model(input_ids=ids).logits, expected, atol=1e-6, rtol=1e-6)
    assert (loaded.context_length, loaded.eos_ids, loaded.pad_id) == (128, (0,), 0)
    assert all(p.requires_grad for p in loaded.model.parameters())

    loaded.model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(again.model(input_ids=ids).logits, expected, atol=1e-6, rtol=1e-6)
    text = "ab  12 caf\u00e9\n"
    for tokenizer in (loaded.tokenizer, again.tokenizer):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        # two spaces before a digit are one piece, as this pre-tokenizer splits digits off first
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab  12")) == ["ab", "ĠĠ", "1", "2"]


@pytest.mark.parametrize("part", [0.0005, 0.05, 0.5, 0.98])
def test_a_file_cut_short_is_refused(part: float, file: tuple[Path, Any], tmp_path: Path) -> None:
    data = file[0].read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(KeelError, match="truncated") as caught:
        load_model(str(cut), device="cpu")
    assert "\n" not in str(caught.value)
    assert "cut.gguf" in str(caught.value)


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(KeelError, match="not a GGUF file"):
        check_gguf(tmp_path / "page.gguf")


def test_the_header_says_how_long_the_file_is(file: tuple[Path, Any]) -> None:
    header = check_gguf(file[0])
    assert header.values["general.architecture"] == "llama"
    padding = file[0].stat().st_size - header.bytes_needed
    assert 0 <= padding < 32


def tampered(path: Path, into: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) == 1
    into.write_bytes(data.replace(old, new))
    return into


NORM = b"output_norm.weight" + (1).to_bytes(4, "little") + (32).to_bytes(8, "little")  # name, dimensions, shape


def test_an_unknown_tensor_type_is_refused(file: tuple[Path, Any], tmp_path: Path) -> None:
    fp32, unknown = (0).to_bytes(4, "little"), (999).to_bytes(4, "little")
    path = tampered(file[0], tmp_path / "new.gguf", NORM + fp32, NORM + unknown)
    with pytest.raises(KeelError, match=r"new\.gguf holds a tensor of type 999") as caught:
        load_model(str(path), device="cpu")
    assert "\n" not in str(caught.value)


def test_an_impossible_alignment_is_refused(file: tuple[Path, Any], tmp_path: Path) -> None:
    """A header that parses and makes no sense is as damaged as one that does not parse."""
    name = b"llama.block_count"
    as_uint = (4).to_bytes(4, "little")
    old = len(name).to_bytes(8, "little") + name + as_uint + (2).to_bytes(4, "little")
    other = b"general.alignment"
    new = len(other).to_bytes(8, "little") + other + as_uint + (0).to_bytes(4, "little")
    with pytest.raises(KeelError, match="damaged"):
        check_gguf(tampered(file[0], tmp_path / "zero.gguf", old, new))


def test_without_eos_the_weights_are_not_read(
    file: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    monkeypatch.setattr(
        "keel.models.gguf._name_special_tokens", lambda tokenizer, _: setattr(tokenizer, "eos_token", None)
    )
    with pytest.raises(KeelError, match="no EOS token"):
        load_model(str(file[0]), device="cpu")
