"""`KeelGRPOTrainer`: TRL's trainer with Keel's KL term, reference, controller and guards in place of its own.

TRL generates, scores and computes its policy loss at β = 0; Keel adds its KL term to that loss, decides before the
optimizer's step whether the update is made, and after it what β is next. What each method overrides is TRL's or
transformers' own, and partly private: `versions.TESTED` says which TRL it was written against.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head

from keel.base.thresholds import thresholds_of
from keel.base.types import Scores
from keel.base.world import World
from keel.integrations.trl.checkpoint import good_checkpoints, load_state, save_state
from keel.integrations.trl.records import Generated, rollout_records, skipped_record
from keel.integrations.trl.rundir import KeelRunCallback
from keel.integrations.trl.scoring import (
    FORWARD,
    denominators,
    hidden_states,
    loss_reduction,
    of_completions,
    rows_of,
    with_exact_kl,
)
from keel.integrations.trl.settings import (
    check_args,
    controller,
    mismatch_of,
    notes_on,
    pairing_of,
    settle,
)
from keel.integrations.trl.versions import check_names
from keel.integrations.trl.window import Pass, Update, Window, detached, gather, measure
from keel.kl import KLOptions
from keel.lab.doctor.names import TRAINERS
from keel.losses import kl_penalty
from keel.models.head import causal_lm, frozen_head, head_of
from keel.models.load import LoadedModel
from keel.reference import build_reference
from keel.reference.options import ReferenceOptions
from keel.reference.weights import unwrap
from keel.trainer.guards import (
    GuardViolation,
    find_violation,
    first_nonfinite,
    judged_state,
    no_signal_events,
    over_budget,
    spike_limit,
)
from keel.trainer.measure import peak_gib
from keel.trainer.options import GuardOptions
from keel.trainer.state import Skipped, State
from keel.trainer.step import controlled_kl

logger = logging.getLogger("keel")


class KeelGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with Keel's options: `kl`, `guards` and `reference` are the sections of a Keel configuration, as
    their classes or as mappings.

    β is `kl.beta`, or `GRPOConfig.beta` where `kl` does not name it. The reference is the policy as it is given here.
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
        check_names(GRPOTrainer)
        if args is not None:
            check_args(args)
            args = copy.copy(args)
        settings = settle(0.0 if args is None else args.beta, kl, guards, reference)
        if args is not None:
            pairing_of(settings.kl, args)  # what is refused is refused before a model is loaded
            args.beta = 0.0  # TRL shall build no reference: it would load another copy, or add an adapter
        super().__init__(model, reward_funcs, args, *positional, **named)
        check_args(self.args)
        self.args.beta = settings.kl.beta  # what is saved says what was trained
        self.keel = settings
        self.keel_pairing = pairing_of(settings.kl, self.args)
        self.keel_controller = controller(settings.kl, self.args)
        self.keel_state = State(kl=self.keel_controller.init())
        self.keel_stopped: str | None = None
        self._thresholds = thresholds_of({"guards": settings.guards.model_dump()})
        self._mismatch = mismatch_of(self.args)
        self._filtered = self.top_p < 1.0 or bool(self.top_k) or bool(self.min_p)
        self._world = World(self.accelerator.process_index, self.accelerator.num_processes)
        self._adapters = set(getattr(unwrap(self.model), "peft_config", ()))
        self._build_reference()
        self._batches = 0  # of rollouts, which is what a moving reference counts
        self._generated = Generated()
        self._passes: list[Pass] = []
        self._scored: list[Tensor] | None = None
        self._update: Update | None = None
        self._logged: dict[str, int] = {}
        callbacks = self.callback_handler.callbacks
        runs = [callback for callback in callbacks if isinstance(callback, KeelRunCallback)]
        self.keel_run = runs[0] if runs else KeelRunCallback()
        self.keel_run.settings, self.keel_run.notes = settings, notes_on(settings.kl, self.keel_pairing, self.args)
        if not runs:
            self.add_callback(self.keel_run)
        self.add_callback(_Steps(self))

    # ------------------------------------------------------------------------------------------- reference

    def _build_reference(self) -> None:
        """The reference of the policy as it is now; a copy of it is given TRL's head of its own."""
        options, tokenizer = self.keel.reference, self._tokenizer
        loaded = LoadedModel(
            model=self.model,
            tokenizer=tokenizer,
            name=str(getattr(self.model.config, "_name_or_path", "")),
            context_length=None,
            eos_ids=tuple(self.eos_token_ids),
            pad_id=tokenizer.pad_token_id,
            device=self.accelerator.device,
            dtype=self.model.dtype,
        )
        self.keel_reference = build_reference(options.kind, loaded, **options.params)
        with self.keel_reference.model() as model:
            inner = causal_lm(model)
            if inner is not causal_lm(self.model):
                inner.__dict__.pop("forward", None)  # the policy's: it would run the policy
                add_fused_lm_head(
                    inner, temperature=self.temperature, cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32
                )
            if self.keel.kl.needs_exact:  # measured now: later accelerate runs the forward in mixed precision
                head_of(model), head_of(self.model)
        self._start = self.keel_reference.fingerprint()
        self._ref_head: Any = None

    def _needs_reference(self) -> bool:
        """Whether the next batch of rollouts is penalized or measured at any of its updates."""
        kl, step = self.keel.kl, self.state.global_step
        updates = max(1, self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps)
        return kl.penalizes or any(kl.measures(step + ahead) for ahead in range(updates))

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        output["keel_row"] = torch.arange(len(output["prompt_ids"]), device=output["prompt_ids"].device)
        if self.model.training:
            self._batches += 1
            self._generated = Generated(
                prompts=list(self._logs["prompt"]),
                rewards={name: list(values) for name, values in self._logs["rewards"].items()},
                weights=self.reward_weights.tolist(),
                advantages=list(self._logs["advantages"]),
                group_size=self.num_generations,
            )
        if self._needs_reference():
            self._score_reference(output)
        return output

    @torch.no_grad()
    def _score_reference(self, output: dict[str, Any]) -> None:
        """`ref_per_token_logps` of a batch, and for the exact KL the reference's hidden states."""
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
        """TRL's policy loss, which it computes at β = 0, and Keel's KL term on the same pass."""
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
            loss_reduction(self.args),
            self.keel_state.beta,
            scores,
            batch,
            by,
            self._mismatch,
        )
        done = Pass(batch, detached(scores), policy_loss.detach(), logged, inputs)
        if training:
            self._passes.append(done)
        else:
            for name, value in measure(gather([done], self._world), kl.log_ratio_clamp).items():
                self._metrics["eval"][name].append(value)
        return policy_loss + penalty

    # -------------------------------------------------------------------------------------- guarded update

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._grad_norm = float(norm)
        return norm

    def _before_update(self) -> None:
        """Look at the update's numbers, and take the gradients away where it is not to be made."""
        window = gather(self._passes, self._world)
        line = measure(window, self.keel.kl.log_ratio_clamp)
        norm, guards, limit = self._grad_norm, self.keel.guards, spike_limit(self.keel_state.norms, self._thresholds)
        finite = math.isfinite(norm) and math.isfinite(window.loss)
        spike = finite and limit is not None and norm > limit
        applied = self._world.agree(finite and not (spike and guards.on_spike == "skip"))
        if not applied:
            for parameter in self.model.parameters():
                parameter.grad = None  # an optimizer passes over what has no gradient, its moments too
        most = self.args.max_grad_norm
        clip = min(1.0, most / norm) if applied and most and norm > 0 else float(applied)
        line |= {
            "grad/norm": norm,
            "grad/clip_factor": clip,
            "optim/learning_rate": self._get_learning_rate(),
            "guard/skipped": float(not applied),
            "guard/nonfinite": float(not finite),
            "guard/spike": float(spike),
            "guard/rollbacks": 0.0,
            "kl/beta": self.keel_state.beta,
        }
        self._update = Update(window, line, applied)
        # the schedule of the learning rate waits for an update that was made, as fp16's scaler lets it
        self.optimizer._is_overflow = False

    def _after_update(self) -> None:
        assert self._update is not None
        if not self._update.applied:
            self.optimizer._is_overflow = True

    def _end_of_step(self, control: Any) -> None:
        """Steer β, move the reference, log, and stop where a guard says so."""
        assert self._update is not None
        window, before = self._update.window, self.keel_state
        line = self._world.agree({**self._own_metrics(window), **self._update.line})
        line["guard/over_budget"] = float(over_budget(line, self.keel.kl.budget) is not None)
        last_kl = {name: value for name, value in line.items() if name.startswith("kl/policy_ref/")}
        steered = self.keel_controller.update(before.kl, controlled_kl(line, self.keel_controller.unit))
        state = before.next(kl=steered, skipped=Skipped.of(line), tokens=window.tokens, last_kl=last_kl)
        state = replace(state, step=self.state.global_step)
        self.keel_state = judged_state(
            state,
            line,
            self.keel.kl.budget,
            applied_norms=[line["grad/norm"]] if self._update.applied else [],
            constant=line.get("reward/std") == 0.0,
            silent=line.get("reward/zero_variance_fraction") == 1.0,
        )
        if "reward/std" not in line:  # an update on rewards that were counted before
            constant, silent = before.constant_rewards, before.zero_advantages
            self.keel_state = replace(self.keel_state, constant_rewards=constant, zero_advantages=silent)
        self._move_reference(line)
        self._log_step(line, before)
        violation = find_violation(self.keel_state, line, self.keel.guards, self.keel.kl.budget)
        if violation is not None and violation.code == "kl/over-budget" and not before.over_budget:
            self._event(violation.code, violation.message)
        if violation is not None and violation.action != "warn":
            self._stop(violation, control)
        self._passes, self._update = [], None

    def _own_metrics(self, window: Window) -> dict[str, float]:
        """What TRL has measured of this update, under Keel's names; means of what it has listed since the last one."""
        metrics: dict[str, float] = {}
        for name, values in self._metrics["train"].items():
            fresh = [value for value in values[self._logged.get(name, 0) :] if not math.isnan(value)]
            known = TRAINERS["TRL"].find(name)
            if name == "step_time" and fresh:
                metrics["time/total_s"] = sum(fresh)
                metrics["speed/tokens_per_s"] = window.tokens / max(sum(fresh), 1e-9)
            elif fresh and known is not None and not known[1].keel.startswith("other/"):
                metrics[known[1].keel] = known[1].factor * sum(fresh) / len(fresh)
            self._logged[name] = len(values)
        return {**metrics, "memory/peak_gib": peak_gib(self.accelerator.device)}

    def _move_reference(self, line: Mapping[str, float]) -> None:
        """Let the reference move between batches of rollouts, which are scored with it as a whole."""
        if self._step % (self.args.steps_per_generation * self.num_iterations) != 0:
            return
        kl = line.get("kl/policy_ref/k3/mean")
        known = kl if kl is not None and math.isfinite(kl) else None
        moved = self.keel_reference.update(self.model, self._batches, known)
        if moved and self.keel_reference.reset_optimizer:
            self.optimizer.state.clear()

    # ------------------------------------------------------------------------------------ what is recorded

    def _log_step(self, line: Mapping[str, float], before: State) -> None:
        """Keel's metrics to TRL's log, a complete line to the run directory, and the batch of a skipped update."""
        step = self.state.global_step
        assert self._update is not None
        for name in (*self._update.line, "guard/over_budget"):  # the others TRL logs itself, under its names
            self._metrics["train"][name].append(line[name])
            self._logged[name] = len(self._metrics["train"][name])
        skipped = not self._update.applied
        batches = self._world.gather(skipped_record(self._passes, self._tokenizer)) if skipped else []
        if not self._world.leads:
            return
        self.keel_run.step(step, line)
        self.keel_run.state = self.keel_state
        records = rollout_records(self._passes, self._generated, self._tokenizer, self.eos_token_ids)
        self.keel_run.rollouts(step, records)
        if line["guard/spike"]:
            limit = spike_limit(before.norms, self._thresholds) or math.nan
            median = limit / self._thresholds["grad_spike"]
            message = f"the gradient norm {line['grad/norm']:.4g} is {line['grad/norm'] / median:.3g} × the running "
            self._event("guard/spike", message + f"median {median:.4g}")
        if skipped:
            window = self._update.window
            rows = replace(window.batch, old_logp=window.scores.logp)
            first = first_nonfinite(rows, line, None) if line["guard/nonfinite"] else None
            cause = f"the {first or 'gradient norm'} is not finite" if line["guard/nonfinite"] else "a gradient spike"
            completions = [completion for batch in batches for completion in batch]
            self.keel_run.skipped(
                step, {"step": step, "first_nonfinite": first, "metrics": dict(line), "completions": completions}, cause
            )
        for kind, message in no_signal_events(self.keel_state, self.keel.guards) if "reward/std" in line else ():
            self._event(kind, message)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if self.model.training:
            self._logged.clear()  # as TRL has cleared its lists

    def _event(self, kind: str, message: str, **more: Any) -> None:
        if self._world.leads:
            self.keel_run.event(kind, step=self.state.global_step, message=message, **more)
            logger.warning("%s: %s", kind, message)

    # ------------------------------------------------------------------------------- stops and checkpoints

    def _stop(self, violation: GuardViolation, control: Any) -> None:
        """End training at the last good checkpoint; what is there now is not saved."""
        control.should_training_stop, control.should_save = True, False
        good = next(good_checkpoints(Path(self.args.output_dir), self.keel_state.confirmed), None)
        self._good = self._world.agree(None if good is None else str(good))
        if self._good is None:
            outcome = "the run stops, without a good checkpoint to go back to: lower save_steps"
        else:
            outcome = (
                f"the run stops at its last good checkpoint, {Path(self._good).name}; go on from there with: "
                f"trainer.train(resume_from_checkpoint={self._good!r})"
            )
        self.keel_stopped = f"{violation.message}: {outcome}"
        self._event("stop", self.keel_stopped, code=violation.code)
        if self._world.leads:
            print(self.keel_stopped, flush=True)

    def train(self, *args: Any, **named: Any) -> Any:
        """TRL's `train`; after a guard's stop the model has the weights of the last good checkpoint."""
        self.keel_stopped, self._good = None, None
        self._passes, self._update, self._logged = [], None, {}  # of a run that was interrupted
        self._step, self._buffered_inputs = 0, None  # TRL would go on with the batch that it was stopped at
        try:
            result = super().train(*args, **named)
        finally:
            self.keel_run.close()
        if self._good is not None:
            self._load_from_checkpoint(self._good)
        return result

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """TRL's checkpoint; a reference that is a second adapter is not a part of the policy."""
        model = unwrap(self.model)
        adapters = getattr(model, "peft_config", {})
        others = {name: adapters.pop(name) for name in list(adapters) if name not in self._adapters}
        try:
            super()._save(output_dir, state_dict)
        finally:
            adapters.update(others)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.keel_stopped is not None:  # save_strategy=epoch or best would save what the guard has stopped
            return
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            save_state(folder, self.keel_state, self._batches, self.keel_reference, self._start)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        saved = load_state(Path(checkpoint), self.keel_reference, self._start)
        if saved is None:
            logger.warning("%s is a checkpoint of plain TRL: Keel's controller and guards begin anew", checkpoint)
            return
        self.keel_state, self._batches = saved


class _Steps(TrainerCallback):
    """The moments of a step at which the trainer looks at it."""

    def __init__(self, trainer: KeelGRPOTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.trainer._before_update()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.trainer._after_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.trainer._end_of_step(control)


__all__ = ["KeelGRPOTrainer"]
