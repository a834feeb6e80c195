"""Data classes that all packages share; no logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Message = Mapping[str, str]  # role and content; a tool's message also has its name and the id of the call


@dataclass(frozen=True)
class Problem:
    """A problem: a key (equal for equal seeds), the prompt (text or chat messages) and the answer.

    `tools` are the JSON schemas of tools that the chat template writes into the prompt.
    """

    key: str
    prompt: str | Sequence[Message]
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt, possibly over several turns.

    `tokens` are all tokens after the prompt; `action` is true where the policy sampled the token (tool output and
    later user turns are false). `sample_logp` is the engine's log-probability at the sampling temperature before
    any filter, `filtered_logp` after top-p/top-k/min-p. Both are 0 where `action` is false. `stop_reason` is eos,
    stop, length, or `turns` if an episode reached its turn limit. `counts` are the episode's metrics, by logged name.
    `turns` has one record per turn, for `keel show` and the report: the number of sampled `tokens`, the number of
    tokens of the `reply`, the `stop_reason`, and the episode's `note`. `branches` are further contexts of the episode,
    if its program rewrote the history. A token that several branches share is trained once.
    """

    tokens: tuple[int, ...]
    action: tuple[bool, ...]
    sample_logp: tuple[float, ...]  # NaN if the engine does not report it, as some do under filters
    filtered_logp: tuple[float, ...]  # of the filtered distribution; NaN if the engine does not report it
    text: str
    stop_reason: str
    counts: Mapping[str, float] = field(default_factory=dict)
    policy_version: int | None = None  # of the weights that sampled it, if the engine reports it
    turns: tuple[Mapping[str, Any], ...] = ()
    branches: tuple[Completion, ...] = ()


@dataclass(frozen=True)
class Reward:
    """A completion's reward: the total, its named parts (before weights), and whether the answer could be parsed.

    `details` is the judge's output, such as each test's outcome, for `keel show` and the report.
    """

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    parsed: bool = True
    details: str = field(default="", compare=False)


@dataclass(frozen=True)
class RewardFailure:
    """A reward call that failed: the function, the problem, the completion and the cause."""

    function: str
    problem: str
    sample: int
    kind: str  # raised | invalid | timeout
    cause: str

    def __str__(self) -> str:
        return f"{self.function} on problem {self.problem!r}, completion {self.sample}: {self.cause}"


@dataclass(frozen=True)
class Group:
    """All completions of one problem: they share their prompt, and their rewards are compared with each other.

    `rewards` has one entry per completion once they are judged, and is empty before.
    """

    problem: Problem
    prompt_tokens: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[Reward, ...] = ()


@dataclass(frozen=True)
class Scores:
    """The results of one pass of the policy, each `[B, T]`, fp32, aligned to the token that it scores.

    `exact_kl` is KL(policy‖ref) over the vocabulary, `ref_policy_kl` is KL(ref‖policy). `divergence` is the penalty's
    divergence if it is neither of these.
    """

    logp: Tensor
    entropy: Tensor | None = None
    exact_kl: Tensor | None = None
    ref_policy_kl: Tensor | None = None
    divergence: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """The inputs of the losses: one right-padded row per completion. All tensors are `[B, T]` unless noted.

    `action_mask` is true only on tokens that the policy sampled. `policy_mask` (default: `action_mask`) selects the
    tokens of the policy term; the KL penalty applies to all action tokens. `kl_advantages` `[B]` is the contribution of
    a KL penalty in the reward, separate from the rewards' advantages. `group` `[B]` is the number of each row's group.
    `weight` `[B]` is a row's share of its episode's tokens, None if each row is an episode.
    `filtered_logp` is the log-probability under the filtered distribution (top-p, top-k, min-p), NaN where the engine
    did not report it. `stale` is true if the samples may come from a policy older than that of `old_logp`.
    """

    action_mask: Tensor
    advantages: Tensor | None = None
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    sample_logp: Tensor | None = None
    filtered_logp: Tensor | None = None
    policy_mask: Tensor | None = None
    rewards: Tensor | None = None
    group: Tensor | None = None
    kl_advantages: Tensor | None = None
    weight: Tensor | None = None
    stale: bool = False
