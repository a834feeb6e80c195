"""The trainers that bench/results.py compares: each goes on from the supervised start until its minutes are over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.base.files import read_json, read_records
from keel.config import Config, load_config
from results_eval import Evaluator, free_memory
from results_page import Row, verdict

TRL_VERSION = "1.16.0"
ENDLESS = 1_000_000  # steps: the clock ends a run


@dataclass(frozen=True)
class Work:
    """One run: its job, where things lie, and its configuration from the supervised start on."""

    name: str
    trainer: str
    seed: int
    minutes: float
    out: Path
    start: Path
    config: Config
    whole: int
    choice_s: float = 0.0

    @property
    def folder(self) -> Path:
        return self.out / self.name / f"{self.trainer}-seed{self.seed}"


@dataclass
class Clock:
    """Seconds of training: from one step's end to the next one's, without what was evaluated between them.

    `rest` is what lies between two steps besides, of the last pair without an evaluation.
    """

    every: int
    seconds: float = 0.0
    at: dict[int, float] = field(default_factory=dict)
    _ended: float | None = None
    _rest: float = 0.0

    def tick(self, step: int, own: float, now: float) -> float:
        """Step `step`, which itself took `own` seconds, ended at `now`; returns the seconds so far."""
        if self._ended is not None and (step - 1) % self.every:
            self._rest = max(0.0, now - self._ended - own)
        self.seconds += own + self._rest
        self._ended = now
        self.at[step] = self.seconds
        return self.seconds


def trl_options(config: Config, rows: int = 128) -> dict[str, Any]:
    """GRPOConfig's options for the same training, `rows` completions a pass; what TRL's side cannot do is refused.

    One thing differs: TRL's warm-up begins with a step of rate 0, Keel's with the first rung above it.
    """
    from keel.losses.recipes import get_loss

    loss, rollout, optim, recipe = config.loss, config.rollout, config.optim, get_loss(config.loss.loss_type)
    shared: list[tuple[str, Any, Any]] = [
        ("kl.estimator", config.kl.estimator, "k3"),
        ("kl.controller.name", config.kl.controller.name, "fixed"),
        ("kl.placement", config.kl.placement, "loss"),
        ("kl.level", config.kl.level, "token"),
        ("kl.reduction", config.kl.reduction if config.kl.beta else "loss", "loss"),
        ("loss.dynamic_sampling", loss.dynamic_sampling, False),
        ("loss.baseline", loss.baseline, "group_mean"),
        ("loss.entropy_coef", loss.entropy_coef, 0.0),
        ("optim.minibatches", optim.minibatches, 1),
        ("optim.schedule", optim.schedule, "constant"),
        ("rewards", [part.model_dump() for part in config.rewards], [{"name": "task", "weight": 1.0}]),
        ("model.lora", config.model.lora, None),
    ]
    for option, value, needed in shared:
        if value != needed:
            raise SystemExit(
                f"bench/results.py: {option} is {value}: TRL's side needs {needed}, so that both do the same"
            )
    episodes = rollout.prompts_per_step * rollout.num_generations
    rows = min(rows, episodes)
    if episodes % rows or rows % rollout.num_generations:
        raise SystemExit(f"bench/results.py: {episodes} completions a step are not passes of {rows} whole groups")
    return {
        "seed": config.run.seed,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": episodes // rows,
        "num_generations": rollout.num_generations,
        "max_completion_length": rollout.max_completion_length,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p or None,
        "beta": config.kl.beta,
        "loss_type": loss.loss_type,
        "scale_rewards": loss.scale_rewards or recipe.scale_rewards,
        "epsilon": recipe.low if loss.epsilon is None else loss.epsilon,
        "epsilon_high": loss.epsilon_high or loss.epsilon or recipe.high,
        "num_iterations": loss.num_iterations,
        "mask_truncated_completions": loss.mask_truncated_completions,
        "learning_rate": optim.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optim.warmup_steps,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.max_grad_norm,
        "bf16": optim.precision == "bfloat16",
    }


# ------------------------------------------------------------------------------------------------ trainers


def run_keel(work: Work) -> tuple[list[Row], Path, dict[str, Any]]:
    """`keel train`, ended by the clock; its own evaluations are the curve."""
    import keel

    clock, began, startup = Clock(work.config.eval.every), time.perf_counter(), list[float]()

    def tick(state: Any, metrics: Mapping[str, float]) -> bool:
        now, own = time.perf_counter(), metrics["time/total_s"]
        startup[:] = startup or [now - began - own]
        return clock.tick(state.step, own, now) >= 60 * work.minutes

    run = [f"run.dir={json.dumps(str(work.folder))}", "run.name=run", "run.if_exists=replace"]
    result = keel.train(work.config, callbacks=[tick], overrides=[*run, f"run.max_steps={ENDLESS}"])
    free_memory()
    steps = read_records(result.directory / "metrics.jsonl")
    evaluations = [line for line in read_records(result.directory / "eval.jsonl") if line["split"] == "trained"]
    rows = curve(evaluations, steps, {0: 0.0, **clock.at})
    findings = read_json(result.directory / "findings.json")
    if findings is None:
        raise SystemExit(f"bench/results.py: {result.directory} was ended before the doctor saw it: run it again")
    more = {"startup_s": startup[0], "doctor": verdict(findings), "stopped": result.stopped}
    return rows, result.directory / "checkpoints" / f"step-{result.steps}", more


def curve(
    evaluations: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], at: Mapping[int, float]
) -> list[Row]:
    """A row an evaluation: reward and groups without spread are means of the steps since the one before, the KL is the
    last measured."""
    rows, before = list[Row](), 0
    for line in evaluations:
        step = int(line["step"])
        since = [s for s in steps if before < s["step"] <= step and "reward/mean" in s]
        measured = [
            s["kl/policy_ref/exact/mean"] for s in steps if s["step"] <= step and "kl/policy_ref/exact/mean" in s
        ]
        rows.append(
            {
                "wall_s": at[step],
                "step": step,
                "accuracy": line["pass@1"],
                "low": line["ci95"][0],
                "high": line["ci95"][1],
                "kl_exact": measured[-1] if measured else None,
                "reward": fmean(s["reward/mean"] for s in since) if since else None,
                "no_spread": fmean(s["reward/zero_variance_fraction"] for s in since) if since else None,
            }
        )
        before = step
    return rows


def run_trl(work: Work) -> tuple[list[Row], Path, dict[str, Any]]:
    """TRL's GRPOTrainer from the same start, on the same problems in the same order, judged by the same reward."""
    import torch
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from keel.doctor.examine import examine
    from keel.run.build import build_named_task

    if trl.__version__ != TRL_VERSION:
        raise SystemExit(f"bench/results.py: TRL is {trl.__version__}, the comparison is with {TRL_VERSION}")
    config, began, cuda = work.config, time.perf_counter(), torch.cuda.is_available()
    task, count = build_named_task(config.task, config), config.rollout.prompts_per_step
    steps = max(20, int(60 * work.minutes / 0.4))  # more than TRL can make
    problems = [p for step in range(steps) for p in task.sample(count, seed=config.run.seed, step=step)]

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        texts = [item if isinstance(item, str) else item[0]["content"] for item in completions]
        return [task.reward(problems[i], [text]).total for i, text in zip(number, texts, strict=True)]

    evaluator, evaluations = Evaluator(config, work.start), list[dict[str, Any]]()
    startup, at = list[float](), {0: 0.0}

    class Timer(TrainerCallback):
        """Stops the clock while the weights are evaluated."""

        def __init__(self) -> None:
            self.spent, self.since = 0.0, 0.0

        def look(self, step: int, model: Any) -> None:
            evaluator.take({name: tensor.detach() for name, tensor in model.state_dict().items()})
            evaluations.append({"step": step, **evaluator.measure()[0].record("trained")})

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 0:
                startup.append(time.perf_counter() - began)
                self.look(0, model)
            if state.global_step % config.eval.every == 0:
                self.since = now(cuda)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            ended = now(cuda)
            self.spent, self.since = self.spent + ended - self.since, ended
            at[state.global_step] = self.spent
            control.should_training_stop |= self.spent >= 60 * work.minutes
            if control.should_training_stop or state.global_step % config.eval.every == 0:
                self.look(state.global_step, model)

    output = work.folder / "trl"
    columns = {"prompt": [p.prompt for p in problems], "number": list(range(len(problems)))}
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work.start, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(work.start),
        reward_funcs=reward,
        args=trl.GRPOConfig(
            **trl_options(config) | {"bf16": cuda and config.optim.precision == "bfloat16"},
            output_dir=str(output),
            max_steps=steps,
            shuffle_dataset=False,
            gradient_checkpointing=False,  # Keel recomputes nothing either
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not cuda,
        ),
        # a fingerprint by name: computed from the data it pickles pyarrow, which not every environment can
        train_dataset=Dataset(InMemoryTable.from_pydict(columns), fingerprint=f"{work.name}-{work.seed}-{steps}"),
        callbacks=[Timer()],
    )
    trainer.train()
    trainer.save_state()
    trainer.save_model(str(work.folder / "model"))
    logged = [
        {**line, "reward/mean": line["reward"], "reward/zero_variance_fraction": line["frac_reward_zero_std"]}
        for line in trainer.state.log_history
        if "reward" in line
    ]
    findings = verdict(examine(output).as_dict()["findings"])
    evaluator.close()
    del trainer
    free_memory()
    return curve(evaluations, logged, at), work.folder / "model", {"startup_s": startup[0], "doctor": findings}


