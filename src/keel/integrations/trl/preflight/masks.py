"""Check which tokens are trained: masks against sampled tokens, and the loss's gradient against both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from trl.data_utils import is_conversational

from keel.doctor.findings import Finding, finding
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.batch import Subject, signs
from keel.integrations.trl.scoring import action_mask

MASK_ADVICE = (
    "leave completion_mask (and tool_mask) as GRPOTrainer makes them, or mend the method that changes them: 1 on "
    "sampled tokens up to and with the end token, 0 elsewhere"
)


def probe_masks(subject: Subject, thresholds: Thresholds) -> Outcome:
    """Masks, ends, texts, and ∂loss/∂logp: zero where nothing was sampled, another number where something was."""
    expected = expected_mask(subject)
    trained = action_mask(subject.batch)
    figures = {
        "completion_tokens": float(subject.sampled.sum()),
        "trained_tokens": float(trained.sum()),
        "left_out_of_turns": float((expected & ~trained).sum()),
    }
    findings = [*_mask_tensor(expected, trained), *_ends(subject), *_end_token(subject)]
    findings += _nothing_left(subject, expected)
    unchecked: list[str] = []
    if not subject.weights:
        unchecked.append("loss/*: no weight is trainable, so that nothing can be differentiated")
    else:
        findings += _gradient(subject, expected, thresholds, unchecked, had=bool(findings))
        if subject.noisy:
            unchecked.append("mask/attention: two passes over the same tokens differ")
        else:
            findings += _padding(subject, thresholds)
    lines = (f"masks: {int(trained.sum())} of {int(subject.sampled.sum())} sampled tokens are trained",)
    return Outcome("masks", tuple(findings), figures, lines, tuple(unchecked))


def expected_mask(subject: Subject) -> Tensor:
    """`[B, T]`: the tokens to train; with `mask_truncated_completions` none of a truncated completion."""
    expected = subject.sampled
    trainer = subject.trainer
    if trainer.mask_truncated_completions:
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        ended = [bool(tokens) and tokens[-1] in ends for _, tokens in subject.texts]
        expected = expected & torch.tensor(ended, device=expected.device)[:, None]
    return expected


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
            MASK_ADVICE,
        )


def _nothing_left(subject: Subject, expected: Tensor) -> Iterator[Finding]:
    if subject.trainer.mask_truncated_completions and not bool(expected.any()):
        yield finding(
            "output/truncated",
            f"all {len(expected)} completions end at max_completion_length={subject.trainer.max_completion_length}, "
            "and mask_truncated_completions leaves each of them out",
            "no token of the batch is trained",
            "raise max_completion_length, or train the model to end first",
        )


def _ends(subject: Subject) -> Iterator[Finding]:
    """Text after an end token; with tools a completion has several turns, each with its end."""
    if subject.tools:
        return
    ends = set(subject.trainer.eos_token_ids) | declared_ends(subject.trainer)
    late = [tokens for _, tokens in subject.texts if any(token in ends for token in tokens[:-1])]
    if late:
        after = sum(len(tokens) - 1 - next(i for i, t in enumerate(tokens) if t in ends) for tokens in late)
        yield finding(
            "mask/end",
            f"{len(late)} of {len(subject.texts)} completions go on after an end token, by {after} tokens in all",
            "generation does not stop at the end token, or the text is not cut there",
            "let eos_token_ids and generation_kwargs name every end token, and cut completions at the first one",
        )


def declared_ends(trainer: Any) -> set[int]:
    """The end tokens that model and tokenizer name."""
    named = getattr(trainer.model.generation_config, "eos_token_id", None)
    every = named if isinstance(named, list) else [named]
    return {int(token) for token in (*every, trainer._tokenizer.eos_token_id) if token is not None}


def _end_token(subject: Subject) -> Iterator[Finding]:
    """The special token that ends the assistant's turn in the chat template must also end a completion."""
    token = template_end(subject)
    trainer = subject.trainer
    if token is None or token in trainer.eos_token_ids or subject.tools:
        return
    went_on = sum(token in tokens[:-1] for _, tokens in subject.texts)
    text = trainer._tokenizer.convert_ids_to_tokens(token)
    yield finding(
        "model/end-token",
        f"the chat template ends the assistant's turn with {text!r} (id {token}), which is not among the ids that end "
        f"a completion, {trainer.eos_token_ids}; {went_on} of {len(subject.texts)} completions go on after it",
        "the tokenizer's eos_token and the model's generation_config name another token than the template",
        f"set model.generation_config.eos_token_id to a list with {token} before the trainer is built",
    )


