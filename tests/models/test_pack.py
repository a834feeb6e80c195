"""Rows, masks and positions are what the picture says, and bad input never reaches a model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem, Reward
from keel.models.pack import _bins, microbatches, pack
from keel.models.scorer import score_tokens

from .packing_cases import RAGGED, make_completion, make_groups


def completion(*tokens: int) -> Completion:
    zeros = (0.0,) * len(tokens)
    return Completion(tokens, (True,) * len(tokens), zeros, zeros, "", "eos")


def test_one_group_by_hand() -> None:
    group = Group(Problem("p", ""), (10, 11), (completion(20, 21, 22), completion(30, 31)))
    packed = pack([group], 0)
    assert packed.input_ids.tolist() == [[10, 11, 20, 21, 30]]  # the last token of a completion scores nothing
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert packed.gather.tolist() == [[1, 2, 3], [1, 4, 0]]
    assert packed.tokens.tolist() == [[20, 21, 22], [30, 31, 0]]
    assert packed.completion_mask.tolist() == [[True, True, True], [True, True, False]]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert packed.mask_4d()[0, 0].int().tolist() == expected


def test_one_row_a_completion_by_hand() -> None:
    group = Group(Problem("p", ""), (10, 11), (completion(20, 21, 22), completion(30, 31)))
    packed = pack([group], 9, shared_prefix=False)
    assert packed.input_ids.tolist() == [[10, 11, 20, 21], [10, 11, 30, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert packed.attention_mask().tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert packed.gather.tolist() == [[1, 2, 3], [5, 6, 0]]


@pytest.mark.parametrize("row_tokens", [None, 25, 40, 10_000])
def test_a_query_sees_exactly_its_own_past(row_tokens: int | None) -> None:
    """Follow the mask from every scoring position: the visible tokens, in order, are prompt + completion so far."""
    groups = make_groups(RAGGED)
    packed = pack(groups, 0, max_row_tokens=row_tokens)
    length = packed.input_ids.shape[1]
    mask = packed.mask_4d()
    pairs = [(group, c) for group in groups for c in group.completions]
    for index, (group, c) in enumerate(pairs):
        for step in range(len(c.tokens)):
            row, query = divmod(int(packed.gather[index, step]), length)
            visible = mask[row, 0, query]
            assert tuple(packed.input_ids[row][visible].tolist()) == group.prompt_tokens + c.tokens[:step]
            assert packed.position_ids[row][visible].tolist() == list(range(len(group.prompt_tokens) + step))
    assert mask.any(dim=-1).all()  # no query without a key: softmax over nothing is NaN
    assert packed.group.tolist() == [i for i, group in enumerate(groups) for _ in group.completions]


def test_rows_are_shared_up_to_the_budget() -> None:
    groups = make_groups(RAGGED)
    assert pack(groups, 0).input_ids.shape[0] == 4
    packed = pack(groups, 0, max_row_tokens=30)
    assert packed.input_ids.shape[0] == 3
    assert packed.input_ids.shape[1] <= 30
    assert pack(groups, 0, max_row_tokens=5).input_ids.shape[0] == 4  # a group is never cut


def test_action_mask_leaves_out_what_the_policy_did_not_sample() -> None:
    packed = pack(make_groups([(4, (6, 3))], tool=slice(1, 3)), 0)
    assert packed.action_mask.int().tolist() == [[1, 0, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0]]
    assert packed.completion_mask.sum() == 9


def test_spread_puts_values_where_they_belong() -> None:
    packed = pack(make_groups([(4, (3, 1))]), 0)
    assert packed.scatter(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1, 2, 3], [4, 0, 0]]


def test_a_completion_without_tokens_keeps_its_place() -> None:
    packed = pack([Group(Problem("p", ""), (10, 11), (completion(), completion(30, 31)))], 0)
    assert packed.input_ids.tolist() == [[10, 11, 30]]
    assert packed.completion_mask.tolist() == [[False, False], [True, True]]
    assert pack([Group(Problem("p", ""), (10, 11), (completion(),))], 0).tokens.shape == (1, 0)


def test_to_moves_every_tensor() -> None:
    moved = pack(make_groups(RAGGED), 0).to("meta")
    assert moved.input_ids.device.type == moved.gather.device.type == moved.group.device.type == "meta"
    assert moved.mask_4d().device.type == "meta"


@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("budget", [1, 12, 20, 45, 10_000])
def test_microbatches_keep_the_order_and_the_budget(budget: int, shared_prefix: bool) -> None:
    groups = make_groups(RAGGED)
    parts = microbatches(groups, budget, shared_prefix=shared_prefix)
    flat = [(g.problem.key, c) for part in parts for g in part for c in g.completions]
    assert flat == [(g.problem.key, c) for g in groups for c in g.completions]
    for part in parts:
        alone = len(part) == 1 and len(part[0].completions) == 1
        assert alone or pack(part, 0, shared_prefix=shared_prefix).input_ids.numel() <= budget
    if budget == 10_000:
        assert parts == [groups]


def test_a_large_group_is_split_and_repeats_its_prompt() -> None:
    (group,) = make_groups([(5, (4, 4, 4))])
    parts = microbatches([group], 11)
    assert [[len(g.completions) for g in part] for part in parts] == [[2], [1]]
    assert all(g.prompt_tokens == group.prompt_tokens for part in parts for g in part)


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_a_split_group_keeps_each_completion_with_its_reward(shared_prefix: bool) -> None:
    (group,) = make_groups([(5, (4, 4, 4))])
    judged = replace(group, rewards=tuple(Reward(float(i)) for i in range(3)))
    parts = [g for part in microbatches([judged], 11, shared_prefix=shared_prefix) for g in part]
    assert len(parts) > 1
    assert [pair for g in parts for pair in zip(g.completions, g.rewards, strict=True)] == list(
        zip(judged.completions, judged.rewards, strict=True)
    )


def slow_microbatches(groups: list[Group], budget: int, shared_prefix: bool, one_row: bool) -> list[list[Group]]:
    """The same rule read off its sentence: every candidate is packed to see what it costs."""

    def fits(part: list[Group]) -> bool:
        if one_row:
            return pack(part, 0, max_row_tokens=10**6).input_ids.numel() <= budget
        if not shared_prefix:  # an empty completion behind its prompt is a row too
            spans = [len(g.prompt_tokens) + len(c.tokens) - 1 for g in part for c in g.completions]
            return len(spans) * max(spans) <= budget
        return pack(part, 0).input_ids.numel() <= budget

    def cut(group: Group, start: int, stop: int) -> Group:
        return replace(group, completions=group.completions[start:stop], rewards=group.rewards[start:stop])

    pieces = []
    for group in groups:
        starts = [0]
        for index in range(1, len(group.completions)):
            if not fits([cut(group, starts[-1], index + 1)]):
                starts.append(index)
        edges = [*starts, len(group.completions)]
        pieces += [cut(group, a, b) for a, b in pairwise(edges)]
    batches: list[list[Group]] = []
    for piece in pieces:
        if batches and fits([*batches[-1], piece]):
            batches[-1].append(piece)
        else:
            batches.append([piece])
    return batches


def slow_rows(groups: list[Group], shared_prefix: bool, row_tokens: int | None) -> dict[str, Any]:
    """Rows written token by token, and the flat position that scores each token of each completion."""
    units = groups if shared_prefix else [replace(g, completions=(c,)) for g in groups for c in g.completions]
    sizes = [len(g.prompt_tokens) + sum(len(c.tokens[:-1]) for c in g.completions) for g in units]
    rows, scoring = [], {}
    for number, members in enumerate(_bins(sizes, row_tokens if shared_prefix else None)):
        row: list[tuple[int, int, int, int]] = []  # token, position, prefix, branch
        for prefix, index in enumerate(members):
            prompt = units[index].prompt_tokens
            row += [(token, position, prefix, 0) for position, token in enumerate(prompt)]
            last = len(row) - 1
            for branch, c in enumerate(units[index].completions, start=1):
                columns = [last, *range(len(row), len(row) + len(c.tokens) - 1)] if c.tokens else []
                scoring[index, branch] = (number, columns)
                row += [(t, p, prefix, branch) for p, t in enumerate(c.tokens[:-1], start=len(prompt))]
        rows.append(row)
    length, width = max(map(len, rows)), max(len(c.tokens) for g in groups for c in g.completions)
    padded = [row + [(9, 0 if shared_prefix else None, -1, 0)] * (length - len(row)) for row in rows]
    columns = [[[cell[part] for cell in row] for row in padded] for part in range(4)]
    gather = [
        [row * length + c for c in cells] + [0] * (width - len(cells)) for _, (row, cells) in sorted(scoring.items())
    ]
    if not shared_prefix:
        columns[1] = [list(range(length)) for _ in rows]
    return dict(zip(("input_ids", "position_ids", "prefix", "branch", "gather"), [*columns, gather], strict=True))


SHAPES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 7), min_size=1, max_size=6).map(tuple)), min_size=1, max_size=8
)


@pytest.mark.parametrize(("shared_prefix", "one_row"), [(True, False), (False, False), (True, True)])
@given(shapes=SHAPES, budget=st.integers(1, 120))
def test_microbatches_are_the_partition_of_the_slow_rule(
    shared_prefix: bool, one_row: bool, shapes: list[tuple[int, tuple[int, ...]]], budget: int
) -> None:
    groups = make_groups(shapes)
    parts = microbatches(groups, budget, shared_prefix=shared_prefix, one_row=one_row)
    assert parts == slow_microbatches(groups, budget, shared_prefix, one_row)


@given(shapes=SHAPES, row_tokens=st.none() | st.integers(1, 120), shared_prefix=st.booleans())
def test_rows_are_those_written_token_by_token(
    shapes: list[tuple[int, tuple[int, ...]]], row_tokens: int | None, shared_prefix: bool
) -> None:
    groups = make_groups(shapes, tool=slice(1, 3))
    packed = pack(groups, 9, shared_prefix=shared_prefix, max_row_tokens=row_tokens)
    for name, rows in slow_rows(groups, shared_prefix, row_tokens).items():
        assert getattr(packed, name).tolist() == rows
        assert getattr(packed, name).dtype == torch.long
    completions = [c for g in groups for c in g.completions]
    width = max(len(c.tokens) for c in completions)
    for name in ("tokens", "action"):
        rows = [[*getattr(c, name), *[0] * (width - len(c.tokens))] for c in completions]
        assert (packed.tokens if name == "tokens" else packed.action_mask).tolist() == rows
    assert packed.completion_mask.tolist() == [[t < len(c.tokens) for t in range(width)] for c in completions]
    assert packed.existing.tolist() == packed.completion_mask.flatten().nonzero().flatten().tolist()


@given(lengths=st.lists(st.integers(0, 12), max_size=30), capacity=st.integers(1, 20))
def test_bins_are_first_fit_by_decreasing_length(lengths: list[int], capacity: int) -> None:
    """Against the rule walked bin by bin."""
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for members in bins:
            if capacity - sum(lengths[i] for i in members) >= lengths[index]:
                members.append(index)
                break
        else:
            bins.append([index])
    assert _bins(lengths, capacity) == bins


class Counted(tuple[int, ...]):
    """Tokens that count how often somebody asks for their number."""

    looks = 0

    def __len__(self) -> int:
        Counted.looks += 1
        return super().__len__()


GOOD = make_groups([(4, (3,))])[0]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "no groups"),
        ([replace(GOOD, completions=())], "'p0' has a group with zero completions"),
        ([replace(GOOD, prompt_tokens=())], "'p0' has an empty prompt"),
        ([replace(GOOD, completions=(make_completion(60, torch.Generator()),))], "needs 64 tokens .* context of 32"),
        ([replace(GOOD, completions=(replace(GOOD.completions[0], action=(True,)),))], "3 tokens with 1 action flags"),
        ([replace(GOOD, rewards=(Reward(1.0), Reward(0.0)))], "'p0' has 1 completions with 2 rewards"),
    ],
)
def test_bad_input_is_one_line(groups: list[Group], message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        pack(groups, 0, context_length=32)
    assert "\n" not in str(caught.value)


def test_a_completion_that_fills_the_context_fits() -> None:
    assert pack([GOOD], 0, context_length=7).tokens.shape == (1, 3)
    with pytest.raises(KeelError):
        pack([GOOD], 0, context_length=6)


@pytest.mark.parametrize("shared", [False, True])
def test_a_column_of_padding_changes_no_score(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where some lengths are padded because torch's masked attention is wrong at them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, num_key_value_heads=1, **sizes)).eval()
    packed = pack([Group(Problem("", ""), (4, 5, 6), (completion(7, 8), completion(9, 8, 7)))], 0, shared_prefix=shared)
    expected = score_tokens(model, packed).logp
    monkeypatch.setattr("keel.models.scorer.padding_columns", lambda ids: 1)
    found = score_tokens(model, packed).logp
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)
