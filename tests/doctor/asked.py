"""A subject with known likelihoods: a task with ten answers and a model that knows them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from doctor.schooled import schooled_config
from keel.base.types import Completion, Group, Problem, Reward
from keel.doctor.keel_subject import KeelSubject
from keel.envs import Task
from keel.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from keel.rollout.sampling import SamplingParams

HEADER = "{{ '<|assistant|>' }}"
THOUGHT = CHAT_TEMPLATE.replace(HEADER, "{{ '<|assistant|><think>' }}")
SYSTEM = CHAT_TEMPLATE.replace("{% for", "{{ '<|system|>Today is Friday.' + eos_token }}{% for", 1)
SURE = 12.0  # nats over any other token
WRITTEN = Completion((1,), (True,), (0.0,), (0.0,), "", "eos")


class Triples(Task):
    """The numbers 0 to 99, each once. The answer is the last digit of three times the number plus one."""

    name = "triples"
    form = "{}"
    messages = True

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        texts = [(n, self.form.format(f"{n} =")) for n in range(min(count, 100))]
        prompts = [(n, [{"role": "user", "content": text}] if self.messages else text) for n, text in texts]
        return [Problem(str(n), prompt, triple(n % 10)) for n, prompt in prompts]

    def gold(self, problem: Problem) -> str:
        return str(problem.answer)


def triple(digit: int) -> str:
    return str((3 * digit + 1) % 10)


class Knowing(nn.Module):
    """Predicts `answers[last digit read]` unless a token in `irritating` was read. Before a digit, it is uniform.

    After a token in `follows`, it predicts the mapped token.
    """

    def __init__(self, size: int, answers: dict[int, int], irritating: set[int], follows: dict[int, int]) -> None:
        super().__init__()
        self.size, self.answers, self.irritating, self.follows = size, answers, irritating, follows

    def forward(self, input_ids: Any, **_: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, self.size)
        for row, tokens in enumerate(input_ids.tolist()):
            for i, token in enumerate(tokens):
                digits = [self.answers[t] for t in tokens[: i + 1] if t in self.answers]
                if token in self.follows:
                    logits[row, i, self.follows[token]] = SURE
                elif digits and not self.irritating & set(tokens[: i + 1]):
                    logits[row, i, digits[-1]] = SURE
        return SimpleNamespace(logits=logits)

    def get_output_embeddings(self) -> Any:
        return SimpleNamespace(weight=torch.zeros(self.size, 1))


class Asked(KeelSubject):
    """Completions earn `earning(prompt)` whatever is sampled. Without `earning`, there are no rewards."""

    earning: Any = None

    def lacks(self, power: Any) -> str:
        return "no judge" if power == "rewards" and self.earning is None else ""

    def collect(self, problems: Any = None, **how: Any) -> list[Group]:
        return self.judged(problems, generations=how["sampling"].num_generations)

    def judged(self, problems: Sequence[Problem], *, generations: int, step: int = 0) -> list[Group]:
        earned = [Reward(float(self.earning(self.prompt(problem)))) for problem in problems]
        return [
            Group(p, (), (WRITTEN,) * generations, (reward,) * generations)
            for p, reward in zip(problems, earned, strict=True)
        ]


def asked(
    template: str = CHAT_TEMPLATE,
    irritating: str = "",
    follows: tuple[str, ...] = (),
    *overrides: str,
    off: int = 0,
    form: str = "{}",
    messages: bool = True,
    model: Any = None,
    earning: Any = None,
) -> Asked:
    """`irritating`: characters or one special token. `off`: an offset that is added to the model's token ids."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    answers = {ids(str(d))[0] + off: ids(triple(d))[0] + off for d in range(10)}
    chain = [ids(text)[0] for text in follows]
    knowing = Knowing(len(tokenizer), answers, set(ids(irritating)), dict(pairwise(chain)))
    task = Triples()
    task.form, task.messages = form, messages
    policy = SimpleNamespace(
        model=knowing if model is None else model(knowing),
        tokenizer=tokenizer,
        context_length=None,
        pad_id=tokenizer.pad_token_id,
        eos_ids=(tokenizer.eos_token_id,),
        device="cpu",
    )
    config = schooled_config(*(overrides or ("data.chat_template=default",)))
    sampling = SamplingParams(num_generations=1, max_completion_length=4)
    judge = SimpleNamespace(remote=[], failures=[], asked={}, drain=lambda: ())
    built: Any = SimpleNamespace(run=SimpleNamespace(task=task, policy=policy), judge=judge, sampling=sampling)
    subject = Asked(config, built, SimpleNamespace(groups=()))  # type: ignore[arg-type]
    if earning is not None:
        vars(subject)["earning"] = earning
        vars(subject)["batch"] = SimpleNamespace(groups=tuple(subject.judged(subject.problems(4), generations=1)))
    return subject
