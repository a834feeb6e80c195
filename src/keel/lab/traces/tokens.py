"""The record of a completion, and a check that encoding its text again gives the sampled tokens."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError, first_line
from keel.base.files import parse_json
from keel.doctor.findings import Finding, finding

# Field names of other trainers. The first one in a line is used. Masks are combined, because TRL has one for padding
# and one for tools.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt_ids": ("prompt_ids", "prompt_token_ids", "prompts"),
    "completion_ids": ("completion_ids", "response_ids", "completion_token_ids", "responses"),
    "token_ids": ("token_ids", "input_ids", "tokens"),
    "action": ("action", "completion_mask", "env_mask", "tool_mask", "response_mask", "loss_mask", "sampled_mask"),
    "sample_logp": ("sample_logp", "sampling_per_token_logps", "rollout_log_probs", "logprobs"),
    "logp": ("logp", "old_per_token_logps", "old_log_probs"),
    "messages": ("messages",),
    "step": ("step",),
}


@dataclass(frozen=True)
class Trace:
    """One completion with its prompt.

    `action` is true where the policy sampled the token of `completion_ids`. `sample_logp` and `logp` are the
    log-probabilities of the completion's tokens under sampler and policy, at the sampling temperature; NaN if unknown.
    `messages` are the whole conversation, including the completion's turns.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    action: tuple[bool, ...]
    sample_logp: tuple[float, ...] | None = None
    logp: tuple[float, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    step: int | None = None

    def turns(self) -> Iterator[tuple[int, int]]:
        """Start and end of each span of sampled tokens in the completion."""
        start = None
        for index, sampled in enumerate((*self.action, False)):
            if sampled and start is None:
                start = index
            elif not sampled and start is not None:
                yield start, index
                start = None


def read_traces(path: Path | str) -> list[Trace]:
    """The traces in a file of JSON lines; an invalid line is refused."""
    try:
        lines = Path(path).read_bytes().split(b"\n")  # str.splitlines would also cut at U+2028 inside a text
    except OSError as error:
        raise KeelError(f"cannot read {path}: {error.strerror or error}") from None
    traces = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                traces.append(trace_of(parse_json(line)))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise KeelError(f"{path}, line {number}: not JSON in UTF-8 ({error})") from None
            except ValueError as error:
                raise KeelError(f"{path}, line {number}: {error}") from None
    if not traces:
        raise KeelError(f"{path} has no completions: write one per line, with completion_ids and prompt_ids")
    return traces


def trace_of(row: Any) -> Trace:
    """A trace from a mapping with the names of TRL, verl or Keel; a ValueError names the missing field."""
    if not isinstance(row, Mapping):
        raise ValueError("this is not a record: give an object with completion_ids and prompt_ids")
    found = {name: next((row[key] for key in keys if key in row), None) for name, keys in NAMES.items()}
    completion, prompt = found["completion_ids"], found["prompt_ids"]
    masks = [_list(row[key], key, int | float, "0 and 1") for key in NAMES["action"] if row.get(key) is not None]
    numbers = {name: _numbers(found[name], name) for name in ("sample_logp", "logp")}
    if len({len(mask) for mask in masks}) > 1:
        raise ValueError("the masks have different lengths: give one entry for each token")
    action = [all(entries) for entries in zip(*masks, strict=True)] if masks else None
    if completion is None and found["token_ids"] is not None and action is not None:
        both = _integers(found["token_ids"], "token_ids")
        if len(action) != len(both):
            raise ValueError(f"token_ids has {len(both)} entries and the mask {len(action)}: give one for each token")
        first = next((index for index, sampled in enumerate(action) if sampled), len(both))
        prompt, completion, action = both[:first], both[first:], action[first:]
        for name, values in numbers.items():
            if values is not None and len(values) == len(both):
                numbers[name] = values[first:]
    if completion is None:
        known = ", ".join(sorted(map(str, row))[:8])
        raise ValueError(f"there are no token ids, only {known}: completion_ids and prompt_ids must be recorded")
    completion = _integers(completion, "completion_ids")
    sampled = [True] * len(completion) if action is None else action
    for name, entries in (("the mask", sampled), *numbers.items()):
        if entries is not None and len(entries) != len(completion):
            raise ValueError(
                f"{name} has {len(entries)} entries and completion_ids {len(completion)}: give one for each token"
            )
    messages, step = found["messages"], found["step"]
    if not (step is None or type(step) is int or (isinstance(step, float) and step.is_integer())):
        raise ValueError(f"step is {step!r}: give a whole number")
    return Trace(
        prompt_ids=_integers(() if prompt is None else prompt, "prompt_ids"),
        completion_ids=completion,
        action=tuple(sampled),
        messages=None if messages is None else tuple(_list(messages, "messages", Mapping, "messages (objects)")),
        step=None if step is None else int(step),
        **numbers,
    )


def write_traces(path: Path | str, traces: Iterable[Trace]) -> None:
    """Append traces to a file of JSON lines."""
    with Path(path).open("a", encoding="utf-8") as file:
        for trace in traces:
            row = {name: value for name, value in asdict(trace).items() if value is not None}
            for name in ("sample_logp", "logp"):
                if name in row:
                    row[name] = [x if math.isfinite(x) else None for x in row[name]]
            file.write(json.dumps(row, default=str) + "\n")


def _list(values: Any, name: str, kind: Any, items: str) -> Sequence[Any]:
    """`values`, if it is a list of items of a type; else a ValueError says what the field needs."""
    if not isinstance(values, list | tuple) or not all(isinstance(x, kind) for x in values):
        raise ValueError(f"{name} is not a list of {items}")
    return values


def _integers(values: Any, name: str) -> tuple[int, ...]:
    values = _list(values, name, int, "token ids")
    if any(isinstance(x, bool) for x in values):
        raise ValueError(f"{name} is not a list of token ids")
    return tuple(values)


def _numbers(values: Any, name: str) -> tuple[float, ...] | None:
    """Log-probabilities as floats: NaN for null; some samplers give a list with one number per token."""
    if values is None:
        return None
    flat = (x[0] if isinstance(x, list) and x else x for x in _list(values, name, object, "log-probabilities"))
    try:
        return tuple(math.nan if x is None else float(x) for x in flat)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is not a list of log-probabilities") from None


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
                    f"{count} of {self.traces} completions change when their text is encoded again ({by_turn}); over "
                    f"all causes, {100 * self.affected / max(1, self.tokens):.3g} % of the sampled tokens are at or "
                    f"after a change; the first change is in completion {first.trace}, turn {first.turn}, token "
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
    """Encode each completion's text again, as trainers that store text between turns do, and compare the tokens.

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
        # a context that was not made from text may itself change when it is encoded again
        if _encode(tokenizer, context) != context:
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
            raise KeelError(f"the chat template cannot render the messages of completion {index}: {cause}") from None
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
