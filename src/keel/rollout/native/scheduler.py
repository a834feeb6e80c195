"""The scheduler decides which rows run, join and leave, and the chunks of prefill. It reads counts only."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PREFILL_TOKENS = 16384  # prompts are prefilled in chunks of about this many tokens, to bound activations
RESUME_SCORES = 2**25  # attention scores in one chunk of a resumed context, to bound their memory
NOISE_AHEAD = 16  # positions whose noise is computed at once, to save small operations
JOIN_STEPS = 4.0  # cost of a join in decode steps: moving the KV cache
CPU_ROWS = 16  # with more rows, a CPU's step time is proportional to the rows, so empty slots cost little


@dataclass(frozen=True)
class Traits:
    """A decoder's capabilities: `joins` if rows can join, `graphed` if steps are CUDA graphs."""

    device: str = "cpu"
    joins: bool = False
    graphed: bool = False

    def join_steps(self, slots: int) -> float:
        """The cost of a join in decode steps; infinite if rows should not join."""
        if not self.joins or (self.device == "cpu" and slots > CPU_ROWS):
            return math.inf
        return JOIN_STEPS

    def computed(self, live: int) -> int:
        """The number of rows that a step computes if `live` rows are running."""
        return bucket(live) if self.graphed and live else live


def bucket(rows: int) -> int:
    """The graph size for this many rows: 8, 16, 32, 48, 64, 96, 128, 192 and so on."""
    power = max(8, 1 << (rows - 1).bit_length())
    return power * 3 // 4 if power >= 64 and rows <= power * 3 // 4 else power


def buckets(rows: int) -> list[int]:
    """The graph sizes that a rollout of this many rows uses, largest first."""
    return sorted({bucket(count) for count in range(1, rows + 1)}, reverse=True)


class Scheduler:
    """Schedules `rows` completions, of which at most `max_batch` (None: all) run at a time.

    `live` is the number of running rows. `rows` is the number that a step computes; it may include finished rows.
    """

    def __init__(self, rows: int, max_batch: int | None, traits: Traits) -> None:
        self.slots, self.traits = max_batch or rows, traits
        self.rows = self.live = 0
        self._idle_steps = 0.0  # sum over steps of the share of empty slots, since rows last joined

    @property
    def has_room(self) -> bool:
        """Whether slots have been empty long enough to fill them.

        A join moves the KV cache of the other rows. Rows join when empty slots have cost as much as a join. The total
        cost is then at most twice the cost of joining at the best time.
        """
        return not self.live or self._idle_steps >= self.traits.join_steps(self.slots)

    def admit(self, waiting: Iterable[int]) -> int:
        """The number of rows that join now. `waiting` are the numbers of rows of the waiting requests, in order.

        A request's rows join together, so that their prompt is prefilled once, unless they exceed the slots.
        """
        room, count = self.slots - self.live, 0
        for rows in waiting:
            if count + rows > room:
                count = room if not count and not self.live else count
                break
            count += rows
        else:
            self._idle_steps = 0.0  # no row waits, so empty slots cost nothing
        if count:
            self._idle_steps = 0.0
            self.live += count
            self.rows = self.traits.computed(self.live)
        return count

    def finish(self, count: int) -> bool:
        """Count finished rows; return whether the decoder should drop them now."""
        self.live -= count
        computed, before = self.traits.computed(self.live), self.rows
        self.rows = computed
        return computed < before

    def step(self) -> None:
        """Count a decode step and the cost of its empty slots."""
        self._idle_steps += 1 - self.live / self.slots


def prefill_chunks(prompts: int, width: int) -> list[int]:
    """The number of prompts in each chunk of prefill."""
    rows = max(1, PREFILL_TOKENS // width)
    return [min(rows, prompts - start) for start in range(0, prompts, rows)]


def resume_columns(rows: int, heads: int, columns: int) -> int:
    """Tokens per row in one chunk of a resumed prefill that attends over `columns` columns."""
    return max(1, RESUME_SCORES // (rows * heads * columns))


@dataclass(frozen=True)
class RolloutPasses:
    """The passes of a rollout: the numbers (prompts, rows) of each prefill, and the rows of each decode step."""

    prefills: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]


def simulate(requests: Sequence[tuple[int, int]], max_batch: int | None, traits: Traits) -> RolloutPasses:
    """Simulate the engine for requests of (completions, tokens each)."""
    waiting = deque((rows, length) for rows, length in requests if rows)
    scheduler = Scheduler(sum(rows for rows, _ in waiting), max_batch, traits)
    ends: Counter[int] = Counter()  # number of rows that end at each draw
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
