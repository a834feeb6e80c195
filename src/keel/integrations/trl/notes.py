"""Notes on allowed options of TRL with unexpected effects. Dropout is refused if decisions depend on the KL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from keel.base.errors import KeelError
from keel.integrations.trl.settings import TrlSettings
from keel.kl import KLOptions, Pairing, advise
from keel.kl.facts import POLICY_REF
from keel.models.dropout import module_dropouts

# Keys of generation_kwargs that change the sampling distribution.
SHAPING = (
    *("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "do_sample"),
    *("num_beams", "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "logit_bias"),
    *("bad_words_ids", "bad_words", "suppress_tokens", "sequence_bias", "min_new_tokens", "min_length", "min_tokens"),
)


def notes_on(kl: KLOptions, pairing: Pairing, args: Any) -> list[str]:
    """Notes on allowed options with unexpected effects, one sentence each."""
    notes = [pairing.note] if kl.penalizes and pairing.expected_gradient != POLICY_REF else []
    if kl.penalizes and kl.placement == "loss" and args.importance_sampling_level == "sequence":
        notes.append(
            "importance_sampling_level=sequence is the policy term's alone: the KL term weighs by the token's ratio, "
            "where TRL's own takes the sequence's"
        )
    if args.mask_truncated_completions:
        notes.append(
            "mask_truncated_completions takes truncated completions out of the KL term and its measurement too, as in "
            "TRL; in keel train, loss.mask_truncated_completions keeps their KL penalty"
        )
    return notes + advise(args.loss_type, kl.beta) + _sampling_notes(args)


def _sampling_notes(args: Any) -> list[str]:
    """Options that change the sampling distribution without log-probabilities to correct for it."""
    given = args.generation_kwargs if isinstance(args.generation_kwargs, Mapping) else {}
    notes = []
    if not args.use_vllm and (args.top_p < 1 or args.top_k or args.min_p):
        notes.append(
            "top_p, top_k or min_p cut the sampled distribution, and transformers' generation does not say by how "
            "much: the KL, its penalty and its budget are of what is left; training is meant for 1.0, 0 and 0.0"
        )
    if args.repetition_penalty != 1:
        notes.append(
            f"repetition_penalty={args.repetition_penalty:g} samples from another distribution than the policy's, "
            "which the KL is of: training is meant for 1.0"
        )
    if shaping := [name for name in given if name in SHAPING]:
        notes.append(
            f"generation_kwargs has {', '.join(shaping)}: samples are drawn from another distribution than the "
            "policy's, which the KL is of"
        )
    return notes


def dropout_notes(settings: TrlSettings, model: nn.Module) -> list[str]:
    """A note on dropout. Dropout is refused if decisions depend on the measured KL, because it adds noise to the KL."""
    active = [f"{path}.{key}={value:g}" for path, _, key, value in module_dropouts(model) if value > 0]
    if not active:
        return []
    where = active[0]
    kl = settings.kl
    deciding = {
        "kl.budget": kl.budget is not None,
        f"kl.controller.name={kl.controller.name}": kl.adapts_beta,
        "reference.kind=kl_triggered": settings.reference.kind == "kl_triggered",
    }
    for option, decides in deciding.items():
        if decides:
            raise KeelError(
                f"{option} goes by the measured KL, and with dropout on ({where}) policy and reference differ by its "
                "noise alone: set disable_dropout=True in GRPOConfig, and dropouts of the model's configuration to 0"
            )
    return [f"dropout is on ({where}): policy and reference differ from the first step, so the KL does not start at 0"]
