"""GGUF: a file written by the gguf package gives back the model it was made from; a damaged one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from keel.errors import KeelError
from keel.models import load_model
from keel.models.gguf import check_gguf

HEADS, KV_HEADS, WIDTH, HIDDEN, LAYERS = 4, 2, 32, 64, 2
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> list[str]:
    """The 256 byte symbols of byte-level BPE after two special tokens, and the merges' results."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|end|>", "<|start|>", *sorted(ByteLevel.alphabet()), "ĠĠ", "ab"]


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of rotary rows: pairs (i, i + d/2) of each head stand beside each other."""
    rows, cols = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, cols).transpose(1, 2).reshape(rows, cols)


def write(path: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3, 3] + [1] * (len(vocabulary()) - 2))
    writer.add_token_merges(["Ġ Ġ", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if "q_proj" in name:
            weight = interleaved(weight, HEADS)
        if "k_proj" in name:
            weight = interleaved(weight, KV_HEADS)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name.replace("model.layers", "blk"), weight.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


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
    with pytest.raises(KeelError, match="cut short") as caught:
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
