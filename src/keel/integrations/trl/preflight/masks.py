"""Check which tokens are trained: compare masks and the loss's gradient with the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from trl.data_utils import is_conversational

from keel.doctor.findings import Finding, finding
from keel.doctor.rendering import own_template, turn_marks
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.subject import TrlSubject, signs
from keel.integrations.trl.scoring import action_mask


def measure_masks(subject: TrlSubject) -> Outcome:
    """Masks, ends, and ∂loss/∂logp: zero where nothing was sampled, another number where something was."""
    sampled, trained = subject.of_batch_width(subject.sampled), action_mask(subject.batch)
    expected = sampled
    if subject.trainer.mask_truncated_completions:
        whole = [c.tokens[-1:] in {(i,) for i in _ids_of_ends(subject)} for g in subject.groups for c in g.completions]
        expected = sampled & torch.tensor(whole, device=sampled.device)[:, None]
    figures = {
        "completion_tokens": float(sampled.sum()),
        "trained_tokens": float(trained.sum()),
        "left_out_of_turns": float((expected & ~trained).sum()),
    }
    findings = [*_mask_tensor(expected, trained), *([] if subject.tools else _ends(subject))]
    if not bool(expected.any()):
        findings.append(
            finding(
                "output/truncated",
                f"all {len(expected)} completions end at max_completion_length="
                f"{subject.trainer.max_completion_length}, and mask_truncated_completions leaves each of them out",
                "no token of the batch is trained",
                "raise max_completion_length, or train the model to end first",
            )
        )
    unchecked: list[str] = []
    if why := subject.lacks("loss"):
        unchecked.append(f"loss/*: {why}")
    else:
        findings += _gradient(subject, expected, unchecked, had=bool(findings))
    lines = (f"masks: {int(trained.sum())} of {int(sampled.sum())} sampled tokens are trained",)
    return Outcome("masks", tuple(findings), figures, lines, tuple(unchecked))


def _ids_of_ends(subject: TrlSubject) -> set[int]:
    return {*subject.policy.eos_ids, subject.policy.pad_id}


def _mask_tensor(expected: Tensor, trained: Tensor) -> Iterator[Finding]:
    foreign, missing = int((trained & ~expected).sum()), int((expected & ~trained).sum())
    if foreign or missing:
        empty = int((expected.any(1) & ~trained.any(1)).sum())
        whole = f"; {empty} completions have no trained token" if empty else ""
        yield finding(
            "mask/not-actions",
            f"of {int(trained.sum())} trained tokens {foreign} were not sampled, and of {int(expected.sum())} that "
            f"were {missing} are not trained{whole}",
            "the mask that the loss gets is not that of the sampled tokens",
            "leave completion_mask (and tool_mask) as GRPOTrainer makes them, or fix the method that changes them: 1 "
            "on sampled tokens up to and with the end token, 0 elsewhere",
        )


def _ends(subject: TrlSubject) -> Iterator[Finding]:
    """Find text after an end token, and a template whose end token ends no completion.

    With tools, every turn has its own end token.
    """
    trainer, texts = subject.trainer, [c.tokens for group in subject.groups for c in group.completions]
    named = getattr(trainer.model.generation_config, "eos_token_id", None)
    declared = {*(named if isinstance(named, list) else [named]), trainer._tokenizer.eos_token_id} - {None}
    ends = declared | set(subject.policy.eos_ids)
    after = [len(t) - 1 - next(i for i, token in enumerate(t) if token in ends) for t in texts if ends & {*t[:-1]}]
    if after:
        yield finding(
            "mask/end",
            f"{len(after)} of {len(texts)} completions go on after an end token, by {sum(after)} tokens in all",
            "generation does not stop at the end token, or the text is not cut there",
            "let eos_token_ids and generation_kwargs name every end token, and cut completions at the first one",
        )
    token = template_end(subject)
    if token is not None and token not in subject.policy.eos_ids:
        yield finding(
            "model/end-token",
            f"the chat template ends the assistant's turn with {trainer._tokenizer.convert_ids_to_tokens(token)!r} (id "
            f"{token}), which is not among the ids that end a completion, {trainer.eos_token_ids}; "
            f"{sum(token in tokens[:-1] for tokens in texts)} of {len(texts)} completions go on after it",
            "the tokenizer's eos_token and the model's generation_config name another token than the template",
            f"set model.generation_config.eos_token_id to a list with {token} before the trainer is built",
        )


def template_end(subject: TrlSubject) -> int | None:
    """The first special token after an assistant's text in the chat template, if prompts are conversations."""
    tokenizer = subject.policy.tokenizer
    chat = is_conversational({"prompt": subject.prompts[0]})
    marks = turn_marks(tokenizer, own_template(tokenizer)) if chat else None
    ids = tokenizer(marks.end, add_special_tokens=False)["input_ids"] if marks else []
    return next((int(token) for token in ids if token in tokenizer.all_special_ids), None)


def _gradient(subject: TrlSubject, expected: Tensor, unchecked: list[str], *, had: bool) -> Iterator[Finding]:
    """Check ∂loss/∂logp of the first microbatch, with advantages of both signs and without the KL term."""
    trainer, limits, micro = subject.trainer, subject.thresholds, subject.micro(subject.batch)
    micro |= {"advantages": signs(micro["advantages"])}
    given = expected[: len(micro["completion_ids"])]
    gradient = subject.logp_gradient(micro, beta=0.0)
    leaks = int(((gradient != 0) & ~given).sum())
    if leaks and not had:
        yield finding(
            "mask/not-actions",
            f"the loss has a gradient at {leaks} places that hold no sampled token, although the mask is right",
            "the loss does not multiply by the mask, or averages over more than it",
            "let _compute_loss use completion_mask times tool_mask for every term",
        )
    if trainer.top_entropy_quantile < 1.0 or trainer.off_policy_mask_threshold is not None:
        why = "top_entropy_quantile or off_policy_mask_threshold leaves tokens out"
        unchecked.append(f"loss/no-gradient, loss/sign: {why}")
        return
    advantage = micro["advantages"] if micro["advantages"].dim() == 2 else micro["advantages"][:, None]
    pushed = (-gradient * advantage)[given & action_mask(micro)]
    dead, wrong = (float(where.double().mean()) if len(pushed) else 0.0 for where in (pushed == 0, pushed < 0))
    if dead > limits["loss_dead_tokens"]:
        yield finding(
            "loss/no-gradient",
            f"at ratio 1 the loss has no gradient at {100 * dead:.0f} % of the trained tokens that have an advantage",
            "the loss is detached, or its terms are cut off",
            "let _compute_loss return TRL's loss, or keep the log-probabilities' graph in your own",
        )
    elif wrong > limits["loss_wrong_way"]:
        yield finding(
            "loss/sign",
            f"at ratio 1 the loss pushes {100 * wrong:.0f} % of the trained tokens against their advantage",
            "the sign of the loss or of the advantages is turned",
            "the loss is minus the ratio times the advantage",
        )


__all__ = ["measure_masks"]
