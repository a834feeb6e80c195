"""Find where re-encoded text differs from the sampled tokens: the turn, the cause, and the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keel.base.errors import KeelError, first_line
from keel.doctor.findings import Finding, finding
from keel.lab.traces.records import Trace

MERGED, TEMPLATE = "merged", "template"
CAUSES = {
    MERGED: "encoding the text of a turn gives other tokens than the sampled ones",
    TEMPLATE: "the chat template renders earlier turns differently from how they were sampled",
}
ADVICE = {
    MERGED: "keep token ids between turns and append to them, instead of encoding text again (TRL: its own tool loop "
    "or a rollout_func that returns ids; verl: an agent loop that carries response ids)",
    TEMPLATE: "use a template that renders earlier turns unchanged, with their reasoning and white space (TRL: "
    "trl.chat_template_utils.get_training_chat_template), or append token ids",
}


@dataclass(frozen=True)
class Difference:
    """The first token that changes when a completion's text is encoded again."""

    trace: int
    turn: int  # 1 is the first turn of the model in the completion
    position: int  # index in the completion
    cause: str
    sampled: str
    encoded: str


@dataclass(frozen=True)
class TokenReport:
    """The result of `check_tokens`: the differences, and their share of the batch."""

    traces: int
    tokens: int
    affected: int  # sampled tokens at or after a first difference
    differences: tuple[Difference, ...]
    template: str

    @property
    def exact(self) -> bool:
        return not self.differences

    def findings(self) -> list[Finding]:
        """One finding per cause."""
        found = []
        for cause, count in Counter(difference.cause for difference in self.differences).most_common():
            first = next(difference for difference in self.differences if difference.cause == cause)
            turns = Counter(d.turn for d in self.differences if d.cause == cause)
            by_turn = ", ".join(f"turn {turn}: {number}" for turn, number in sorted(turns.items()))
            found.append(
                finding(
                    "tokens/encoded-again",
                    f"{count} of {self.traces} completions change when their text is encoded again ({by_turn}); with "
                    f"all causes {100 * self.affected / max(1, self.tokens):.3g} % of the sampled tokens come at or "
                    f"after a change; the first is completion {first.trace}, turn {first.turn}, token "
                    f"{first.position}: sampled {first.sampled!r}, encoded {first.encoded!r}; {self.template}",
                    f"{CAUSES[cause]}: a trainer that encodes text again scores other tokens than the sampled ones",
                    ADVICE[cause],
                    share=count / self.traces,
                )
            )
        return found

    def __str__(self) -> str:
        if self.exact:
            return f"{self.traces} completions, {self.tokens} sampled tokens: exact ({self.template})"
        return "\n".join(f"{f.code}: {f.evidence}. {f.cause}. Change: {f.advice}" for f in self.findings())


def check_tokens(traces: Sequence[Trace], tokenizer: Any, **template: Any) -> TokenReport:
    """Encode each completion's text again, as a trainer does that stores text between turns, and compare the tokens.

    Each turn's tokens are decoded, and encoded again after their context. If a trace has `messages`, the prompt of each
    later turn is also rendered by the chat template. `template` are arguments of apply_chat_template, such as
    `chat_template` and `tools`.
    """
    differences, affected = [], 0
    for index, trace in enumerate(traces):
        found = _first_difference(index, trace, tokenizer, template)
        if found is not None:
            differences.append(found)
            affected += sum(trace.action[found.position :])
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    chosen = template.get("chat_template") or getattr(tokenizer, "chat_template", None)
    how = f"chat template of {name}, {len(str(chosen))} characters" if chosen else f"tokenizer {name}, no chat template"
    tokens = sum(sum(trace.action) for trace in traces)
    return TokenReport(len(traces), tokens, affected, tuple(differences), how)


def _first_difference(index: int, trace: Trace, tokenizer: Any, template: dict[str, Any]) -> Difference | None:
    for number, (start, end) in enumerate(trace.turns(), 1):
        if trace.messages is not None and number > 1:
            found = _against_template(index, trace, number, start, tokenizer, template)
            if found is not None:
                return found
        context = (*trace.prompt_ids, *trace.completion_ids[:start])
        if (
            _encode(tokenizer, context) != context
        ):  # the context itself does not survive encoding, such as a prompt that was not made from text
            context = ()
        sampled = (*context, *trace.completion_ids[start:end])
        encoded = _encode(tokenizer, sampled)
        if encoded != sampled:
            at = _first(sampled, encoded)
            show = ("|".join(_text(tokenizer, [x]) for x in ids[at : at + 4]) for ids in (sampled, encoded))
            return Difference(index, number, start + max(0, at - len(context)), MERGED, *show)
    return None


def _encode(tokenizer: Any, ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(tokenizer.encode(_text(tokenizer, ids), add_special_tokens=False))


def _against_template(
    index: int, trace: Trace, number: int, start: int, tokenizer: Any, template: dict[str, Any]
) -> Difference | None:
    """Compare the rendered prompt of a later turn with the tokens before that turn."""

    def rendered(turn: int) -> tuple[int, ...]:
        try:
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in _before(trace, turn)],
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                **template,
            )
        except KeelError:
            raise
        except Exception as error:  # templates may raise anything
            cause = first_line(error)
            raise KeelError(f"the chat template refuses the messages of completion {index}: {cause}") from None
        return tuple(ids)

    sampled = (*trace.prompt_ids, *trace.completion_ids[:start])
    encoded = rendered(number)
    if encoded == sampled:
        return None
    at = _first(sampled, encoded)
    if at < len(trace.prompt_ids) and rendered(1) != trace.prompt_ids:
        raise KeelError(
            f"the prompt of completion {index} differs from the rendering of its first messages at token {at}: "
            "pass the template that was used, check_tokens(…, chat_template=…, tools=…)"
        )
    same_text = _text(tokenizer, sampled) == _text(tokenizer, encoded)
    position = max(0, at - len(trace.prompt_ids))
    turn = sum(1 for begin, _ in trace.turns() if begin <= position)
    return Difference(
        index,
        max(1, turn),
        position,
        MERGED if same_text else TEMPLATE,
        _text(tokenizer, sampled[at : at + 4]),
        _text(tokenizer, encoded[at : at + 4]),
    )


def _before(trace: Trace, number: int) -> Sequence[Any]:
    """The messages before the completion's `number`-th turn of the model."""
    assert trace.messages is not None
    own = [index for index, message in enumerate(trace.messages) if message.get("role") == "assistant"]
    turns = sum(1 for _ in trace.turns())
    if len(own) < turns:
        raise KeelError(
            f"a completion has {turns} turns of the model by its mask and {len(own)} by its messages: messages must "
            "contain the whole conversation"
        )
    return trace.messages[: own[len(own) - turns + number - 1]]


def _first(sampled: Sequence[int], encoded: Sequence[int]) -> int:
    pairs = zip(sampled, encoded, strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(sampled), len(encoded)))


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
