"""Checks on completions token by token: each finds the fault that was put in, and is silent without it."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from keel.base.errors import KeelError
from keel.lab.traces import Trace, check_depth, check_drawn, check_tokens, read_traces, write_traces
from keel.models.tiny import tiny_tokenizer

THINKS = (  # leaves out the reasoning of earlier turns, as many templates do
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'].split('#')[-1] if m['role'] == 'assistant' "
    "else m['content']) + '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def conversation(tokenizer, turns, template=None):
    """A completion of several turns as a sampler appends them: the template's own text between the model's turns."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "go"}], add_generation_prompt=True, return_dict=False, chat_template=template
    )
    ids, action, messages = [], [], [{"role": "user", "content": "go"}]
    for number, turn in enumerate(turns):
        own = [*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id]
        ids, action = ids + own, action + [True] * len(own)
        messages.append({"role": "assistant", "content": turn})
        if number < len(turns) - 1:
            between = tokenizer.encode("<|user|>more<eos><|assistant|>", add_special_tokens=False)
            ids, action = ids + between, action + [False] * len(between)
            messages.append({"role": "user", "content": "more"})
    return Trace(tuple(prompt), tuple(ids), tuple(action), messages=tuple(messages))


def test_tokens_that_are_appended_are_exact():
    tokenizer = tiny_tokenizer()
    report = check_tokens([conversation(tokenizer, ["think#1", "more#2", "x"])], tokenizer)
    assert report.exact
    assert report.findings() == []
    assert report.tokens == 8 + 7 + 2


def test_a_template_that_drops_reasoning_is_named_at_its_turn():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKS
    traces = [conversation(tokenizer, ["1", "2"]), conversation(tokenizer, ["think#1", "2"])]
    report = check_tokens(traces, tokenizer)
    (difference,) = report.differences
    assert (difference.trace, difference.turn, difference.position, difference.cause) == (1, 1, 0, "template")
    assert report.affected == 8 + 2  # all that the model sampled there
    (finding,) = report.findings()
    assert finding.code == "tokens/encoded-again"
    assert "1 of 2 completions" in finding.evidence
    assert "get_training_chat_template" in finding.advice


def merging():
    """Bytes of a, b with a merge of both: `ab` has two tokenizations, and encoding gives one of them."""
    vocab = {"a": 0, "b": 1, "ab": 2, "<eos>": 3}
    inner = Tokenizer(models.BPE(vocab, [("a", "b")], unk_token=None))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def test_sampled_tokens_that_encoding_would_merge():
    tokenizer = merging()
    exact, split = Trace((0,), (2, 1, 3), (True,) * 3), Trace((3,), (1, 0, 1, 3), (True,) * 4)
    assert check_tokens([exact], tokenizer).exact
    report = check_tokens([exact, split], tokenizer)
    (difference,) = report.differences
    assert (difference.trace, difference.position, difference.cause) == (1, 1, "merged")
    assert (difference.sampled, difference.encoded) == ("a|b|<eos>", "ab|<eos>")
    assert report.affected == 3
    assert "keep token ids" in report.findings()[0].advice


def test_a_turn_is_encoded_behind_its_context():
    """A merge across the beginning of a turn is a difference; a context of its own is left out."""
    tokenizer = merging()
    (difference,) = check_tokens([Trace((0, 0), (1, 3), (True, True))], tokenizer).differences
    assert (difference.position, difference.sampled, difference.encoded) == (0, "a|b|<eos>", "ab|<eos>")
    assert check_tokens([Trace((0, 1), (2, 3), (True, True))], tokenizer).exact


def test_a_template_that_rewrites_the_prompt_later_is_a_difference():
    tokenizer = tiny_tokenizer()
    trace = conversation(tokenizer, ["1", "2"])
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']", "(message['content'] if messages | length == 1 else 'G')"
    )
    (difference,) = check_tokens([trace], tokenizer).differences
    assert (difference.turn, difference.position, difference.cause) == (1, 0, "template")


