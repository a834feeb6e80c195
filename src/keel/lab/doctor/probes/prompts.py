"""Prompts: no token twice at their head, other problems at every step, and none of those that are held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from keel.lab.doctor.bench import Bench
from keel.lab.doctor.findings import Finding, found
from keel.rollout.render import Renderer


def prompt_findings(bench: Bench) -> list[Finding]:
    """BOS at most once at the head of a prompt; a problem that is held out is not trained on."""
    findings = []
    bos = getattr(bench.policy.tokenizer, "bos_token_id", None)
    doubled = [group for group in bench.groups if bos is not None and group.prompt_tokens[:2] == (bos, bos)]
    if doubled:
        findings.append(
            found(
                "prompt/double-bos",
                f"{len(doubled)} of {len(bench.groups)} prompts begin with the BOS token twice",
                "the chat template writes BOS and the tokenizer or the task adds another",
                "take BOS out of the task's prompt or out of the chat template (data.chat_template)",
            )
        )
    findings += _repeats(bench)
    task, seed = bench.run.task, bench.config.run.seed
    trained = {str(p.prompt) for step in range(4) for p in task.sample(32, seed=seed, step=step)}
    shared = [problem for problem in task.held_out(32) if str(problem.prompt) in trained]
    if shared:
        findings.append(
            found(
                "eval/leak",
                f"{len(shared)} of 32 held-out problems turn up in the first 128 training problems, such as "
                f"{shared[0].key!r}",
                "task.sample returns problems that task.held_out keeps for evaluation",
                "keep the two apart, as keel.envs.Task asks",
            )
        )
    return findings


def _repeats(bench: Bench) -> Iterator[Finding]:
    """Steps must ask other problems than the steps before them."""
    count, seed = bench.config.rollout.prompts_per_step, bench.config.run.seed
    steps = [[str(p.prompt) for p in bench.run.task.sample(count, seed=seed, step=step)] for step in range(3)]
    asked = {prompt for prompts in steps for prompt in prompts}
    if len(asked) > 1 and len({frozenset(prompts) for prompts in steps}) > 1:
        return
    same = "one problem" if len(asked) == 1 else f"the same {len(asked)} problems"
    yield found(
        "task/repeats",
        f"steps 0, 1 and 2 ask {same} ({count} prompts a step), such as {steps[0][0]!r}",
        "task.sample ignores its step, or the task has no more problems than one step asks for",
        "draw problems by seed and step, as keel.envs.Task asks, or give the task more of them",
    )


def rendered(bench: Bench, problems: Sequence[Any]) -> list[tuple[int, ...]]:
    """The tokens of prompts as training renders them."""
    data = bench.config.data
    renderer = Renderer(bench.policy.tokenizer, chat_template=data.chat_template, system_prompt=data.system_prompt)
    return [renderer.prompt(problem) for problem in problems]
