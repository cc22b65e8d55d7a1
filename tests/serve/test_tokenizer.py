"""A model's words: its tokens, its ends, and conversations as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.models.made_tokenizers import CONFIGS, KINDS
from trainshed.errors import InputError
from trainshed.serve.tokenizer import ChatTokenizer

# The main lines of Llama 3's and ChatML's templates.
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('system comes first') }}
    {%- endif %}
    {%- if message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What's 2 < 3 & 'so'?\n"},
    {"role": "assistant", "content": "Yes. ß 😀"},
    {"role": "user", "content": "Why?"},
]


def made(kind: str, **config: Any) -> dict[str, bytes]:
    body = {key: value for key, value in (CONFIGS[kind] | config).items() if value is not None}
    return {
        "tokenizer.json": KINDS[kind]().to_str().encode(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | body).encode(),
    }


@pytest.mark.parametrize(("kind", "template"), [("llama3", LLAMA3), ("qwen", CHATML)])
def test_conversations_are_written_as_transformers_writes_them(kind: str, template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    files = made(kind, chat_template=template)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    words = ChatTokenizer(str(tmp_path), files)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    assert words.can_chat
    assert words.encode_chat(TALK) == expected
    assert words.encode("Hello you") == theirs("Hello you")["input_ids"]


def test_a_template_may_lie_in_a_file_of_its_own_or_among_others_by_name() -> None:
    template = "{{ messages[0].content }}!"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    for files in (
        made("qwen") | {"chat_template.jinja": template.encode()},
        made("qwen") | {"chat_template.json": json.dumps({"chat_template": template}).encode()},
        made("qwen", chat_template=named),
    ):
        words = ChatTokenizer("there", files)
        assert words.decode(words.encode_chat([{"role": "user", "content": "Hey"}])) == "Hey!"


def test_without_a_template_a_conversation_is_refused() -> None:
    words = ChatTokenizer("there", made("gpt2"))
    assert not words.can_chat
    with pytest.raises(InputError, match="no chat template"):
        words.encode_chat(TALK)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, "system comes first"),
        ("{{ messages.missing.more }}", "has no attribute 'missing'"),
        ("{% for %}", "does not take this conversation"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(template: str, said: str) -> None:
    words = ChatTokenizer("there", made("qwen", chat_template=template))
    with pytest.raises(InputError, match=said):
        words.encode_chat([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])


def test_ends_are_what_the_model_says_then_what_its_tokenizer_says() -> None:
    files = made("llama3")
    backend = KINDS["llama3"]()
    assert ChatTokenizer("there", files).eos_tokens == {backend.token_to_id("<|end_of_text|>")}
    both = files | {"generation_config.json": b'{"eos_token_id": [5, 7]}', "config.json": b'{"eos_token_id": 5}'}
    assert ChatTokenizer("there", both).eos_tokens == {5, 7}
    assert ChatTokenizer("there", files | {"config.json": b'{"eos_token_id": 9}'}).eos_tokens == {9}


def test_special_tokens_are_no_part_of_an_answer() -> None:
    words = ChatTokenizer("there", made("llama3"))
    tokens = words.encode("Hello")
    assert tokens[0] == words.bos_token
    assert words.decode(tokens) == "<|begin_of_text|>Hello"
    assert words.decode_plain(tokens) == "Hello"
    assert ChatTokenizer("there", made("qwen")).bos_token is None