def test_masks_of_padding_and_of_tools_count_together(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    masks = {"completion_mask": [1, 1, 1, 0], "tool_mask": [1, 0, 1, 1]}
    path.write_text(json.dumps({"completion_ids": [5, 6, 7, 0], **masks}))
    assert read_traces(path)[0].action == (True, False, True, False)


def test_messages_that_are_not_the_whole_conversation_are_one_line():
    tokenizer = tiny_tokenizer()
    trace = conversation(tokenizer, ["1", "2"])
    cut = Trace(trace.prompt_ids, trace.completion_ids, trace.action, messages=trace.messages[:2])
    with pytest.raises(KeelError, match="whole conversation"):
        check_tokens([cut], tokenizer)
    with pytest.raises(KeelError, match="chat_template="):
        check_tokens(
            [Trace((5, *trace.prompt_ids), trace.completion_ids, trace.action, messages=trace.messages)], tokenizer
        )


@pytest.mark.parametrize(
    ("row", "lacks"),
    [
        ({"prompt": "a", "completion": "b"}, "completion_ids"),
        ({"completion_ids": [1, 2], "completion_mask": [1]}, "one for each token"),
        ({"completion_ids": [1, 2], "logprobs": [0.0]}, "sample_logp"),
        ({"completion_ids": "12"}, "list of token ids"),
        ([1, 2], "record"),
        ({"completion_ids": [1], "tool_mask": 5}, "tool_mask"),
        ({"completion_ids": [1], "tool_mask": ["a"]}, "tool_mask"),
        ({"completion_ids": [1], "logp": 5}, "logp"),
        ({"completion_ids": [1], "logp": [[]]}, "logp"),
        ({"completion_ids": [1], "logp": [10**400]}, "logp"),
        ({"completion_ids": [1], "messages": 5}, "messages"),
        ({"completion_ids": [1], "messages": ["a"]}, "messages"),
        ({"completion_ids": [1], "step": [1]}, "step"),
        ({"completion_ids": [1], "step": math.inf}, "step"),
        ({"token_ids": [1], "loss_mask": [1], "logp": 3}, "logp"),
    ],
)
def test_a_line_that_is_no_trace_says_what_it_lacks(tmp_path, row, lacks):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(KeelError, match=lacks) as error:
        read_traces(path)
    assert "line 1" in str(error.value)
    assert "\n" not in str(error.value)


def test_only_newlines_end_a_line_and_the_first_may_have_a_bom(tmp_path):
    path, text = tmp_path / "traces.jsonl", "a\u2028b\x85c\u00e4"
    row = {"completion_ids": [1], "messages": [{"role": "user", "content": text}]}
    path.write_bytes(2 * (json.dumps(row, ensure_ascii=False).encode("utf-8-sig") + b"\r\n"))
    assert [trace.messages[0]["content"] for trace in read_traces(path)] == [text, text]
    path.write_bytes(b'{"completion_ids": [1]}\n{"completion_ids": [1], "x": "\xff"}\n')
    with pytest.raises(KeelError, match="line 2"):
        read_traces(path)


def test_traces_come_back_and_names_of_others_are_read(tmp_path):
    path = tmp_path / "traces.jsonl"
    own = Trace((1,), (2, 3), (True, False), (-1.0, math.nan), (-1.5, -2.0), ({"role": "user", "content": "x"},), 3)
    write_traces(path, [own])
    write_traces(path, [Trace((1,), (2,), (True,))])
    back = read_traces(path)
    assert back[0].sample_logp[0] == -1.0
    assert math.isnan(back[0].sample_logp[1])
    assert (back[0].messages, back[0].step, back[1].logp) == (own.messages, 3, None)
    path.write_text(json.dumps({"token_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1], "old_log_probs": [0, -1, 0, -2]}))
    (trace,) = read_traces(path)
    assert (trace.prompt_ids, trace.completion_ids, trace.action) == ((5,), (6, 7, 8), (True, False, True))
    assert trace.logp == (-1, 0, -2)
    assert list(trace.turns()) == [(0, 1), (2, 3)]


def gaps(size, seed=0, rows=32, width=512):
    """Completions whose sampler is off by noise of `size(position)` nats a token."""
    noise = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(rows):
        logp = -2 + 0.5 * torch.randn(width, generator=noise)
        error = torch.randn(width, generator=noise) * torch.tensor([size(at + 20) for at in range(width)])
        made.append(
            Trace((1,) * 20, (1,) * width, (True,) * width, tuple((logp + error).tolist()), tuple(logp.tolist()))
        )
    return made


def test_a_gap_that_grows_with_depth_is_found():
    report = check_depth(gaps(lambda at: 0.02 if at < 256 else 0.3))
    assert report.finding.code == "sampler/depth"
    assert list(report.depth_bins) == [0, 64, 128, 256, 512]
    assert report.depth_bins[0][0] == pytest.approx(0.02**2 / 2, rel=0.2)  # k3 of small gaps is d²/2
    assert report.depth_bins[512][0] == pytest.approx(0.3**2 / 2, rel=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_a_gap_that_does_not_grow_is_none(seed):
    assert check_depth(gaps(lambda at: 0.1, seed)).finding is None
    assert check_depth(gaps(lambda at: 1e-4 * (1 + at / 50), seed)).finding is None  # grows, and is rounding


def test_a_stretch_that_few_completions_reach_is_left_out():
    """One long completion with a token that is far off has no standard error."""
    short = gaps(lambda at: 0.02, rows=31, width=40)
    long = gaps(lambda at: 0.02 if at < 64 else 0.5, seed=1, rows=1, width=100)
    report = check_depth(short + long)
    assert report.finding is None
    assert list(report.depth_bins) == [0]
    assert check_depth(short + gaps(lambda at: 0.02 if at < 64 else 0.5, seed=1, rows=8, width=100)).finding


def test_depth_without_both_sides_says_what_to_record(tmp_path):
    with pytest.raises(KeelError, match="rollout_log_probs"):
        check_depth([Trace((1,), (2,), (True,))])
    check_depth(gaps(lambda at: 0.1, rows=4)).plot(tmp_path / "depth.png")
    assert (tmp_path / "depth.png").stat().st_size > 1000


def test_who_drew_the_tokens():
    """A policy that drifts a little each step; its samples name the step that drew them, and rarely another."""
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=noise)
    steps = {f"step {n}": (logits + 0.15 * n * torch.randn(50, generator=noise)).log_softmax(0) for n in range(4)}

    def drawn_by(name, count=300):
        tokens = torch.multinomial(steps[name].exp(), 8 * count, replacement=True, generator=noise).view(count, 8)
        return {other: logp[tokens].sum(1).tolist() for other, logp in steps.items()}

    stale = check_drawn(drawn_by("step 1"), "step 3")
    assert stale.stale
    assert stale.likeliest == "step 1"
    assert "sampler/stale" in str(stale)
    assert not any(check_drawn(drawn_by("step 3", 40), "step 3").stale for _ in range(300))


def test_what_cannot_have_been_drawn_decides_and_nan_does_not():
    impossible, nothing = [-math.inf, -1.0], [math.nan] * 2
    assert check_drawn({"now": impossible, "before": [-3.0, -1.0]}, "now").stale
    assert not check_drawn({"now": [-3.0, -1.0], "before": impossible}, "now").stale
    assert not check_drawn({"now": [-3.0, -math.inf], "before": [-math.inf, -3.0]}, "now").stale
    assert not check_drawn({"now": nothing, "before": [-3.0, -1.0]}, "now").stale


def test_a_level_of_many_starts_needs_more_evidence():
    gap = {"now": [-1.0], "before": [-1.0 + math.log(2e4)]}
    assert check_drawn(gap, "now").stale
    assert not check_drawn(gap, "now", 1e-4 / 6).stale


def test_candidates_that_are_equal_are_no_finding():
    report = check_drawn({"now": [-1.0, -2.0], "before": [-1.0, -2.0]}, "now")
    assert not report.stale
    with pytest.raises(KeelError, match="each completion"):
        check_drawn({"now": [-1.0], "before": [-1.0, -2.0]}, "now")
    with pytest.raises(KeelError, match="expected weights"):
        check_drawn({"before": [-1.0]}, "now")
