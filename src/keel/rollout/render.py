"""Render prompts and replies to tokens. Each is rendered once; text is never re-encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.types import Message, Problem
from keel.models.tokenizer import ControlTokens, control_token_refused

Messages = list[dict[str, str]]
Reply = str | Sequence[Message]
TRUNCATIONS = ("error", "left", "drop")
# Templates for tokenizers without one. Unknown markers are tokenised as ordinary text.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
}
_CONTENT = "\u2042content\u2042"  # placeholder for a turn's text, used to split a rendered template
_PROBE = {"role": "tool", "name": "probe", "tool_call_id": "000000000", "content": "keel-probe"}
# The system message that describes tools if the template does not render them.
_TOOLS = (
    "You may call these tools:\n{schemas}\n"
    'To call one, write <tool_call>{{"name": …, "arguments": {{…}}}}</tool_call> and end your turn.'
)


class Renderer:
    """Renders prompts, and replies between turns, with `data.chat_template` and `data.system_prompt`.

    The template `auto` renders chat messages, and any prompt with a system prompt, with the tokenizer's template. It
    leaves plain text unchanged. Without a template, messages are joined by blank lines. `none` never uses a template.
    A name selects a template of the tokenizer or of `TEMPLATES`; it also renders plain text, as a user message.

    Only the template may write control tokens. A control token in a prompt is refused unless `allow_control_tokens` is
    set. In a reply or a tool's schema it is encoded as ordinary text.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str = "auto",
        system_prompt: str | None = None,
        allow_control_tokens: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.allow_control_tokens = allow_control_tokens
        self.controls = ControlTokens(tokenizer)
        self.named = chat_template not in ("auto", "none")
        self.template = _template(tokenizer, chat_template)
        self._bos = _added_bos(tokenizer)
        if system_prompt is not None and not allow_control_tokens:
            forged = self.controls.forged(self.controls.encode(system_prompt), system_prompt)
            if forged is not None:
                raise control_token_refused(forged, "data.system_prompt")

    def prompt(self, problem: Problem) -> tuple[int, ...]:
        """The tokens of a problem's prompt, with BOS at most once."""
        prompt = problem.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt, problem.key)
        if not any(message["content"].strip() for message in messages):
            raise KeelError(f"problem {problem.key!r} has an empty prompt: a model needs something to continue")
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        text, tools = partial(self._prompt_text, problem), list(problem.tools)
        if self.allow_control_tokens:
            return self._with_bos(self.controls.rendered(partial(text, messages), tools).tokens)
        encoded = self.controls.rendered(text, messages, tools)
        if (
            encoded.forged is not None
            and encoded.tokens != self.controls.rendered(partial(text, messages), tools).tokens
        ):
            raise control_token_refused(encoded.forged, f"the prompt of problem {problem.key!r}")
        return self._with_bos(encoded.tokens)

    def check(self, problem: Problem) -> None:
        """Refuse a prompt with a control token. Prompts that cannot contain one are not rendered."""
        if not self.allow_control_tokens and self.controls.may_forge(str(problem.prompt)):
            self.prompt(problem)

    def reply(
        self, problem: Problem, message: Reply, ended_by: int | None, *, room: int | None = None
    ) -> tuple[int, ...]:
        """The tokens between two turns of the model: the end of the turn, the messages, the start of the next turn.

        A plain text becomes a user message. `ended_by` is the last sampled token. If the template closes turns with
        that token (such as EOS), the token is not repeated. After a stop string, the closing token is added. For a
        reply much longer than `room` tokens, only a beginning of more than `room` tokens is returned.
        """
        tokens = self.controls.rendered(partial(self._reply_text, problem), message, room=room).tokens
        in_template = self._in_template(isinstance(problem.prompt, str))
        return tokens[1:] if in_template and tokens and tokens[0] == ended_by else tokens

    def _prompt_text(self, problem: Problem, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
        in_template = self._in_template(isinstance(problem.prompt, str))
        if tools and not (in_template and self._renders_schemas):
            messages, tools = _with_tools(messages, tools), ()
        return self._fill(messages, problem.key, tools=tools) if in_template else "\n\n".join(_contents(messages))

    def _reply_text(self, problem: Problem, message: Reply) -> str:
        if self._in_template(isinstance(problem.prompt, str)):
            return self._after_turn(self._reply_messages(message), problem.key)
        return message if isinstance(message, str) else "\n".join(("", *_contents(message), ""))

    def _reply_messages(self, message: Reply) -> Messages:
        """The environment's messages. Role `tool` becomes `user` if the template does not render it."""
        if isinstance(message, str):
            return [{"role": "user", "content": message}]
        if self._renders_tool_role or all(part["role"] != "tool" for part in message):
            return [dict(part) for part in message]
        return [{"role": "user", "content": "\n".join(_contents(message))}]

    def _after_turn(self, messages: Messages, key: str) -> str:
        base = [{"role": "user", "content": "."}, {"role": "assistant", "content": _CONTENT}]
        _, content, after = self._fill([*base, *messages], key).partition(_CONTENT)
        if not content:
            raise KeelError(
                "the chat template drops the assistant's turns: use a template that keeps them, or rollout.max_turns=1"
            )
        return after

    @cached_property
    def _renders_tool_role(self) -> bool:
        """Whether the template renders messages of role `tool`. Some templates raise an error or drop them."""
        try:
            return _PROBE["content"] in self._after_turn([dict(_PROBE)], "")
        except KeelError:
            return False

    @cached_property
    def _renders_schemas(self) -> bool:
        """Whether the template renders the tools' schemas."""
        function = {"name": "keel_probe", "description": "", "parameters": {"type": "object", "properties": {}}}
        try:
            question: Messages = [{"role": "user", "content": "."}]
            return "keel_probe" in self._fill(question, "", tools=[{"type": "function", "function": function}])
        except KeelError:
            return False

    def _in_template(self, is_text: bool) -> bool:
        return self.template is not None and (self.named or not is_text or self.system_prompt is not None)

    def _fill(self, messages: Messages, key: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except Exception as error:  # templates may raise any type
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise KeelError(f"the chat template refuses the messages of problem {key!r}: {first}") from error

    def _with_bos(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        bos = self.tokenizer.bos_token_id
        if self._bos is None or (tokens and tokens[0] == bos):
            return tokens
        return (self._bos, *tokens)


def fit(tokens: tuple[int, ...], limit: int | None, truncation: str, key: str) -> tuple[int, ...]:
    """Fit a prompt to `data.max_prompt_length`. `truncation: left` keeps its end; otherwise a longer prompt is refused.

    With `truncation: drop`, long prompts are removed before training. One that remains, such as a generated problem's,
    is refused.
    """
    if truncation not in TRUNCATIONS:
        raise unknown("data.truncation", truncation, TRUNCATIONS)
    if limit is None or len(tokens) <= limit:
        return tokens
    if truncation != "left":
        raise KeelError(
            f"problem {key!r} has a prompt of {len(tokens)} tokens, more than data.max_prompt_length {limit}: "
            "raise it, or set data.truncation to left or drop"
        )
    return tokens[-limit:]


def _messages(prompt: Sequence[Mapping[str, str]], key: str) -> Messages:
    if not isinstance(prompt, Sequence) or not prompt:
        raise KeelError(f"problem {key!r} has an empty prompt: a model needs something to continue")
    for message in prompt:
        valid = isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not valid:
            raise KeelError(
                f"problem {key!r}: a prompt must be a text, or messages that each have a role and a content"
            )
    return [dict(message) for message in prompt]


def _contents(messages: Sequence[Message]) -> list[str]:
    return [message["content"] for message in messages]


def _with_tools(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """Describe the tools in the system message."""
    text = _TOOLS.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]


def _template(tokenizer: Any, name: str) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    templates = template if isinstance(template, Mapping) else {"default": template} if template else {}
    if name == "none":
        return None
    if name == "auto":
        return templates.get("default", next(iter(templates.values()), None))
    known = {**TEMPLATES, **templates}
    if name not in known:
        raise unknown("data.chat_template", name, [*known, "auto", "none"])
    return known[name]


def _added_bos(tokenizer: Any) -> int | None:
    """The BOS token if the tokenizer itself prepends it, else None."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return None
    return int(bos) if list(tokenizer.encode("a"))[:1] == [bos] else None
