"""Which weights drew the completions? `python drawn.py faulty`: TRL samples from the weights of the start."""

import copy
import sys
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from keel.integrations.trl import DrawnCheck
from keel.models.tiny import tiny_model, tiny_tokenizer


class Stale(GRPOTrainer):
    """Samples from a copy that no update reaches, as a sampler does that is never synced."""

    start: Any = None

    def _generate_single_turn(self, *args: Any) -> Any:
        self.start = self.start or copy.deepcopy(self.model)
        self.model_wrapped, own = self.start, self.model_wrapped
        drawn = super()._generate_single_turn(*args)
        self.model_wrapped = own
        return drawn


def even(completion_ids: list[list[int]], **_: Any) -> Any:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


options: Any = {"per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 16, "max_steps": 6}
args = GRPOConfig(learning_rate=3e-3, use_cpu=True, bf16=False, report_to="none", save_strategy="no", **options)
rows = Dataset.from_dict({"prompt": [f"{n}+1=" for n in range(32)]})
kind = Stale if sys.argv[1:] == ["faulty"] else GRPOTrainer
trainer: Any = kind(tiny_model()[0], even, args, rows, processing_class=tiny_tokenizer())  # type: ignore[arg-type]
check = DrawnCheck(trainer, on_mismatch="warn")
trainer.add_callback(check)
trainer.train()
print(check.reports[-1])
sys.exit(any(report.stale for report in check.reports))
