"""The scheduler: which rows share a pass, who joins, who leaves, what prefill costs; from counts alone."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PREFILL_TOKENS = 16384  # prompts are prefilled in chunks of about this many tokens, to bound activations
RESUME_SCORES = 2**25  # attention scores of one chunk of a resumed context, for the same reason
NOISE_AHEAD = 16  # positions whose noise is made at once: it costs many small operations
JOIN_STEPS = 4.0  # what a join costs: moving the KV cache
CPU_ROWS = 16  # with more slots a CPU's step costs by the row, and an empty slot hardly anything


@dataclass(frozen=True)
class Traits:
    """What a decoder can do: let rows join those running (`joins`), run decode steps as CUDA graphs (`graphed`)."""

    device: str = "cpu"
    joins: bool = False
    graphed: bool = False

    def join_steps(self, slots: int) -> float:
        """What it costs to let rows join those running, in decode steps; infinite where they never should."""
        if not self.joins or (self.device == "cpu" and slots > CPU_ROWS):
            return math.inf
        return JOIN_STEPS

    def computed(self, live: int) -> int:
        """The rows that a step computes for `live` of them."""
        return bucket(live) if self.graphed and live else live


def bucket(rows: int) -> int:
    """The rows of the graph that serves this many: 8, 16, 32, 48, 64, 96, 128, 192 and so on."""
    power = max(8, 1 << (rows - 1).bit_length())
    return power * 3 // 4 if power >= 64 and rows <= power * 3 // 4 else power


def buckets(rows: int) -> list[int]:
    """The graphs that a rollout of this many rows comes to use as they leave, largest first."""
    return sorted({bucket(count) for count in range(1, rows + 1)}, reverse=True)


class Scheduler:
    """Decides for `rows` completions, of which at most `max_batch` (None: all) run at a time.

    `live` counts the rows that run, `rows` those that a step computes: a graph's, of which some may have ended.
    """

    def __init__(self, rows: int, max_batch: int | None, traits: Traits) -> None:
        self.slots, self.traits = max_batch or rows, traits
        self.rows = self.live = 0
        self._idle_steps = 0.0  # decode steps times the share of empty slots, since rows last joined

    @property
    def has_room(self) -> bool:
        """Whether slots have been empty for long enough that filling them is worth it.

        Rows that join cost time: the KV cache of the others is moved. They join once the empty slots have cost as much,
        so that the two together are at most twice what the best moment would have cost.
        """
        return not self.live or self._idle_steps >= self.traits.join_steps(self.slots)

    def admit(self, waiting: Iterable[int]) -> int:
        """How many rows join now, of requests that wait with these many rows each, in their order.

        A request's rows join together, so that their prompt is prefilled once, unless they are more than the slots.
        """
        room, count = self.slots - self.live, 0
        for rows in waiting:
            if count + rows > room:
                count = room if not count and not self.live else count
                break
            count += rows
        else:
            self._idle_steps = 0.0  # nothing waits any more
        if count:
            self._idle_steps = 0.0
            self.live += count
            self.rows = self.traits.computed(self.live)
        return count

    def finish(self, count: int) -> bool:
        """Count rows that have ended; whether the decoder should drop them now."""
        self.live -= count
        computed, before = self.traits.computed(self.live), self.rows
        self.rows = computed
        return computed < before

    def step(self) -> None:
        """Count a decode step, and what its empty slots have cost."""
        self._idle_steps += 1 - self.live / self.slots


def prefill_chunks(prompts: int, width: int) -> list[int]:
    """Prompts of `width` tokens in each chunk of prefill."""
    rows = max(1, PREFILL_TOKENS // width)
    return [min(rows, prompts - start) for start in range(0, prompts, rows)]


def resume_columns(rows: int, heads: int, columns: int) -> int:
    """Tokens of each row in one chunk of a resumed prefill, attending over this many columns."""
    return max(1, RESUME_SCORES // (rows * heads * columns))


@dataclass(frozen=True)
class RolloutPasses:
    """The passes of a rollout: (prompts, rows) of each prefill, rows of each decode step."""

    prefills: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]


def simulate(requests: Sequence[tuple[int, int]], max_batch: int | None, traits: Traits) -> RolloutPasses:
    """What the engine will do for requests of these many completions with these many tokens each."""
    waiting = deque((rows, length) for rows, length in requests if rows)
    scheduler = Scheduler(sum(rows for rows, _ in waiting), max_batch, traits)
    ends: Counter[int] = Counter()  # rows by the draw that is their last
    draws, prefills, steps = 0, [], []
    while waiting or scheduler.live:
        joining = scheduler.admit(rows for rows, _ in waiting) if scheduler.has_room else 0
        prompts, left = 0, joining
        while left:
            rows, length = waiting.popleft()
            if rows > left:
                waiting.appendleft((rows - left, length))
            ends[draws + max(length, 1)] += min(rows, left)
            prompts, left = prompts + 1, left - min(rows, left)
        if joining:
            prefills.append((prompts, joining))
        draws += 1
        scheduler.finish(ends.pop(draws, 0))
        if scheduler.live:
            steps.append(scheduler.rows)
            scheduler.step()
    return RolloutPasses(tuple(prefills), tuple(steps))
