"""Token ids and learned tokens are those of transformers and of trl, for every style of template."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.models.chat_styles import STYLES, conversations, write_style
from support.runs.chatting import Tokens, tokenized, tokens_of
from trainshed.data.chat.template import FIXED_DATE
from trainshed.data.tokenize.tokenizer import load_tokenizer


def learned(folder: Path, chats: Sequence[list[dict[str, Any]]], **settings: Any) -> Tokens:
    return tokens_of(tokenized(folder, [{"messages": messages} for messages in chats], **settings))


def expected(folder: Path, chats: Sequence[list[dict[str, Any]]], **options: Any) -> Tokens:
    """What transformers gives for templates with generation blocks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = without_clock(tokenizer.chat_template)
    results = [
        tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **options)
        for messages in chats
    ]
    return [(list(result["input_ids"]), list(result["assistant_masks"])) for result in results]


def without_clock(template: str) -> str:
    """transformers' templates get today's date, ours the same on any day."""
    return template.replace("strftime_now('%Y-%m-%d')", f"'{FIXED_DATE:%Y-%m-%d}'")


def thoughtful(chats: Sequence[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The same with thinking: in a field of its own, and in the content."""
    made = []
    for number, messages in enumerate(chats):
        made.append(
            [
                message | ({"reasoning_content": f"thought {at}"} if number % 2 else {"content": _inline(message, at)})
                if message["role"] == "assistant"
                else message
                for at, message in enumerate(messages)
            ]
        )
    return made


def _inline(message: dict[str, Any], at: int) -> str:
    return f"<think>\nthought {at}\n</think>\n\n{message['content']}"


@pytest.mark.parametrize("name", STYLES)
def test_templates_that_mark_answers_give_what_transformers_gives(name: str, tmp_path: Path) -> None:
    style = STYLES[name]
    folder = write_style(tmp_path / "t", style, marked=True)
    chats = conversations(system=style.system)
    assert learned(folder, chats) == expected(folder, chats)


@pytest.mark.parametrize("name", STYLES)
def test_templates_without_marks_give_the_same_answers(name: str, tmp_path: Path) -> None:
    style = STYLES[name]
    plain, marked = write_style(tmp_path / "p", style), write_style(tmp_path / "m", style, marked=True)
    chats = conversations(system=style.system)
    assert learned(plain, chats) == expected(marked, chats)


@pytest.mark.parametrize("name", STYLES)
def test_only_the_last_answer_or_everything_can_be_learned(name: str, tmp_path: Path) -> None:
    style = STYLES[name]
    plain, marked = write_style(tmp_path / "p", style), write_style(tmp_path / "m", style, marked=True)
    chats = conversations(system=style.system)
    every = learned(plain, chats)
    last = learned(plain, chats, train_on="last")
    assert last == learned(marked, chats, train_on="last")
    for (ids, mask), (same_ids, last_mask), messages in zip(every, last, chats, strict=True):
        assert ids == same_ids
        begins = [at for at, (a, b) in enumerate(zip([0, *mask], mask, strict=False)) if b > a]
        assert len(begins) == sum(message["role"] == "assistant" for message in messages)
        assert last_mask == [0] * begins[-1] + mask[begins[-1] :]
    assert all(all(mask) for _, mask in learned(plain, chats, train_on="all"))


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_thinking_is_kept_in_the_last_answer_as_the_template_writes_it(name: str, tmp_path: Path) -> None:
    style = STYLES[name]
    plain, marked = write_style(tmp_path / "p", style), write_style(tmp_path / "m", style, marked=True)
    chats = [thoughtful(conversations())[1]] if name == "gpt-oss" else thoughtful(conversations())
    for single in (chat[-2:] for chat in chats):
        assert learned(plain, [single], thinking="keep") == expected(marked, [single])
    # With several turns these templates drop earlier thinking: the last answer alone keeps all of its own.
    last = learned(plain, chats, thinking="keep", train_on="last")
    for (ids, mask), (their_ids, their_mask) in zip(last, expected(marked, chats), strict=True):
        assert ids == their_ids
        assert mask[-20:] == their_mask[-20:]
    block = tokenized(plain, [{"messages": chats[-1]}], thinking="keep")
    assert "leaves out the thinking of message" in block.bad_lines[0].what


def test_thinking_is_dropped_wherever_it_is(tmp_path: Path) -> None:
    folder = write_style(tmp_path / "t", STYLES["qwen3"])
    chats = conversations()
    assert learned(folder, thoughtful(chats), thinking="drop") == learned(folder, chats)


def test_tools_and_their_results_go_through_the_template(tmp_path: Path) -> None:
    style = STYLES["qwen2.5"]
    plain, marked = write_style(tmp_path / "p", style), write_style(tmp_path / "m", style, marked=True)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
    messages = [
        {"role": "user", "content": "1 + ü?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"sum": 3}', "name": "add"},
        {"role": "assistant", "content": "3"},
    ]
    wanted = expected(marked, [messages], tools=tools)
    assert tokens_of(tokenized(plain, [{"messages": messages, "tools": tools}])) == wanted
    # As OpenAI sends it: arguments and tools as text, no content beside a call.
    sent = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "ü"}'}}
    wire = [messages[0], {"role": "assistant", "content": None, "tool_calls": [sent]}, *messages[2:]]
    row = {"messages": wire, "tools": json.dumps(tools)}
    assert tokens_of(tokenized(plain, [row])) == wanted
    # As ShareGPT writes it.
    shared = [
        {"from": "human", "value": "1 + ü?"},
        {"from": "function_call", "value": json.dumps(call["function"])},
        {"from": "observation", "value": '{"sum": 3}'},
        {"from": "gpt", "value": "3"},
    ]
    assert tokens_of(tokenized(plain, [{"conversations": shared, "tools": tools}])) == wanted


def test_a_token_over_the_border_of_an_answer_is_learned_as_in_transformers(tmp_path: Path) -> None:
    style = STYLES["chatml"]
    plain, marked = write_style(tmp_path / "p", style), write_style(tmp_path / "m", style, marked=True)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\n\nbegins with lines"}]
    ((ids, mask),) = learned(plain, [chat])
    assert [(ids, mask)] == expected(marked, [chat])
    tokenizer = load_tokenizer(str(plain))
    header = tokenizer.backend.encode(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    first = mask.index(1)
    assert first < len(header.ids)  # the header's line end is part of a longer token here
    assert tokenizer.decode(ids[first:]).startswith("\n\n\n")


def test_messages_of_weight_zero_are_not_learned(tmp_path: Path) -> None:
    for marked in (False, True):
        folder = write_style(tmp_path / str(marked), STYLES["llama3"], marked=marked)
        messages = conversations()[1]
        weighted = [message | ({"weight": 0} if at == 1 else {}) for at, message in enumerate(messages)]
        ((ids, every),) = learned(folder, [messages])
        ((same, some),) = learned(folder, [weighted])
        assert ids == same
        assert 0 < sum(some) < sum(every)
        assert all(a <= b for a, b in zip(some, every, strict=True))


def test_there_is_one_bos_where_template_and_tokenizer_both_write_it(tmp_path: Path) -> None:
    """The tokenizer's own post-processor adds a BOS to text; the template has written it already."""
    folder = write_style(tmp_path / "t", STYLES["llama3"])
    body = json.loads((folder / "tokenizer.json").read_text())
    bos = {"id": "<|begin_of_text|>", "ids": [0], "tokens": ["<|begin_of_text|>"]}
    body["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos["id"]: bos},
    }
    (folder / "tokenizer.json").write_text(json.dumps(body))
    assert load_tokenizer(str(folder)).backend.encode("a").ids[0] == 0
    for ids, _ in learned(folder, conversations()):
        assert ids[0] == 0
        assert ids.count(0) == 1


words = st.text(st.characters(codec="utf-8", exclude_characters="\ue000\ue001\x00"), min_size=1, max_size=30).filter(
    lambda text: text.strip() == text != "" and "think>" not in text
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(STYLES)), contents=st.lists(words, min_size=2, max_size=8))
def test_what_is_learned_reads_as_the_answers(tmp_path: Path, name: str, contents: list[str]) -> None:
    """Decoded, the learned tokens are the answers with their end-of-turn tokens, in order, and nothing else."""
    style = STYLES[name]
    folder = write_style(tmp_path / name, style)
    contents = contents[: len(contents) // 2 * 2]
    roles = ["user", "assistant"] * (len(contents) // 2)
    chat = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    # The fast encoder is tried out anew for each tokenizer, which takes longer than all else here.
    ((ids, mask),) = learned(folder, [chat], encoder="tokenizers")
    tokenizer = load_tokenizer(str(folder))
    answers = [unicodedata.normalize("NFC", text) if style.kind == "byte" else text for text in contents[1::2]]
    text = tokenizer.decode([token for token, is_learned in zip(ids, mask, strict=True) if is_learned])
    at = 0
    for answer in answers:
        at = text.index(answer, at) + len(answer)
    assert len(text) - sum(map(len, answers)) <= 45 * len(answers)
    assert all(content in text for content in answers)


def test_a_conversation_of_hundreds_of_messages_works(tmp_path: Path) -> None:
    style = STYLES["qwen3"]
    plain, marked = write_style(tmp_path / "p", style), write_style(tmp_path / "m", style, marked=True)
    roles = ("user", "assistant") * 150
    chat = [{"role": role, "content": f"word {number}"} for number, role in enumerate(roles)]
    assert learned(plain, [chat]) == expected(marked, [chat])
