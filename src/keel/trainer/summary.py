"""summary.json of a run, and the model card of a checkpoint: settings, measured KL, evaluation, code to load it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keel
from keel.base.files import read_records
from keel.base.redact import redact_text
from keel.loggers.rundir import EVENTS
from keel.models.head import is_lora
from keel.reference.weights import unwrap
from keel.trainer.state import State, TrainingRun


def summarise(
    task: str,
    state: State,
    findings: Sequence[Mapping[str, Any]] | None = None,
    reward_failures: Mapping[str, int] | None = None,
    kl: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Accuracy and held-out reward before and after, retention on other tasks, and the final policy's KL.

    `kl` are the metrics of the final policy. The default is the metrics of the last step, which describe the weights
    before its update. Accuracy is null for problems without answers. `findings` is null if the run was not examined.
    `reward_failures` is the number of failed calls per reward.
    """
    first, last = _trained(state.before), _trained(state.evaluated)
    before, after = _retention(state.before), _retention(state.evaluated)
    return {
        "task": task,
        "steps": state.step,
        "accuracy": {
            "before": first.get("pass@1"),
            "after": last.get("pass@1"),
            "ci95_before": first.get("ci95"),
            "ci95_after": last.get("ci95"),
        },
        "reward": {"before": first.get("reward"), "after": last.get("reward")},
        "retention": {
            name: {"before": before.get(name, {}).get("pass@1"), "after": after[name].get("pass@1")} for name in after
        },
        "kl": final_kl(kl or state.last_kl),
        "beta": state.beta,
        "wall_s": round(state.wall_s, 2),
        "findings": None if findings is None else sorted({str(finding["code"]) for finding in findings}),
        "reward_failures": dict(reward_failures or {}),
    }


def reward_failures(folder: Path) -> dict[str, int]:
    """The number of failed calls per reward, from the run's events, which also cover interrupted runs."""
    failed = [event for event in read_records(folder / EVENTS) if event.get("kind") == "reward/failed"]
    return dict(Counter(str(event["function"]) for event in failed if "function" in event))


def _trained(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The trained task's record. It is found by its split, because a retention task may have the same name."""
    return next((record for record in records if record.get("split") == "trained"), {})


def _retention(records: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {str(record["task"]): record for record in records if record.get("split") == "retention"}


def final_kl(measured: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """`{"k1": {"mean", "se"}, …}` of a measurement; missing metrics are left out."""
    figures: dict[str, dict[str, float]] = {}
    for name in ("k1", "k2", "k3", "exact", "sequence"):
        statistics = {part: measured.get(f"kl/policy_ref/{name}/{part}") for part in ("mean", "se")}
        if statistics["mean"] is not None:
            figures[name] = {part: value for part, value in statistics.items() if value is not None}
    return figures


_CARD = """---
{metadata}
---

# {name}, step {step}

`{model}` trained by GRPO with Keel {version} on the task `{task}`. The licence above is a placeholder: the
licence of the base model applies.

| | |
| --- | --- |
| finished steps | {step} |
| sampled tokens | {tokens:,} |
| loss | {loss} |
| KL penalty | {kl} |
| measured KL(policy‖reference) | {measured} |
| reference | {reference} |
{evaluation}
```python
{code}
```

`trainer/` holds the state for resuming (optimizer, reference, controller, random states). Inference does not use it.
"""

_HUB_NAME = re.compile(r"[\w.\-]+/[\w.\-]+")


def model_card(run: TrainingRun, state: State, about: Mapping[str, Any]) -> str:
    """The text of a checkpoint's README.md."""
    from huggingface_hub import ModelCardData

    lora = is_lora(unwrap(run.policy.model))
    base = str(about.get("model", run.policy.name))
    metadata = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        library_name="peft" if lora else "transformers",
        license="unknown",
        tags=["keel", "grpo", "reinforcement-learning"],
    )
    card = _CARD.format(
        metadata=metadata.to_yaml(),
        name=about.get("name", "run"),
        step=state.step,
        model=base,
        version=keel.__version__,
        task=run.task.name,
        tokens=state.tokens,
        loss=run.loss.loss_type,
        kl=_penalties(run, state),
        measured=_measured(state.last_kl),
        reference=_reference(run),
        evaluation=_evaluation(state),
        code=_adapter_code(base) if lora else MODEL_CODE,
    )
    return redact_text(card)


def _penalties(run: TrainingRun, state: State) -> str:
    """β, estimator and placement of each KL term."""
    terms = ((anchor, state.kl_of(anchor).beta) for anchor in run.anchors)
    acting = (
        f"β = {beta:g}, {anchor.kl.estimator} in the {anchor.kl.placement}"
        + (" (teacher)" if anchor is run.teacher else "")
        for anchor, beta in terms
        if beta
    )
    return "; ".join(acting) or "none (β = 0)"


def _reference(run: TrainingRun) -> str:
    """The kind of the reference, and the name of a teacher if there is one."""
    beside = None if run.teacher is None else run.teacher.reference
    teachers = [name for each in (run.reference, beside) if (name := getattr(each, "teacher", None)) is not None]
    return ", teacher ".join(["none" if run.reference is None else run.reference.kind, *teachers])


def is_hub_name(name: str) -> bool:
    """Whether a model's name has the form owner/name and is not a local folder."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).expanduser().exists()


def _measured(last: Mapping[str, float]) -> str:
    """Every estimator's mean with its standard error."""
    lines = []
    for name, figures in final_kl(last).items():
        error = f" ± {figures['se']:.5f}" if "se" in figures else ""
        unit = "nats per sequence (k1)" if name == "sequence" else f"nats per token ({name})"
        lines.append(f"{figures['mean']:.5f}{error} {unit}")
    return ", ".join(lines) or "not measured"


def _evaluation(state: State) -> str:
    """pass@1 of each task at the start and at the last evaluation, with 95 % intervals."""
    if not state.evaluated:
        return ""
    before = {_task(record): record for record in state.before}
    rows = [
        f"| {record['task']} ({record['split']}) | {_share(before.get(_task(record)))} | {_share(record)} |"
        for record in state.evaluated
    ]
    head = f"| pass@1 on held-out problems, % | before | step {state.evaluated_at} |\n| --- | --- | --- |"
    return "\n" + "\n".join((head, *rows)) + "\n"


def _task(record: Mapping[str, Any]) -> tuple[str, str]:
    return str(record["task"]), str(record["split"])


def _share(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "–"
    if "pass@1" not in record:  # prompts without answers
        return f"reward {record['reward']:.3f}"
    interval: Sequence[float] = record["ci95"]
    return f"{100 * record['pass@1']:.1f} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


MODEL_CODE = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")"""


def _adapter_code(base: str) -> str:
    return (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")'
    )
