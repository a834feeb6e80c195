"""Check combinations of options before a model loads: errors for those that cannot work, notes for surprising ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from keel.base.errors import KeelError
from keel.base.options import check_unread_options
from keel.base.parts import is_import_path
from keel.base.redact import secrets_in
from keel.config.schema import Config, TaskOptions
from keel.kl import KLOptions, Pairing, advise, check_kl, controller_from_options
from keel.kl.controllers import RuleController
from keel.kl.facts import over_vocabulary
from keel.kl.options import KLTermOptions, check_term
from keel.loggers.build import check_loggers
from keel.losses import check_loss, get_loss, scale_rewards
from keel.models.options import check_quantization
from keel.reference.base import is_server
from keel.reference.kinds import check_reference, check_teacher
from keel.trainer.options import check_optim, warmup_within
from keel.verify.custom import estimator_facts


def check(config: Config, *, installed: bool = True) -> None:
    """Raise a KeelError for a combination of options that cannot work. No model is loaded.

    `installed=False` skips the check for optional packages.
    """
    check_unread_options(config)
    for part in (_loss, _kl, _reference, _model, _rollout, _tasks, _evaluation):
        part(config)
    if installed:
        _packages(config)


def _packages(config: Config) -> None:
    """Check that optional packages are installed."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        return
    quantized = {section: params.get("quantization") for section, (_, params) in config.teachers.items()}
    for section, bits in {"model": config.model.quantization, **quantized}.items():
        if bits is not None:
            raise KeelError(f"{section}.quantization={bits} needs bitsandbytes: pip install bitsandbytes")
    if config.optim.optimizer == "adamw8bit":
        raise KeelError("optim.optimizer=adamw8bit needs bitsandbytes: pip install bitsandbytes, or use adamw")


def _loss(config: Config) -> None:
    loss, group = config.loss, config.rollout.num_generations
    check_loss(loss)
    if loss.policy_weight == 0:
        _check_distillation(config)
    if config.data.curriculum is not None and loss.baseline == "none":
        raise KeelError(
            "data.curriculum does not apply to loss.baseline=none, where equal rewards have a gradient: leave it out"
        )
    if group < 2 and loss.baseline != "none":
        raise KeelError(
            f"rollout.num_generations is {group}: loss.baseline={loss.baseline} compares the completions of a "
            "problem: set rollout.num_generations to 2 or more, or loss.baseline=none"
        )
    if group < 2 and scale_rewards(loss) == "group":
        raise KeelError("loss.scale_rewards=group needs several completions: set rollout.num_generations to 2 or more")
    if not get_loss(loss.loss_type).has_ratio and config.several_updates:
        raise KeelError(
            f"loss.loss_type={loss.loss_type} has no ratio, so it allows only one update per batch: set "
            "loss.num_iterations=1 and optim.minibatches=1, or use grpo"
        )
    if config.rollout.max_staleness > 0 and loss.mismatch.kind == "none":
        raise KeelError(
            f"rollout.max_staleness={config.rollout.max_staleness} with loss.mismatch.kind=none treats stale samples "
            "as on-policy: set loss.mismatch.kind=truncate, or rollout.max_staleness=0"
        )


def _check_distillation(config: Config) -> None:
    """Refuse loss.policy_weight=0 if the KL has no gradient, or together with options of the policy term."""
    terms = kl_terms(config.kl)
    if not any(term.penalizes for term in terms.values()):
        beta = [*terms][-1] + ".beta"
        raise KeelError(f"loss.policy_weight=0 trains on the KL alone, and {beta} is 0: set {beta}=1")
    elsewhere = "reference" in config.teachers or is_import_path(config.reference.kind)
    if not elsewhere and not (config.kl.teacher is not None and config.kl.teacher.penalizes):
        raise KeelError(
            "loss.policy_weight=0 trains on the KL alone, and the KL to the initial policy has no gradient: set "
            "reference.model to a teacher, or kl.teacher"
        )
    for option, given in (
        ("loss.dynamic_sampling", config.loss.dynamic_sampling),
        ("data.curriculum", config.data.curriculum is not None),
    ):
        if given:
            raise KeelError(f"{option} has no effect with loss.policy_weight=0, which ignores rewards: leave it out")
    in_reward = next((o for o, term in terms.items() if term.penalizes and term.placement == "reward"), None)
    if in_reward is not None and scale_rewards(config.loss) != "none":
        raise KeelError(
            f"{in_reward}.placement=reward with loss.scale_rewards={scale_rewards(config.loss)} divides the KL by the "
            "standard deviation of rewards, but loss.policy_weight=0 ignores rewards: set loss.scale_rewards=none or "
            f"{in_reward}.placement=loss"
        )


