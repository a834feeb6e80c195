"""A kernel with a race, for the test that the grid would find one: `_join_kernel` as Keel 0.2 had it.

It loads `lse` and stores the joined value in the same place. Several warps hold a copy of a value, and one of them may
store before another has loaded.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def join_in_place(
    out,
    lse,
    more,
    more_lse,
    in_completion,
    tokens,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if tl.load(in_completion + token):
        heads = tl.arange(0, HEAD_BLOCK)
        at = heads * tokens + token
        own = tl.load(lse + at, mask=heads < HEADS, other=0.0)
        other = tl.load(more_lse + at, mask=heads < HEADS, other=0.0)
        top = tl.maximum(own, other)
        joined = top + tl.log(tl.exp(own - top) + tl.exp(other - top))
        tl.store(lse + at, joined, mask=heads < HEADS)
        columns = tl.arange(0, SIZE_BLOCK)[None, :]
        cells = token * HEADS * SIZE + heads[:, None] * SIZE + columns
        inside = (heads[:, None] < HEADS) & (columns < SIZE)
        value = tl.load(out + cells, mask=inside, other=0.0).to(tl.float32) * tl.exp(own - joined)[:, None]
        value += tl.load(more + cells, mask=inside, other=0.0).to(tl.float32) * tl.exp(other - joined)[:, None]
        tl.store(out + cells, value, mask=inside)
