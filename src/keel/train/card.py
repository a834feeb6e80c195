"""The model card of a checkpoint: what it is, how it was made, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keel
from keel.models.lora import is_lora
from keel.reference.held import unwrap
from keel.train.state import Run, State

_CARD = """---
library_name: {library}
tags: [keel, grpo, reinforcement-learning]
{base}---

# {name}, step {step}

`{model}` trained by GRPO with [Keel](https://pypi.org/project/keel-rl/) {version} on the task `{task}`.

| | |
| --- | --- |
| finished steps | {step} |
| sampled tokens | {tokens:,} |
| loss | {loss} |
| KL penalty | {kl} |
| measured KL(policy‖reference) | {measured} |
| reference | {reference} |

```python
{code}
```

`trainer/` holds what resuming needs (optimizer, reference, controller, random states) and is not used for inference.
"""


def model_card(run: Run, state: State, about: Mapping[str, Any]) -> str:
    """README.md of a checkpoint."""
    lora = is_lora(unwrap(run.policy.model))
    measured = state.last_kl.get("kl/policy_ref/k3/mean")
    spec = run.kl.spec
    return _CARD.format(
        library="peft" if lora else "transformers",
        base=f"base_model: {run.policy.name}\n" if lora else "",
        name=about.get("name", "run"),
        step=state.step,
        model=about.get("model", run.policy.name),
        version=keel.__version__,
        task=run.task.name,
        tokens=state.tokens,
        loss=run.loss.loss_type,
        kl=f"β = {state.beta:g}, {spec.estimator} in the {spec.placement}" if state.beta else "none (β = 0)",
        measured="not measured" if measured is None else f"{measured:.5f} nats per token (k3)",
        reference="none" if run.reference is None else run.reference.kind,
        code=_adapter_code(about) if lora else MODEL_CODE,
    )


MODEL_CODE = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")"""


def _adapter_code(about: Mapping[str, Any]) -> str:
    return (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{about.get("model", "base model")}")\n'
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")'
    )