def template_end(subject: Subject) -> int | None:
    """The first special token after an assistant's text in the chat template, where prompts are conversations."""
    tokenizer, prompt = subject.trainer._tokenizer, subject.prompts[0]
    if not is_conversational({"prompt": prompt}) or tokenizer.chat_template is None:
        return None
    marks = ("1", "2")
    rendered = [
        tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": mark}], tokenize=False)
        for mark in marks
    ]
    same = 0  # length of the common suffix: the text after the answer
    while same < min(map(len, rendered)) and rendered[0][-1 - same] == rendered[1][-1 - same]:
        same += 1
    ids = tokenizer(rendered[0][len(rendered[0]) - same :], add_special_tokens=False)["input_ids"] if same else []
    return next((int(token) for token in ids if token in tokenizer.all_special_ids), None)


def _gradient(
    subject: Subject, expected: Tensor, thresholds: Thresholds, unchecked: list[str], *, had: bool
) -> Iterator[Finding]:
    """∂loss/∂logp with advantages of both signs, of the first microbatch, without the KL term."""
    micro = subject.micro() | {"advantages": signs(subject.micro()["advantages"])}
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
    trainer = subject.trainer
    if trainer.top_entropy_quantile < 1.0 or trainer.off_policy_mask_threshold is not None:
        unchecked.append(
            "loss/no-gradient, loss/sign: top_entropy_quantile or off_policy_mask_threshold leaves tokens out"
        )
        return
    advantage = micro["advantages"] if micro["advantages"].dim() == 2 else micro["advantages"][:, None]
    held = given & action_mask(micro)
    if not bool(held.any()):
        return
    pushed = (-gradient * advantage)[held]
    dead, wrong = float((pushed == 0).double().mean()), float((pushed < 0).double().mean())
    if dead > thresholds["loss_dead_tokens"]:
        yield finding(
            "loss/no-gradient",
            f"at ratio 1 the loss has no gradient at {100 * dead:.0f} % of the trained tokens that have an advantage",
            "the loss is detached, or its terms are cut off",
            "let _compute_loss return TRL's loss, or keep the log-probabilities' graph in your own",
        )
    elif wrong > thresholds["loss_wrong_way"]:
        yield finding(
            "loss/sign",
            f"at ratio 1 the loss pushes {100 * wrong:.0f} % of the trained tokens against their advantage",
            "the sign of the loss or of the advantages is turned",
            "the loss is minus the ratio times the advantage",
        )


def _padding(subject: Subject, thresholds: Thresholds) -> Iterator[Finding]:
    """Other ids in the padding must change nothing; another prompt token must change the completion's scores."""
    whole, sampled = subject.whole, subject.sampled
    size = int(subject.trainer.model.get_input_embeddings().weight.shape[0])
    other = torch.where(subject.present, whole["completion_ids"], (whole["completion_ids"] + 7) % size)
    before, after = subject.scored(whole), subject.scored(whole | {"completion_ids": other})
    moved = float((before - after)[sampled].abs().max()) if bool(sampled.any()) else 0.0
    limit = thresholds["scoring_gap_half" if subject.half else "scoring_gap"]
    if moved > limit:
        yield finding(
            "mask/attention",
            f"other ids in the padding move a completion's log-probability by up to {moved:.2g} nats",
            "padding is attended to",
            "let the attention mask be 0 on padding",
        )
    ids = whole["prompt_ids"].clone()
    ids[:, -1] = (ids[:, -1] + 7) % size
    seen = float((before - subject.scored(whole | {"prompt_ids": ids}))[sampled].abs().max())
    if seen < thresholds["mask_seen"]:
        yield finding(
            "mask/attention",
            f"another last token of every prompt moves the completions' log-probabilities by {seen:.1g} nats at most",
            "the training pass does not see the prompt: a loss mask serves as the attention mask",
            "let prompt_mask be 1 on the prompt's tokens",
        )


__all__ = ["probe_masks"]
