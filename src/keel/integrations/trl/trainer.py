"""`KeelGRPOTrainer`: TRL's trainer with Keel's KL term, reference, controller and guards.

TRL generates, scores and computes its policy loss at β = 0. Keel adds its KL term to that loss. Before the optimizer's
step it decides whether to apply the update; after the step it updates β. The methods override those of TRL and
transformers, and some are private. `keel.integrations.versions` lists the supported TRL versions.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from keel.base.types import Scores
from keel.base.world import World
from keel.integrations.trl.rundir import KeelRunCallback, load_state, save_state
from keel.integrations.trl.scoring import (
    FORWARD,
    denominators,
    hidden_states,
    is_needed,
    keeping_base,
    of_completions,
    reference_of,
    rows_of,
    with_exact_kl,
)
from keel.integrations.trl.settings import (
    REDUCTIONS,
    check_args,
    controller,
    dropout_notes,
    mismatch_of,
    notes_on,
    pairing_of,
    settle,
)
from keel.integrations.trl.steps import Steps
from keel.integrations.trl.window import Generated, Pass, detached, gather, measure, on_host, shares
from keel.integrations.versions import TRL
from keel.kl import KLOptions
from keel.losses import kl_penalty
from keel.models.head import frozen_head, is_lora
from keel.reference.options import ReferenceOptions
from keel.reference.weights import unwrap
from keel.trainer.options import GuardOptions
from keel.trainer.state import State

logger = logging.getLogger("keel")


class KeelGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with Keel's options.

    `kl`, `guards` and `reference` are sections of a Keel configuration, as option objects or as mappings. β is
    `kl.beta`, or `GRPOConfig.beta` if `kl` does not set it. The reference is the initial policy.
    """

    args: Any
    model: Any
    optimizer: Any
    num_generations: Any
    _logs: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *positional: Any,
        kl: KLOptions | Mapping[str, Any] | None = None,
        guards: GuardOptions | Mapping[str, Any] | None = None,
        reference: ReferenceOptions | Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        TRL.check_names(GRPOTrainer)
        if args is not None:
            check_args(args)
            args = copy.copy(args)
        settings = settle(0.0 if args is None else args.beta, kl, guards, reference)
        if args is not None:
            pairing_of(settings.kl, args)  # refuse wrong pairings before a model is loaded
            args.beta = 0.0  # then TRL builds no reference, which would load another copy or add an adapter
        super().__init__(model, reward_funcs, args, *positional, **named)
        check_args(self.args)
        dropout = dropout_notes(settings, self.model)
        self.args.beta = settings.kl.beta  # saved arguments must show the β of the run
        self.keel = settings
        self.keel_pairing = pairing_of(settings.kl, self.args)
        self.keel_controller = controller(settings.kl, self.args)
        self.keel_state = State(kl=self.keel_controller.init())
        self.keel_stopped: str | None = None
        self._mismatch = mismatch_of(self.args)
        self._filtered = self.top_p < 1.0 or bool(self.top_k) or bool(self.min_p)
        self._world = World(self.accelerator.process_index, self.accelerator.num_processes)
        self._adapters = set(getattr(unwrap(self.model), "peft_config", ()))
        self.keel_reference = reference_of(self, settings.reference, exact=settings.kl.needs_exact)
        self._start = self.keel_reference.fingerprint()
        self._trained = False  # whether the policy was trained since the reference was created
        self._ref_head: Any = None
        if self.use_vllm and is_lora(unwrap(self.model)):
            sampler: Any = self.vllm_generation
            sampler.sync_weights = keeping_base(unwrap(self.model), sampler.sync_weights)
        self._batches = 0  # number of finished batches of rollouts; a moving reference counts these
        self._used_up = False  # whether a batch is finished and the reference not yet updated
        self._measured: float | None = None  # the last update's KL to the current reference
        self._generated = Generated()
        self._passes: list[Pass] = []
        self._scored: list[Tensor] | None = None
        self._evaluated: list[Pass] = []
        self._good: str | None = None  # the checkpoint to which a guard's stop returns
        callbacks = self.callback_handler.callbacks
        runs = [callback for callback in callbacks if isinstance(callback, KeelRunCallback)]
        self.keel_run = runs[0] if runs else KeelRunCallback()
        self.keel_run.settings = settings
        self.keel_run.notes = [*notes_on(settings.kl, self.keel_pairing, self.args), *dropout]
        if not runs:
            self.add_callback(self.keel_run)
        self._steps = Steps(self)
        self.add_callback(self._steps)

    # ------------------------------------------------------------------------------------------- reference

    def _move_reference(self, kl: float | None) -> None:
        """Update the reference between batches of rollouts, because a whole batch is scored with the same reference.

        Call it at the end of an update that finished a batch, or before a batch is generated within an update. `kl` is
        the KL of the last update.
        """
        self._measured = kl if kl is not None and math.isfinite(kl) else None
        if not self._used_up:
            return
        self._used_up = False
        if self.keel_reference.update(self.model, self._batches, self._measured):
            self._measured = None  # the measured KL was to the previous reference
            if self.keel_reference.reset_optimizer:
                self.optimizer.state.clear()

    def training_step(self, *args: Any, **named: Any) -> Any:
        loss = super().training_step(*args, **named)
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:  # TRL has counted this pass
            self._batches, self._used_up = self._batches + 1, True
        return loss

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self.model.training:
            self._move_reference(self._measured)  # a batch may have finished within an update
        output = super()._generate_and_score_completions(inputs)
        output["keel_row"] = torch.arange(len(output["prompt_ids"]), device=output["prompt_ids"].device)
        if self.model.training:
            self._generated = Generated(
                prompts=list(self._logs["prompt"]),
                rewards={name: list(values) for name, values in self._logs["rewards"].items()},
                weights=self.reward_weights.tolist(),
                advantages=list(self._logs["advantages"]),
                group_size=self.num_generations,
                rows=len(output["prompt_ids"]),
                number=self._batches,
            )
        passes = len(self._passes) + self.args.steps_per_generation * self.num_iterations
        updates = math.ceil(passes / self.args.gradient_accumulation_steps)  # includes an update that has begun
        if is_needed(self.keel.kl, self.state.global_step, updates):
            self._score_reference(output)
        return output

    @torch.no_grad()
    def _score_reference(self, output: dict[str, Any]) -> None:
        """Compute `ref_per_token_logps` of a batch and, for the exact KL, the reference's hidden states."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        length = output["completion_ids"].size(1)
        rows = self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
        beside = {name: output[name] for name in FORWARD if name in output}
        exact = self.keel.kl.needs_exact
        with (
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            self.keel_reference.model() as model,
        ):
            self._ref_head = frozen_head(model) if exact else None
            with hidden_states(model, wanted=exact) as states:
                logp, _, _ = self._get_per_token_logps_and_entropies(
                    model, ids, attention, length, batch_size=rows, **beside
                )
        output["ref_per_token_logps"] = logp
        if exact:
            output["ref_hidden"] = of_completions(states, length)

    # ------------------------------------------------------------------------------------------------ loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
        scored = super()._get_per_token_logps_and_entropies(*args, **named)
        if self._scored is not None:
            self._scored.append(scored[0])
        return scored

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's policy loss at β = 0 plus Keel's KL term, from the same pass."""
        kl, exact = self.keel.kl, self.keel.kl.needs_exact and "ref_hidden" in inputs
        self._scored = []
        try:
            with hidden_states(model, wanted=exact) as states:
                policy_loss = super()._compute_loss(model, inputs)
            (logp,) = self._scored
        finally:
            self._scored = None
        scores = Scores(logp)
        if exact:
            hidden = of_completions(states, logp.size(1))
            scores = with_exact_kl(scores, hidden, model, inputs, kl, self.temperature, self._ref_head)
        batch = rows_of(inputs, filtered=self._filtered)
        training = self.model.training
        by = denominators(self.args, kl, inputs, self.current_gradient_accumulation_steps if training else None)
        penalty, logged = kl_penalty(
            kl,
            self.keel_pairing,
            REDUCTIONS[self.args.loss_type],
            self.keel_state.beta,
            scores,
            batch,
            by,
            self._mismatch,
        )
        again = self._step % (self.args.steps_per_generation * self.num_iterations) >= self.args.steps_per_generation
        lengths = inputs["prompt_mask"].sum(1)
        done = Pass(batch, detached(scores), lengths, policy_loss.detach(), logged, inputs, self._generated, again)
        if training:
            self._passes.append(done)
        else:
            self._evaluated.append(on_host(done))
        return policy_loss + penalty

    # ----------------------------------------------------------------------------------------- measurement

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._steps.grad_norm = float(norm)
        return norm

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """Run TRL's evaluation and measure the KL once over all of its batches."""
        self._evaluated = []
        output = super().evaluation_loop(*args, **named)
        parts, self._evaluated = self._evaluated, []
        if parts:
            window = gather(shares(parts), self._world)
            own = {} if window is None else measure(window, self.keel.kl.log_ratio_clamp)
            for name, value in self._world.broadcast(own).items():
                self._metrics["eval"][name].append(value)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            self._steps.pool()
        super().log(logs, start_time)
        if self.model.training:
            self._steps.seen.clear()  # TRL has cleared its lists

    # ------------------------------------------------------------------------------- stops and checkpoints

    def train(self, *args: Any, **named: Any) -> Any:
        """Run TRL's `train`. After a guard's stop, the model has the weights of the last good checkpoint."""
        self.keel_stopped, self._good = None, None
        self.keel_state, self._batches = State(kl=self.keel_controller.init()), 0  # a checkpoint replaces both
        self._used_up, self._measured = False, None
        self._passes = []  # discard those of an interrupted run
        self._steps.begin()
        self._metrics["train"].clear()
        self._current_train_step_time = 0.0
        self._step, self._buffered_inputs = 0, None  # otherwise TRL would continue with the batch of the stopped run
        try:
            result = super().train(*args, **named)
        finally:
            self.keel_run.close()
        if self._good is not None:
            self._load_from_checkpoint(self._good)
        return result

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save TRL's checkpoint without a reference's adapter, which is not part of the policy."""
        model = unwrap(self.model)
        adapters = getattr(model, "peft_config", {})
        others = {name: adapters.pop(name) for name in list(adapters) if name not in self._adapters}
        try:
            super()._save(output_dir, state_dict)
        finally:
            adapters.update(others)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.keel_stopped is not None:  # save_strategy=epoch or best would save the weights that a guard stopped
            return
        if self.args.should_save:  # save before TRL's part: an interrupted save then lacks weights and is refused
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            save_state(folder, self.keel_state, self._batches, self.keel_reference, self._start, self.keel.kept)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self._trained = True
        saved = load_state(Path(checkpoint), self.keel_reference, self._start, self.keel.kept)
        if saved is None:
            logger.warning("%s is a checkpoint of plain TRL: Keel's controller and guards start anew", checkpoint)
            return
        self.keel_state, self._batches = saved
