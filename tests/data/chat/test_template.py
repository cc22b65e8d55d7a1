"""Chat templates: which one is taken, what it is given, and that no template takes more time or memory than it may."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from support.models.chat_styles import STYLES, conversations, write_style, write_tokenizer
from support.runs.chatting import tokenized, tokens_of
from support.runs.preparing import Notes
from trainshed.data.chat import sandbox
from trainshed.data.chat.sandbox import TemplateFailure, TemplateOverrun
from trainshed.data.chat.template import FIXED_DATE, ChatTemplate, catalog_names, find_template
from trainshed.data.chat.tokenize import ChatSettings, check_markers
from trainshed.data.tokenize.tokenizer import load_tokenizer
from trainshed.errors import InputError, TokenizerError

TALK = [{"role": "user", "content": "Hey"}, {"role": "assistant", "content": "Ho"}]


def render(source: str, **special: str) -> str:
    return ChatTemplate(source, special).render(TALK).text


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [1] recursive %}{{ loop([1, 1]) }}{{ loop([1, 1]) }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.3)
    with pytest.raises((TemplateOverrun, TemplateFailure), match=r"more than 0\.3 seconds|recursion"):
        render(source)


DOUBLE = "{% set a = a + a %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * 'ab' }}",
        "{% set a = [1] * 10000000000 %}",
        "{{ 9 ** 9999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{% set a = 'aaaa' %}" + DOUBLE * 40,
        "{% set a = 'aaaa' %}" + DOUBLE.replace("+", "~") * 40,
        "{% set n = namespace(a='aa') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a|length }}",
        "{% for i in range(9999) %}{{ 'a' * 60000 }}{% endfor %}",
    ],
)
def test_a_template_that_writes_without_end_is_stopped(source: str) -> None:
    with pytest.raises(TemplateOverrun):
        render(source)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for %}", "does not take this conversation"),
        ("{{ lipsum(1000) }}", "lipsum"),
        ("{% macro f() %}x{% generation %}a{% endgeneration %}{% endmacro %}b{{ f() }}", "inside of a macro"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(source: str, why: str) -> None:
    with pytest.raises(TemplateFailure, match=why):
        render(source)


def test_templates_get_what_transformers_gives_them() -> None:
    source = (
        "{{ bos_token }}{{ messages[0] | tojson(indent=1) }}{% for m in messages %}{% break %}{% endfor %}{{ tools }}"
    )
    assert render(source, bos_token="<s>") == '<s>{\n "role": "user",\n "content": "Hey"\n}None'
    thinking = [{"role": "assistant", "content": "b", "reasoning": "a"}]
    template = ChatTemplate("{{ messages[0].thinking }}{{ messages[0].reasoning_content }}", {})
    assert template.render(thinking).text == "aa"


def test_preparing_has_no_clock_and_serving_has_one() -> None:
    source = "{{ strftime_now('%Y') }}"
    assert render(source) == str(FIXED_DATE.year)
    assert ChatTemplate(source, {}, now=lambda: datetime(1999, 1, 1)).render(TALK).text == "1999"


@pytest.mark.parametrize("name", catalog_names())
def test_our_own_templates_write_what_transformers_writes_with_them(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / "t", bos_token="<s>", eos_token="</s>")
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = find_template(name, load_tokenizer(str(folder))).text
    chats = conversations()
    ours = tokens_of(tokenized(folder, [{"messages": chat} for chat in chats], template=name))
    assert [ids for ids, _ in ours] == [theirs.apply_chat_template(chat, return_dict=False) for chat in chats]
    for (ids, mask), chat in zip(ours, chats, strict=True):
        begins = sum(b > a for a, b in zip([0, *mask], mask, strict=False))
        assert begins == sum(message["role"] == "assistant" for message in chat)
        learned = load_tokenizer(str(folder)).decode([i for i, m in zip(ids, mask, strict=True) if m])
        assert learned.startswith((" " if name == "mistral" else "") + chat[-1]["content"][:1]) or len(chat) > 3


def test_a_template_may_be_a_file_a_name_or_one_of_several(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", eos_token="</s>")
    tokenizer = load_tokenizer(str(folder))
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    assert find_template("own.jinja", tokenizer, folder=tmp_path).text == "{{ messages[0].content }}"
    assert find_template(str(tmp_path / "own.jinja"), tokenizer).text == "{{ messages[0].content }}"
    with pytest.raises(InputError, match="no such template"):
        find_template("other.jinja", tokenizer, folder=tmp_path)
    with pytest.raises(InputError, match="no chat template 'zephyr'") as error:
        find_template("zephyr", tokenizer)
    assert "chatml" in str(error.value.hint)
    with pytest.raises(InputError, match="this tokenizer has no chat template"):
        find_template(None, tokenizer)
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    several = find_template(None, load_tokenizer(str(write_tokenizer(tmp_path / "s", chat_template=named))))
    assert (several.text, several.with_tools) == ("a", "b")


def test_conversations_with_tools_take_the_template_for_tools(tmp_path: Path) -> None:
    plain = (
        "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    )
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": "TOOLS" + plain}]
    folder = write_tokenizer(tmp_path / "t", chat_template=named)
    rows: list[dict[str, Any]] = [{"messages": TALK}, {"messages": TALK, "tools": [{"name": "f"}]}]
    tokenizer = load_tokenizer(str(folder))
    texts = [tokenizer.decode(ids) for ids, _ in tokens_of(tokenized(folder, rows))]
    assert texts == ["userHeyassistantHo", "TOOLSuserHeyassistantHo"]


def settings_for(folder: Path, template: str | None) -> tuple[ChatSettings, Any]:
    tokenizer = load_tokenizer(str(folder))
    return ChatSettings("chat", find_template(template, tokenizer), 100), tokenizer


def without(folder: Path, *tokens: str) -> Path:
    """Take special tokens away from a tokenizer."""
    body = json.loads((folder / "tokenizer.json").read_text())
    body["added_tokens"] = [token for token in body["added_tokens"] if token["content"] not in tokens]
    for token in tokens:
        body["model"]["vocab"][f"unused {token}"] = body["model"]["vocab"].pop(token)
    (folder / "tokenizer.json").write_text(json.dumps(body))
    return folder


def test_a_tokenizer_without_the_templates_special_tokens_is_refused_by_their_names(tmp_path: Path) -> None:
    folder = without(write_style(tmp_path / "t", STYLES["chatml"]), "<|im_start|>", "<|im_end|>")
    for template in (None, "chatml", "qwen"):
        chat, tokenizer = settings_for(folder, template)
        with pytest.raises(TokenizerError, match=r"<\|im_end\|>, <\|im_start\|>"):
            check_markers(chat, tokenizer, Notes())
    notes = Notes()
    chat, tokenizer = settings_for(folder, "llama3")
    check_markers(chat, tokenizer, notes)
    assert not notes.warnings


def test_headers_that_are_ordinary_text_are_said_but_not_refused(tmp_path: Path) -> None:
    """Zephyr and TinyLlama have such headers, and end their answers with a real token."""
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    folder = write_tokenizer(tmp_path / "t", source, eos_token="</s>")
    notes = Notes()
    chat, tokenizer = settings_for(folder, None)
    check_markers(chat, tokenizer, notes)
    assert "<|assistant|>, <|user|>" in notes.warnings[0]


def test_that_a_date_is_fixed_is_said(tmp_path: Path) -> None:
    folder, notes = write_style(tmp_path / "t", STYLES["gpt-oss"]), Notes()
    check_markers(*settings_for(folder, None), notes)
    assert notes.notes == ["the chat template asks for today's date, and gets 26 July 2024 on any day"]
