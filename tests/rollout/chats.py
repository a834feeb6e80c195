"""Three chat templates with tools, in the manner of ChatML, Llama 3 and Mistral, each with a tokenizer for it.

Each writes an assistant's tool calls back as JSON, so that a whole conversation can be rendered and compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keel.models.tiny import tiny_tokenizer

CHATML = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{{ '' if loop.last else '\\n' }}{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """\
{{- bos_token }}<|start_header_id|>system<|end_header_id|>

{% if tools %}Environment: ipython
{% endif %}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|eot_id|>
{%- for m in messages %}
{%- if m.role == 'user' %}<|start_header_id|>user<|end_header_id|>

{% if tools and loop.first %}Functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call a turn') }}{% endif %}
{%- set f = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'assistant' %}<|start_header_id|>assistant<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
{%- set turn = namespace(number=0) %}
{%- for m in messages %}
{%- if m.role in ('user', 'assistant') and not m.tool_calls %}
{%- if (m.role == 'user') != (turn.number % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set turn.number = turn.number + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif -%}
[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Chat:
    """A tokenizer with its template, and how a model trained on it writes a call and plain text."""

    tokenizer: Any
    call: Callable[[str, Mapping[str, Any], str], str]
    text: Callable[[str], str] = lambda text: text
    calls_a_turn: int = 2


def _tokenizer(template: str, eos: str, *special: str, plain: tuple[str, ...] = ()) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, eos]})
    tokenizer.add_tokens(list(plain))
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    return tokenizer


def chats() -> dict[str, Chat]:
    headers = ("<|start_header_id|>", "<|end_header_id|>")
    marks = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
    return {
        "chatml": Chat(
            _tokenizer(CHATML, "<|im_end|>", "<|im_start|>", plain=("<tool_call>", "</tool_call>")),
            lambda name, given, id: (
                f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given)}}}\n</tool_call>'
            ),
        ),
        "llama": Chat(
            _tokenizer(LLAMA, "<|eot_id|>", *headers),
            lambda name, given, id: f'{{"name": "{name}", "parameters": {json.dumps(given)}}}',
            calls_a_turn=1,
        ),
        "mistral": Chat(
            _tokenizer(MISTRAL, "</s>", *marks, "[/TOOL_RESULTS]"),
            lambda name, given, id: f'{{"name": "{name}", "arguments": {json.dumps(given)}, "id": "{id}"}}',
            text=lambda text: f" {text}",
        ),
    }
