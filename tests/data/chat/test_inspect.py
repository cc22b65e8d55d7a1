"""A look into conversations: what is learned is seen token by token, and the figures are those of a recount."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.models.chat_styles import STYLES, conversations, write_style
from support.runs.chatting import tokenized, tokens_of
from trainshed.cli import run_cli
from trainshed.cli.data_inspect import _chat_text
from trainshed.data.chat.inspect import inspect_conversations, packing_efficiency
from trainshed.data.tokenize.tokenizer import load_tokenizer

ROWS: list[dict[str, Any]] = [{"messages": messages} for messages in conversations()]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tokenizer whose template writes BOS, and conversations cut to 200 tokens."""
    folder = tmp_path_factory.mktemp("inspect")
    tokenizer = write_style(folder / "t", STYLES["llama3"])
    rows = [*ROWS, {"messages": [{"role": "bard", "content": "x"}]}]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["data", "prepare", "-i", str(folder / "a.jsonl"), "--tokenizer", str(tokenizer), "--rows", "chat"]
    flags = ["--sequence-length", "200", "--on-bad-line", "skip", "--output", str(folder / "c")]
    assert run_cli([*command, *flags]) == 0
    return tokenizer, folder / "c"


def test_the_figures_are_those_of_a_recount(prepared: tuple[Path, Path]) -> None:
    folder, prefix = prepared
    tokens = [(ids[:200], mask[:200]) for ids, mask in tokens_of(tokenized(folder, ROWS))]
    lengths = [len(ids) for ids, _ in tokens]
    shown = inspect_conversations(str(prefix), load_tokenizer(str(folder)), samples=2)
    assert (shown.sequences, shown.tokens) == (len(tokens), sum(lengths))
    assert shown.learned_tokens == sum(sum(mask) for _, mask in tokens)
    assert (shown.shortest, shown.longest) == (min(lengths), max(lengths))
    assert shown.histogram == dict(sorted(Counter(int(math.log2(length)) for length in lengths).items()))
    assert (shown.begin_with_bos, shown.double_bos, shown.bad_lines) == (len(tokens), 0, 1)
    assert shown.counts.cut_answers == 2
    assert shown.warnings() == ["2 answers are cut off at sequence_length"]
    assert shown.packing_efficiency == packing_efficiency(lengths, 200)
    assert [sample.number for sample in shown.samples] == [0, len(tokens) // 2]


def test_runs_put_together_are_the_conversation(prepared: tuple[Path, Path]) -> None:
    folder, prefix = prepared
    tokenizer = load_tokenizer(str(folder))
    shown = inspect_conversations(str(prefix), tokenizer, samples=6)
    for sample, (ids, mask) in zip(shown.samples, tokens_of(tokenized(folder, ROWS)), strict=True):
        ids, mask = ids[:200], mask[:200]
        assert [run.learned for run in sample.runs for _ in range(run.tokens)] == [bool(flag) for flag in mask]
        assert "".join(run.text for run in sample.runs if not run.special).count("<|") <= 1
        special = [run.text for run in sample.runs if run.special]
        assert special[:2] == ["<|begin_of_text|>", "<|start_header_id|>"]
        assert len(special) == sum(token < 19 for token in ids)


def test_learned_tokens_are_green_on_a_terminal_and_between_marks_elsewhere(
    prepared: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prefix = prepared
    assert run_cli(["data", "inspect", str(prefix), "--samples", "1"]) == 0
    said = capsys.readouterr().out
    assert "⟦Yes. ß 😀 café 日本<|eot_id|>⟧" in said
    assert "2 answers are cut off" in said
    assert "a.jsonl:7: message 1 has the unknown role 'bard'" in said
    text = _chat_text(inspect_conversations(str(prefix), load_tokenizer(str(folder)), samples=1))
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["Yes. ß 😀 café 日本"] == "green"
    assert styles["<|start_header_id|>"] == "dim bold reverse"
    assert "⟦" not in text.plain


def test_json_has_everything(prepared: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, prefix = prepared
    assert run_cli(["data", "inspect", str(prefix), "-o", "json", "--samples", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "trainshed.data.chat.inspect/1"
    (source,) = report["sources"]
    assert source["samples"][0]["runs"][0] == {
        "text": "<|begin_of_text|>",
        "tokens": 1,
        "learned": False,
        "special": True,
    }
    assert 0 < source["learned_share"] < 1
    assert source["counts"]["truncated"] == 2
    assert run_cli(["data", "inspect", str(prefix), "data.train_on=last"]) == 2


def test_a_bos_that_is_missing_or_there_twice_is_said(tmp_path: Path) -> None:
    style = STYLES["llama3"]
    body = json.loads((write_style(tmp_path / "t", style) / "tokenizer.json").read_text())
    bos = "<|begin_of_text|>"
    body["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [0], "tokens": [bos]}},
    }
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(body))
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    command = ["data", "prepare", "-i", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "t")]
    for name, times, warning in (("none", 0, "begin without the BOS token"), ("two", 2, "the BOS token twice")):
        template = style.plain.replace("{{- bos_token }}", "{{- bos_token }}" * times)
        (tmp_path / "t" / "chat_template.jinja").write_text(template)
        flags = ["--rows", "chat", "--sequence-length", "200", "--output", str(tmp_path / name)]
        assert run_cli([*command, *flags]) == 0
        shown = inspect_conversations(str(tmp_path / name), load_tokenizer(str(tmp_path / "t")))
        assert shown.tokenizer_adds_bos
        assert any(warning in note for note in shown.warnings()), name


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_packing_is_estimated_between_none_and_the_best(lengths: list[int]) -> None:
    room = 50
    efficiency = packing_efficiency(lengths, room)
    rows = round(sum(lengths) / (efficiency * room))
    assert max(-(-sum(lengths) // room), 1) <= rows <= len(lengths)
    # No row is begun while the next one would fit into another: all but one are more than half full.
    assert rows == 1 or sum(lengths) > (rows - 1) * room / 2


def test_packing_fills_rows_with_what_fits_best() -> None:
    assert packing_efficiency([50, 30, 20, 25, 25], 50) == 1.0
    assert packing_efficiency([30, 30, 30], 50) == 90 / 150
