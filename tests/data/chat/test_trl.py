"""The same rows through trl's own trainers: their labels are our learned tokens, for SFT and for DPO."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.models.chat_styles import STYLES, conversations, write_style, write_tokenizer
from support.runs.chatting import tokenized, tokens_of
from trainshed.data.chat.answers import render_learned
from trainshed.data.chat.conversation import BadSample, Conversation
from trainshed.data.chat.template import FIXED_DATE, ChatTemplate


@pytest.fixture(scope="module")
def trl() -> SimpleNamespace:
    """trl's trainers and what they need; importing them takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl
        from datasets import Dataset, disable_progress_bars
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
        from trl import chat_template_utils
    disable_progress_bars()
    config = LlamaConfig(
        vocab_size=1300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return SimpleNamespace(
        trl=trl,
        templates=chat_template_utils,
        dataset=Dataset,
        tokenizer=AutoTokenizer.from_pretrained,
        model=LlamaForCausalLM(config),
    )


def settings(tmp_path: Path) -> dict[str, Any]:
    return {"output_dir": str(tmp_path / "o"), "report_to": [], "use_cpu": True, "bf16": False, "max_length": None}


def sft(trl: SimpleNamespace, folder: Path, rows: list[dict[str, Any]], tmp_path: Path) -> list[tuple[Any, Any]]:
    """Ids and learned tokens as SFTTrainer has prepared them."""
    tokenizer = trl.tokenizer(folder)
    tokenizer.chat_template = tokenizer.chat_template.replace("strftime_now('%Y-%m-%d')", f"'{FIXED_DATE:%Y-%m-%d}'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.trl.SFTTrainer(
            trl.model,
            trl.trl.SFTConfig(assistant_only_loss=True, **settings(tmp_path)),
            train_dataset=trl.dataset.from_list(rows),
            processing_class=tokenizer,
        )
    return [
        (row["input_ids"], [int(label != -100) for label in row["labels"]]) for row in trainer.train_dataset.to_list()
    ]


@pytest.mark.parametrize("name", STYLES)
def test_sft_learns_the_same_tokens(trl: SimpleNamespace, name: str, tmp_path: Path) -> None:
    style = STYLES[name]
    marked, plain = write_style(tmp_path / "m", style, marked=True), write_style(tmp_path / "p", style)
    rows = [{"messages": messages} for messages in conversations(system=style.system)]
    assert tokens_of(tokenized(plain, rows)) == sft(trl, marked, rows, tmp_path)


PUBLISHED = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<end_of_turn>"},
    "qwen3": {"eos_token": "<|im_end|>"},
    "phi3": {"eos_token": "<|end|>"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_give_what_trl_has_marked_by_hand(trl: SimpleNamespace, name: str, tmp_path: Path) -> None:
    """trl ships templates as their models have them and, for each, one with generation blocks written in."""
    published = getattr(trl.templates, f"{name}_chat_template")
    folder = write_tokenizer(tmp_path / "t", published, **PUBLISHED[name])
    chats = conversations(system=name != "gemma")
    # For Qwen 3 trl also changes what earlier answers look like.
    rows = [{"messages": messages} for messages in chats if name != "qwen3" or len(messages) < 4]
    assert tokens_of(tokenized(folder, rows)) == sft(trl, folder, rows, tmp_path)


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2.5", "gpt-oss"])
def test_dpo_learns_the_same_answers(trl: SimpleNamespace, name: str, tmp_path: Path) -> None:
    style = STYLES[name]
    folder = write_style(tmp_path / "t", style)
    worse = [{"role": "assistant", "content": "No."}]
    rows = [
        {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": worse}
        for messages in conversations(system=style.system)
    ]
    tokenizer = trl.tokenizer(folder)
    tokenizer.chat_template = tokenizer.chat_template.replace("strftime_now('%Y-%m-%d')", f"'{FIXED_DATE:%Y-%m-%d}'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.trl.DPOTrainer(
            trl.model,
            copy.deepcopy(trl.model),
            args=trl.trl.DPOConfig(**settings(tmp_path)),
            train_dataset=trl.dataset.from_list(rows),
            processing_class=tokenizer,
        )
    expected = []
    for row in trainer.train_dataset.to_list():
        for answer in (row["chosen_ids"], row["rejected_ids"]):
            expected.append((row["prompt_ids"] + answer, [0] * len(row["prompt_ids"]) + [1] * len(answer)))
    ours = tokens_of(tokenized(folder, rows, sample_format="preference"))
    assert ours == expected
    # Without a prompt it is what both begin with, as in trl's extract_prompt.
    implicit = [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in rows]
    assert tokens_of(tokenized(folder, implicit, sample_format="preference")) == expected


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
AGENT: list[dict[str, Any]] = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "result", "name": "add"},
    {"role": "assistant", "content": "It is so."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.mark.parametrize(
    ("name", "last", "turn_end"),
    [
        ("qwen3", "<think>\n\n</think>\n\nYes.", "<|im_end|>\n"),
        ("qwen3_5_think", "\n</think>\n\nYes.", "<|im_end|>\n"),
        ("qwen3_instruct_2507", "Yes.", "<|im_end|>\n"),
        ("llama3_1", "Yes.", "<|eot_id|>"),
    ],
)
def test_published_templates_are_followed_where_they_rewrite_earlier_answers(
    trl: SimpleNamespace, name: str, last: str, turn_end: str
) -> None:
    """Qwen 3 writes thinking after the last question only: both earlier answers change when a question follows."""
    template = ChatTemplate(getattr(trl.templates, f"{name}_chat_template"), {"bos_token": "<s>", "eos_token": "</s>"})
    text, spans = render_learned(template, Conversation([dict(message) for message in AGENT]), "answers")
    call, answer, end = (text[start:stop] for start, stop in spans)
    assert "add" in call
    assert "result" not in call
    assert call.startswith("<tool_call>" if name.startswith("qwen") else '{"name"')
    assert (call[-len(turn_end) :], answer, end) == (turn_end, f"It is so.{turn_end}", f"{last}{turn_end}")


def test_a_template_that_leaves_a_tool_call_out_is_refused(trl: SimpleNamespace) -> None:
    template = ChatTemplate(trl.templates.llama3_chat_template, {"bos_token": "<s>"})
    with pytest.raises(BadSample, match=r"message 2 \(assistant\) cannot be found"):
        render_learned(template, Conversation([dict(message) for message in AGENT]), "answers")