def kl_terms(kl: KLOptions) -> dict[str, KLTermOptions]:
    """The KL terms by section: `kl` for the reference and, if it is set, `kl.teacher`."""
    return {"kl": kl} if kl.teacher is None else {"kl": kl, "kl.teacher": kl.teacher}


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Prefix errors of a term other than `kl` with its section, since their messages name options of `kl`."""
    try:
        yield
    except KeelError as error:
        raise error if option == "kl" else KeelError(f"{option}: {error}") from None


def kl_pairing(config: Config, term: KLTermOptions | None = None, *, off_policy: bool | None = None) -> Pairing:
    """The checked pairing of a KL term (by default the reference's) under this loss.

    `off_policy` overrides `config.off_policy`.
    """
    term = term or config.kl
    return term.pairing(
        get_loss(config.loss.loss_type).reduction,
        off_policy=config.off_policy if off_policy is None else off_policy,
        facts=estimator_facts(term.estimator),
    )


def _kl(config: Config) -> None:
    kl = config.kl
    check_kl(kl, estimator_facts(kl.estimator))
    for option, term in kl_terms(kl).items():
        with _named(option):
            check_term(term, kl.measure_every, estimator_facts(term.estimator))
            kl_pairing(config, term)
            controller_from_options(term, config.episodes_per_step)
    if kl.budget is not None and kl.budget.action == "rollback" and config.guards.max_rollbacks == 0:
        raise KeelError(
            "kl.budget.action=rollback with guards.max_rollbacks=0 allows no rollback: set kl.budget.action=stop, or "
            "guards.max_rollbacks to 1 or more"
        )
    if kl.measure_every == 0 and config.reference.kind == "kl_triggered":
        raise KeelError("reference.kind=kl_triggered needs the measured KL, but kl.measure_every is 0: set it to 1")


def _reference(config: Config) -> None:
    check_reference(config.reference.kind, **config.reference.params)
    if len(config.teachers) > 1:
        raise KeelError(
            "kl.teacher needs a reference made from the initial policy, but reference.model is a teacher "
            "too: leave one of them out"
        )
    for section, (model, params) in config.teachers.items():
        check_teacher(section, model, **params)
        if is_server(model):
            _check_server(config, section)
    if config.reference.kind == "adapter_off" and config.model.lora is None:
        raise KeelError("reference.kind=adapter_off needs LoRA: set model.lora, or use reference.kind=frozen")


def _check_server(config: Config, section: str) -> None:
    """Refuse options that a teacher on a server does not support: it returns only its top tokens, at temperature 1."""
    option, term = ("kl.teacher", config.kl.teacher) if section == "kl.teacher" else ("kl", config.kl)
    assert term is not None
    if over_vocabulary(term.estimator) and not term.estimator.startswith("topk"):
        raise KeelError(
            f"{option}.estimator={term.estimator} needs the teacher's full distribution, but {section}.model is a "
            f"server, which returns its top tokens: use topk, topk_unbiased, or k1 with {option}.placement=advantage"
        )
    if term.exact:
        raise KeelError(
            f"{option}.exact needs the teacher's full distribution, but {section}.model is a server: leave it out"
        )
    if config.rollout.temperature != 1:
        raise KeelError(
            f"{section}.model is a server, whose log-probabilities are at temperature 1, but rollout.temperature is "
            f"{config.rollout.temperature:g}: set it to 1"
        )


def _model(config: Config) -> None:
    model = config.model
    if model.scorer != "native":
        from keel.models.scorer import build_scorer

        build_scorer(model.scorer)
        if any(term.needs_exact for term in kl_terms(config.kl).values()):
            raise KeelError(
                "the exact KL reads hidden states, which model.scorer does not return: use model.scorer=native, or "
                "kl.exact=false and a sampled estimator such as k3"
            )
    check_quantization(model)
    if model.quantization is not None and config.optim.offload:
        raise KeelError(
            "optim.offload has no effect with model.quantization, where only small adapters train: leave it out"
        )


def _rollout(config: Config) -> None:
    from keel.rollout.registry import check_rollout

    rollout = config.rollout
    check_rollout(rollout, placed=config.ray is not None)
    if config.optim.minibatches > rollout.prompts_per_step:
        raise KeelError(
            f"optim.minibatches is {config.optim.minibatches} but a step has {rollout.prompts_per_step} groups: set "
            "optim.minibatches to at most rollout.prompts_per_step"
        )
    check_optim(config.optim)


def task_specs(config: Config) -> Iterator[tuple[str, TaskOptions]]:
    """Yield every task of the configuration, with the option that names it."""
    yield "task", config.task
    for option, tasks in (("eval.tasks", config.eval.tasks), ("warmstart.task", _warmstart_tasks(config))):
        for index, task in enumerate(tasks):
            yield f"{option}[{index}]", TaskOptions(name=task) if isinstance(task, str) else task


def _warmstart_tasks(config: Config) -> tuple[TaskOptions | str, ...]:
    return config.warmstart.task if config.warmstart else ()


def _tasks(config: Config) -> None:
    from keel.envs.registry import check_data, check_task
    from keel.envs.rewards.registry import check_rewards

    for option, task in task_specs(config):
        try:
            check_task(task.name, task.params)
        except KeelError as error:
            raise KeelError(f"{option}: {error}") from None
    check_data(config.task, config.data)
    check_rewards(config.rewards)
    check_loggers(config.log)


def _evaluation(config: Config) -> None:
    temperature = config.rollout.temperature if config.eval.temperature is None else config.eval.temperature
    if temperature == 0 and max(config.eval.k) > 1:
        raise KeelError(
            f"eval.k includes pass@{max(config.eval.k)}, but at eval.temperature=0 all completions are equal: "
            "set eval.k=[1], or a temperature above 0"
        )


def advice(config: Config) -> list[str]:
    """Return one sentence for each allowed but surprising choice."""
    kl, notes = config.kl, []
    for option, term in kl_terms(kl).items():
        if not term.penalizes:
            continue
        pairing = kl_pairing(config, term)
        if pairing.expected_gradient != "policy||ref":
            notes.append(pairing.note if term is kl else f"{option}: {pairing.note}")
        scale = scale_rewards(config.loss)
        if term.placement == "reward" and scale != "none":
            notes.append(
                f"{option}.placement=reward with loss.scale_rewards={scale}: the penalty is divided by the standard "
                "deviation σ of the rewards, so the effective coefficient is β/σ. In groups with equal rewards σ is "
                f"that of the penalty and β cancels; set loss.scale_rewards=none or {option}.placement=advantage"
            )
    if kl.beta == 0 and kl.adapts_beta:
        controller = controller_from_options(kl, config.episodes_per_step)
        if isinstance(controller, RuleController) and (low := controller.bounds[0]) > 0:
            notes.append(f"kl.beta is 0: kl.controller.name={kl.controller.name} starts at kl.controller.low={low:g}")
    if "reference" not in config.teachers:
        notes += advise(config.loss.loss_type, kl.beta)
    notes += _warmups(config)
    if config.rollout.filtered:
        mismatch = config.loss.mismatch
        without = "without loss.mismatch" if mismatch.kind == "none" else "in the policy term at the sequence level"
        times = f", and twice that {without}" if mismatch.kind == "none" or mismatch.level == "sequence" else ""
        notes.append(
            "top_p, top_k or min_p truncate the sampling distribution: some tokens are never sampled. This biases an "
            "expectation at a state by at most the removed probability, 1 − rollout/kept_mass/mean, times its largest "
            f"value{times}. Use top_p=1.0, top_k=0 and min_p=0.0 for training"
        )
    if config.model.dropout or (config.model.lora is not None and config.model.lora.dropout > 0):
        notes.append("dropout is on: policy and reference differ from the first step, so the KL does not start at 0")
    if written := dict.fromkeys(name for name, _ in secrets_in(config.to_dict())):
        notes.append(
            f"{', '.join(written)} looks like a secret in plain text. It is masked in all output, but config.yaml "
            "stores it (readable only by you); write $NAME instead and set the environment variable"
        )
    return notes


def _warmups(config: Config) -> Iterator[str]:
    """Yield a note for each warm-up that is longer than its schedule."""
    steps = config.run.max_steps
    schedules = [("optim", config.optim, "run.max_steps", steps)]
    if config.warmstart is not None:
        schedules.append(("warmstart", config.warmstart.optim, "warmstart.steps", config.warmstart.steps))
    for section, optim, length, total in schedules:
        length, total = (f"{section}.decay_steps", optim.decay_steps) if optim.decay_steps else (length, total)
        used, asked = warmup_within(optim, total), f"{section}.warmup_steps is {optim.warmup_steps}"
        if used < optim.warmup_steps:
            yield f"{asked} but {length} is {total}: the warm-up is shortened to {used} steps, then the decay starts"
        elif used > total:
            yield f"{asked} but {length} is {total}: the run ends during the warm-up of the learning rate"
    others = {"reward.warmup_steps": (config.reward.warmup_steps, "the advantages")}
    for section, term in kl_terms(config.kl).items():
        if term.penalizes:
            name = "steps" if term.controller.name == "warmup" else "warmup_steps"
            others[f"{section}.controller.{name}"] = (term.controller.params.get(name, 0), "β")
    for option, (warmup, what) in others.items():
        if warmup > steps:
            yield f"{option} is {warmup} but run.max_steps is {steps}: the run ends during the warm-up of {what}"
