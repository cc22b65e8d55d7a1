"""Rows of every format become the same messages, and a row that is none of them is refused in its own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.models.chat_styles import STYLES, write_style
from support.runs.chatting import tokenized, tokens_of
from trainshed.data.chat.conversation import BadSample, Conversation, SampleParser, row_columns
from trainshed.data.tokenize.tokenizer import load_tokenizer
from trainshed.recipe.data import SAMPLE_COLUMNS, SampleFormat

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def parse(row: dict[str, Any], sample_format: SampleFormat = "chat", **options: Any) -> Conversation:
    columns = options.pop("columns", {})
    (conversation,) = SampleParser(sample_format, columns, **options).parse(row)
    return conversation


@pytest.mark.parametrize(
    ("sample_format", "row", "columns"),
    [
        ("chat", {"messages": [QUESTION, ANSWER]}, {}),
        ("chat", {"messages": json.dumps([QUESTION, ANSWER])}, {}),
        ("chat", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, {}),
        ("chat", {"dialogue": [QUESTION, ANSWER]}, {"messages": "dialogue"}),
        (
            "chat",
            {"messages": [{"who": "user", "what": "q"}, {"who": "model", "what": "a"}]},
            {"role": "who", "content": "what"},
        ),
        (
            "chat",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": []},
                ]
            },
            {},
        ),
        ("instruct", {"prompt": "q", "answer": "a"}, {}),
        ("instruct", {"question": "q", "completion": "a"}, {"prompt": "question", "answer": "completion"}),
        ("instruct", {"prompt": [QUESTION], "answer": [ANSWER]}, {}),
        ("alpaca", {"instruction": "q", "input": "", "output": "a"}, {}),
        ("alpaca", {"instruction": "q", "output": "a"}, {}),
    ],
)
def test_every_format_gives_the_same_conversation(
    sample_format: SampleFormat, row: dict[str, Any], columns: dict[str, str]
) -> None:
    assert parse(row, sample_format, columns=columns).messages == [QUESTION, ANSWER]


def test_alpaca_puts_the_input_below_the_instruction() -> None:
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert parse(row, "alpaca").messages[0]["content"] == "Add.\n\n1 and 2"


def test_a_system_prompt_comes_from_the_row_or_the_recipe() -> None:
    system = {"role": "system", "content": "s"}
    assert parse({"messages": [QUESTION, ANSWER]}, system="s").messages == [system, QUESTION, ANSWER]
    assert parse({"messages": [QUESTION, ANSWER], "system": "s"}, system="other").messages[0] == system
    assert parse({"messages": [system, QUESTION, ANSWER]}, system="other").messages[0] == system
    assert parse({"prompt": "q", "answer": "a", "system": "s"}, "instruct").messages[0] == system
    with pytest.raises(BadSample, match="a system prompt in its column and another one"):
        parse({"messages": [system, QUESTION, ANSWER], "system": "t"})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "b"}]},
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, {"role": "assistant", "content": "b"}]},
        {"prompt": "q", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, {"role": "assistant", "content": "b"}]},
    ],
)
def test_a_preference_is_two_conversations_with_one_question(row: dict[str, Any]) -> None:
    better, worse = SampleParser("preference", {}).parse(row)
    assert (better.messages, better.answers) == ([QUESTION, ANSWER], [1])
    assert (worse.messages, worse.answers) == ([QUESTION, {"role": "assistant", "content": "b"}], [1])


def test_earlier_answers_of_a_prompt_are_not_learned() -> None:
    prompt = [QUESTION, ANSWER, QUESTION]
    better, _ = SampleParser("preference", {}).parse({"prompt": prompt, "chosen": "x", "rejected": "y"})
    assert better.answers == [3]


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
BAD: list[tuple[SampleFormat, dict[str, Any], str]] = [
    ("chat", {"messages": []}, "an empty conversation"),
    ("chat", {"messages": [QUESTION]}, "there is no answer to learn from"),
    ("chat", {"messages": [{"role": "narrator", "content": "x"}, ANSWER]}, "unknown role 'narrator'"),
    ("chat", {"messages": [{"role": None, "content": "x"}]}, "unknown role None"),
    ("chat", {"messages": [{"content": "x"}]}, "message 1 has no `role`"),
    ("chat", {"messages": "not json"}, "not JSON"),
    ("chat", {"messages": {"role": "user"}}, "holds a JSON object, not a list of messages"),
    ("chat", {"messages": ["q", "a"]}, "message 1 is a JSON string"),
    ("chat", {"messages": None}, "is null"),
    ("chat", {"text": "x"}, "there is no `messages` or `conversations`"),
    ("chat", {"messages": [QUESTION, {"role": "assistant", "content": {"a": 1}}]}, "JSON object as its content"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER]},
        "part of the type 'image_url'",
    ),
    ("chat", {"messages": [{"role": "user", "content": [[1]]}, ANSWER]}, "part of the type 'array'"),
    ("chat", {"messages": [QUESTION, {"role": "assistant", "content": "  "}]}, "message 2 is an empty answer"),
    ("chat", {"messages": [QUESTION, {"role": "assistant", "content": None}]}, "message 2 is an empty answer"),
    ("chat", {"messages": [QUESTION, ANSWER | {"weight": 0.5}]}, "the weight 0.5"),
    ("chat", {"messages": [QUESTION, ANSWER | {"weight": 0}]}, "there is no answer to learn from"),
    ("chat", {"messages": [QUESTION, ANSWER | {"tool_calls": [{"a": 1}]}]}, "a tool call without a name"),
    ("chat", {"messages": [QUESTION, ANSWER], "tools": "{"}, "not JSON"),
    ("chat", {"messages": [QUESTION, ANSWER], "tools": {"a": 1}}, "not a list of objects"),
    ("chat", {"conversations": [{"from": "function_call", "value": "f(x)"}]}, "not JSON"),
    ("instruct", {"prompt": "q"}, "there is no `answer`"),
    ("instruct", {"prompt": 1, "answer": "a"}, "holds a JSON number"),
    ("instruct", {"prompt": b"\xff", "answer": "a"}, "not UTF-8"),
    ("alpaca", {"instruction": "q", "output": ["a"]}, "holds a JSON array, not text"),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same"),
    ("preference", {"chosen": "q a", "rejected": "q b"}, "where the question ends is not known"),
    ("preference", {"chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "b"}]}, "no message in common"),
]


@pytest.mark.parametrize(("sample_format", "row", "why"), BAD)
def test_a_malformed_row_is_refused_in_its_own_words(
    sample_format: SampleFormat, row: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadSample, match=why) as error:
        SampleParser(sample_format, {}).parse(row)
    assert error.value.hint
    assert not error.value.fatal


def test_thinking_must_be_decided_about() -> None:
    inline = {"role": "assistant", "content": "<think>\nt\n</think>\n\na"}
    apart = {"role": "assistant", "content": "a", "reasoning_content": "t"}
    opened = {"role": "assistant", "content": "t</think>a"}
    for answer in (inline, apart, opened):
        row = {"messages": [QUESTION, answer]}
        with pytest.raises(BadSample, match="a thinking trace") as error:
            parse(row)
        assert error.value.fatal
        assert "--thinking keep" in error.value.hint
        assert parse(row, thinking="drop").messages == [QUESTION, ANSWER]
        kept = parse(row, thinking="keep")
        assert kept.messages == row["messages"]
        assert kept.thinking == {1: "t"}
    about = {"messages": [QUESTION, {"role": "assistant", "content": "Write <think> and </think>."}]}
    assert parse(about).messages == about["messages"]


def test_the_columns_of_a_recipe_are_those_that_are_read() -> None:
    for sample_format, columns in SAMPLE_COLUMNS.items():
        if sample_format == "text":
            continue
        theirs = {column: f"their {column}" for column in columns}
        read = set(row_columns(sample_format, theirs))  # type: ignore[arg-type]
        # `role` and `content` are keys of messages, not columns of the file.
        assert read - {"tools"} == {name for column, name in theirs.items() if column not in ("role", "content")} - {
            "tools"
        }


def test_a_message_of_a_megabyte_works_or_is_too_long(tmp_path: Path) -> None:
    folder = write_style(tmp_path / "t", STYLES["chatml"])
    rows = [{"messages": [{"role": "user", "content": "word " * 200_000}, ANSWER]}]
    ((ids, mask),) = tokens_of(tokenized(folder, rows, length=10**7))
    assert len(ids) > 200_000
    assert load_tokenizer(str(folder)).decode([i for i, m in zip(ids, mask, strict=True) if m]) == "a<|im_end|>\n"
    cut = tokenized(folder, rows, length=1000)
    assert (cut.documents, cut.chat and cut.chat.dropped_unlearned) == (0, 1)
    dropped = tokenized(folder, rows, length=1000, on_too_long="drop")
    assert (dropped.documents, dropped.chat and dropped.chat.dropped_too_long) == (0, 1)
    stopped = tokenized(folder, rows, length=1000, on_too_long="stop")
    assert stopped.bad_lines[0].fatal
    assert "tokens, more than the 1,000 of sequence_length" in stopped.bad_lines[0].what


def test_what_is_too_long_is_cut_at_its_end_and_counted(tmp_path: Path) -> None:
    folder = write_style(tmp_path / "t", STYLES["chatml"])
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": "word " * 50}]}, {"messages": [QUESTION, ANSWER]}]
    whole = tokens_of(tokenized(folder, rows))
    block = tokenized(folder, rows, length=20)
    assert tokens_of(block) == [(ids[:20], mask[:20]) for ids, mask in whole]
    assert block.chat is not None
    assert (block.chat.conversations, block.chat.truncated, block.chat.cut_answers) == (2, 1, 1)
    assert block.chat.longest == len(whole[0][0])
    assert block.chat.learned_tokens == sum(sum(mask[:20]) for _, mask in whole)


def test_a_pair_fits_into_a_row_together(tmp_path: Path) -> None:
    folder = write_style(tmp_path / "t", STYLES["chatml"])
    row = {"prompt": "q", "chosen": "word " * 50, "rejected": "no"}
    (better, _), (worse, _) = tokens_of(tokenized(folder, [row], sample_format="preference"))
    (cut, _), (short, _) = tokens_of(tokenized(folder, [row], sample_format="preference", length=50))
    assert short == worse
    assert cut == better[: 50 - len(worse)]
    both = row | {"rejected": "word " * 60}
    pair = tokens_of(tokenized(folder, [both], sample_format="preference", length=50))
    assert [len(ids) for ids, _ in pair] == [25, 25]


def test_a_template_that_marks_nothing_is_an_error(tmp_path: Path) -> None:
    style = STYLES["llama3"]
    folder = write_style(tmp_path / "t", style)
    (folder / "chat_template.jinja").write_text(style.marked.replace("== 'assistant'", "== 'nobody'"))
    block = tokenized(folder, [{"messages": [QUESTION, ANSWER]}])
    assert block.documents == 0
    assert block.bad_lines[0].what == "no token of this conversation would be learned"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        # Leaves the system prompt out.
        ("{% for m in messages if m.role != 'system' %}{{ m.role ~ m.content }};{% endfor %}", "message 1 (system)"),
        # Numbers its messages from the end, so that all change when one more comes.
        (
            "{% for m in messages %}{{ loop.revindex ~ m.role ~ m.content }};{% endfor %}"
            "{% if add_generation_prompt %}assistant{% endif %}",
            "does not round-trip",
        ),
        # Writes answers in capitals.
        (
            "{% for m in messages %}{{ m.role ~ (m.content | upper if m.role == 'assistant' else m.content) }};"
            "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}",
            "what it says is not in the text",
        ),
    ],
)
def test_a_template_that_does_not_round_trip_is_refused(source: str, why: str, tmp_path: Path) -> None:
    folder = write_style(tmp_path / "t", STYLES["chatml"])
    (folder / "chat_template.jinja").write_text(source)
    messages = [
        {"role": "system", "content": "Be kind."},
        QUESTION,
        ANSWER,
        QUESTION,
        {"role": "assistant", "content": "e"},
    ]
    block = tokenized(folder, [{"messages": messages}])
    assert why in block.bad_lines[0].what
    assert not block.bad_lines[0].fatal


def test_a_template_that_loops_stops_the_preparation_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainshed.data.chat import sandbox

    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    folder = write_style(tmp_path / "t", STYLES["chatml"])
    loops = "{% if messages[0].content == 'q' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(f"{loops}{{% endfor %}}{{% endif %}}" + STYLES["chatml"].plain)
    fine = {"messages": [{"role": "user", "content": "other"}, ANSWER]}
    block = tokenized(folder, [fine, *[{"messages": [QUESTION, ANSWER]}] * 1000])
    assert [bad.number for bad in block.bad_lines] == [2]
    assert block.bad_lines[0].fatal
    assert "more than 0.2 seconds" in block.bad_lines[0].what