def now(cuda: bool) -> float:
    """The time, with all that was asked of the GPU done."""
    import torch

    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def run_sft(work: Work) -> tuple[list[Row], Path, dict[str, Any]]:
    """The supervised start learns on for the same time: ten steps are timed, and the decay ends with the minutes."""
    import torch

    from keel.run.build import build_policy, build_warmstart
    from keel.trainer.checkpoint import atomic_folder, save_weights
    from keel.trainer.sft import sft

    seconds, cuda, began = 60 * work.minutes + work.choice_s, torch.cuda.is_available(), time.perf_counter()
    times = list[float]()
    trial = load_config(work.config, ["warmstart.steps=15", "warmstart.warmup_steps=0"])
    loaded = build_policy(trial, work.start)
    sft(loaded, *build_warmstart(trial, loaded), lambda step, line: times.append(now(cuda)))
    steps = max(20, int(seconds * 10 / (times[-1] - times[4])))
    config = load_config(work.config, [f"warmstart.steps={steps}"])
    loaded, evaluator, evaluations = (
        build_policy(config, work.start),
        Evaluator(config, work.start),
        list[dict[str, Any]](),
    )
    at, startup = {0: 0.0}, time.perf_counter() - began
    every = max(1, min(config.eval.every, steps // 5))

    def look(step: int) -> None:
        evaluator.take(loaded.model.state_dict())
        evaluations.append({"step": step, **evaluator.measure()[0].record("trained")})

    def report(step: int, line: Mapping[str, float]) -> None:
        at[step] = at[step - 1] + now(cuda) - since[0]
        if step % every == 0 or step == steps:
            look(step)
        since[0] = now(cuda)

    look(0)
    since = [now(cuda)]
    sft(loaded, *build_warmstart(config, loaded), report)
    evaluator.close()
    with atomic_folder(work.folder / "model") as folder:
        save_weights(folder, loaded.model, loaded.tokenizer)
    return curve(evaluations, [], at), work.folder / "model", {"startup_s": startup}


TRAINERS: dict[str, Callable[[Work], tuple[list[Row], Path, dict[str, Any]]]] = {
    "keel": run_keel,
    "trl": run_trl,
    "sft": run_sft,
}
