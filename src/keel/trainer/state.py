"""The parts of a run (`TrainingRun`, built once) and its state between steps (`State`, plain data)."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from keel.base.errors import KeelError
from keel.base.types import Group
from keel.base.world import SINGLE_PROCESS, World
from keel.envs import Task
from keel.envs.curriculum import Curriculum
from keel.envs.options import CurriculumOptions, RewardOptions
from keel.kl import BetaController, KLOptions, KLState, Pairing
from keel.kl.measure import REFERENCE
from keel.kl.options import KLTermOptions
from keel.losses import LossOptions
from keel.models.options import LoadedModel
from keel.models.scorer import Scorer
from keel.reference import Reference
from keel.rollout import Engine
from keel.rollout.options import RolloutOptions
from keel.trainer.optim import Optimizer
from keel.trainer.options import GuardLimits, GuardOptions, OptimOptions
from keel.trainer.overlap import RolloutQueue

Collect = Callable[..., list[Group]]  # `Collector.collect(problems, attempt=…, step=…)` of keel.rollout.collect


@dataclass(frozen=True)
class Anchor:
    """A model with its own KL term: the reference, or an additional teacher."""

    name: str  # its name in metrics, see `kl.measure.metric_of`
    reference: Reference | None
    kl: KLTermOptions
    pairing: Pairing
    controller: BetaController


@dataclass
class TrainingRun:
    """The parts that a step uses.

    `reference` is None without a KL term, `teacher` without a second anchor, `scorer` with Keel's own pass and `queue`
    without sampling ahead.
    """

    policy: LoadedModel
    task: Task
    engine: Engine
    collect: Collect
    reference: Reference | None
    optimizer: Optimizer
    controller: BetaController
    loss: LossOptions
    kl: KLOptions
    pairing: Pairing
    rollout: RolloutOptions
    reward: RewardOptions
    optim: OptimOptions
    guards: GuardOptions
    limits: GuardLimits = field(default_factory=GuardLimits)
    seed: int = 0
    shared_prefix: bool = True
    amp_dtype: torch.dtype | None = None
    scorer: Scorer | None = None
    world: World = SINGLE_PROCESS
    queue: RolloutQueue | None = None
    teacher: Anchor | None = None
    curriculum: CurriculumOptions | None = None
    fitting_tokens: int | None = None  # tokens of the largest pass that fits in free memory, if known

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """All anchors, the reference first."""
        first = Anchor(REFERENCE, self.reference, self.kl, self.pairing, self.controller)
        return (first,) if self.teacher is None else (first, self.teacher)

    @property
    def microbatch_tokens(self) -> int:
        """The largest number of tokens in a pass: the option's value, or less if memory does not suffice."""
        return min(self.optim.microbatch_tokens, self.fitting_tokens or self.optim.microbatch_tokens)

    def close(self) -> None:
        """Close the sampling thread and the engine."""
        if self.queue is None or self.queue.close():
            self.engine.close()
        else:  # the thread is still sampling: close the engine at exit, after the thread ends
            atexit.register(self._close_late, self.queue)

    def _close_late(self, queue: RolloutQueue) -> None:
        queue.join()
        self.engine.close()

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision for the model's body; scores are always fp32."""
        if self.amp_dtype is None:
            return nullcontext()
        return torch.autocast(self.policy.device.type, dtype=self.amp_dtype)


@dataclass(frozen=True)
class Skipped:
    """Whether any or all updates of a step were skipped, and whether only spikes were the reason.

    `any` ignores fp16 overflows that only lower the loss scale: they are not a defect of the policy.
    """

    any: bool = False
    all: bool = False
    spikes: bool = False

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Skipped:
        """Read a step's metrics. If any of several updates is non-finite, the step counts as non-finite."""
        share = metrics["guard/skipped"]
        counted = share > metrics.get("guard/overflow", 0.0)
        return cls(counted, share >= 1.0, counted and metrics["guard/nonfinite"] == 0.0)


@dataclass(frozen=True)
class State:
    """The state of a run after `step` finished steps: plain data, saved in checkpoints.

    `kl` is the state of the controller of the reference's β. `other_kl` holds the states of further anchors by name,
    after their first update. `consecutive_skips` counts the last steps with a skipped update; `spike_skips` counts
    those that were skipped only for spikes. `confirmed` is the last step whose weights passed the next step's guards.
    `lr_factor` is the product of all rollbacks' learning-rate factors. `norms` are the gradient norms of the last
    applied updates. `data` is the digest of the task's data. `curriculum` holds decayed counts of the groups so far.
    `max_loss_scale` is set by a rollback until the next step: the fp16 loss scale continues at most there.
    """

    kl: KLState
    step: int = 0
    attempt: int = 0
    policy_version: int = 0
    consecutive_skips: int = 0
    spike_skips: int = 0
    rollbacks: int = 0
    tokens: int = 0
    wall_s: float = 0.0
    best: Mapping[str, float] | None = None
    before: tuple[Mapping[str, Any], ...] = ()
    evaluated: tuple[Mapping[str, Any], ...] = ()
    evaluated_at: int | None = None
    last_kl: Mapping[str, float] = field(default_factory=dict)
    confirmed: int = 0
    lr_factor: float = 1.0
    over_budget: bool = False
    norms: tuple[float, ...] = ()
    constant_rewards: int = 0
    zero_advantages: int = 0
    data: str | None = None
    other_kl: Mapping[str, KLState] = field(default_factory=dict)
    curriculum: Curriculum = field(default_factory=Curriculum)
    max_loss_scale: float | None = None

    @property
    def good(self) -> bool:
        """Whether the last step skipped no update but for fp16 overflows. A budget is handled before saving."""
        return self.consecutive_skips == 0

    @property
    def beta(self) -> float:
        return self.kl.beta

    def kl_of(self, anchor: Anchor) -> KLState:
        """The state of an anchor's controller."""
        return self.kl if anchor.name == REFERENCE else self.other_kl.get(anchor.name) or anchor.controller.init()

    def next(
        self,
        *,
        kl: Mapping[str, KLState],
        skipped: Skipped,
        tokens: int,
        last_kl: Mapping[str, float],
        curriculum: Curriculum | None = None,
    ) -> State:
        """The state after one more step. `kl` holds the controller state of each anchor."""
        return replace(
            self,
            kl=kl[REFERENCE],
            other_kl={name: own for name, own in kl.items() if name != REFERENCE},
            step=self.step + 1,
            policy_version=self.policy_version + int(not skipped.all),
            consecutive_skips=self.consecutive_skips + 1 if skipped.any else 0,
            spike_skips=self.spike_skips + int(skipped.spikes) if skipped.any else 0,
            tokens=self.tokens + tokens,
            last_kl=last_kl or self.last_kl,
            curriculum=curriculum or self.curriculum,
            max_loss_scale=None,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> State:
        try:
            lists = ("before", "evaluated", "norms")
            plain = {**data, **{name: tuple(data[name]) for name in lists if name in data}}
            others = {name: KLState.from_dict(own) for name, own in data.get("other_kl", {}).items()}
            curriculum = Curriculum.from_dict(data.get("curriculum", {}))
            kl = KLState.from_dict(data["kl"])
            return cls(**{**plain, "kl": kl, "other_kl": others, "curriculum": curriculum})
        except (TypeError, KeyError) as error:
            raise KeelError(f"the checkpoint's state does not fit this version of keel: {error}") from error


def step_seed(seed: int, state: State) -> int:
    """The seed of a step. It depends only on the run's seed, attempt and step."""
    return (seed * 1_000_003 + state.attempt * 10_007 + state.step) % 2**63
