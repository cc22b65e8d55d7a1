"""A recipe of conversations: its tokens are made once, found again, and counted where everybody sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.models.chat_styles import STYLES, conversations, write_style
from support.models.tiny_models import save_tiny_hf
from support.runs.chatting import tokenized, tokens_of
from support.runs.preparing import Notes
from trainshed.cli import run_cli
from trainshed.data.tokens.indexed_dataset import IndexedDataset
from trainshed.data.tokens.token_files import learned_path
from trainshed.errors import InputError, RecipeError
from trainshed.recipe import load_cluster, load_recipe
from trainshed.run_folder import RECIPE_FILE
from trainshed.workflow import prepare_run
from trainshed.workflow.prepare import PreparedRun, tokenise_part
from trainshed.workflow.submit import _scripts

ROWS = [{"messages": messages} for messages in conversations()] * 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("base") / "model"
    save_tiny_hf("llama", folder, vocab_size=1200, max_positions=512)
    return write_style(folder, STYLES["chatml"])


@pytest.fixture
def here(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "chat.jsonl", ROWS)
    body: dict[str, Any] = {
        "trainshed": 1,
        "name": "talk",
        "model": {"from": str(base)},
        "tokenizer": str(base),
        "data": {"sequence_length": 256, "train": [{"path": "chat.jsonl"}]},
        "train": {"mode": "finetune", "steps": 2, "global_batch": 2, "optimizer": {"lr": 1e-3}},
        "layout": {"dp": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(body))
    return tmp_path


def write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepared(*overrides: str, notes: Notes | None = None) -> PreparedRun:
    return prepare_run(load_recipe("recipe.yaml", overrides), reporter=notes or Notes())


def sequences(run: PreparedRun, source: int = 0) -> list[tuple[list[int], list[int]]]:
    found = []
    for prefix in run.data.all_sources[source].prefixes:
        learned = Path(learned_path(prefix)).read_bytes()
        with IndexedDataset(prefix) as reader:
            for number in range(reader.sequences):
                start = int(reader.pointers[number]) // reader.dtype.itemsize
                ids = reader.sequence(number).tolist()
                found.append((ids, list(learned[start : start + len(ids)])))
    return found


def test_conversations_are_prepared_once_and_counted_each_time(here: Path, base: Path) -> None:
    notes = Notes()
    run = prepared(notes=notes)
    assert sequences(run) == tokens_of(tokenized(base, ROWS, length=256))
    counted = [note for note in notes.notes if "conversations" in note]
    assert counted == [counted[0]]
    assert "24 conversations" in counted[0]
    assert "8 truncated (8 in an answer)" in counted[0]
    assert [Path(file.path).suffix for file in run.data.sources[0].files] == [".bin", ".idx", ".learned"]
    again = Notes()
    assert prepared(notes=again).data.sources[0].reused
    assert [note for note in again.notes if "conversations" in note] == counted
    other = prepared("data.train_on=last").data.sources[0]
    assert not other.reused
    assert other.prefixes != run.data.sources[0].prefixes


def test_a_changed_mask_is_found_at_the_next_start(here: Path) -> None:
    run = prepared()
    file = Path(learned_path(run.data.sources[0].prefixes[0]))
    flags = bytearray(file.read_bytes())
    flags[5] ^= 1
    file.write_bytes(flags)
    with pytest.raises(Exception, match="is not the one that was proven"):
        prepared()


def test_one_file_feeds_training_and_validation_by_splits(here: Path, base: Path) -> None:
    run = prepared(
        "data.train=[{path: chat.jsonl, split: 'train[:75%]'}]",
        "data.validation={path: chat.jsonl, split: 'train[75%:]', every: 1, batches: 1}",
    )
    assert sequences(run, 0) == tokens_of(tokenized(base, ROWS[:18], length=256))
    assert sequences(run, 1) == tokens_of(tokenized(base, ROWS[18:], length=256))
    counted = list((here / "store" / "artefacts" / "rows").rglob("rows.json"))
    assert [json.loads(file.read_bytes()) for file in counted] == [{"rows": 24}]


def test_pairs_are_prepared_for_dpo(here: Path, base: Path) -> None:
    rows = [{"question": f"q {i}", "chosen": "yes", "rejected": f"no {i}"} for i in range(60)]
    write_rows(here / "pairs.jsonl", rows)
    run = prepared("train.mode=dpo", "data.train=[{path: pairs.jsonl, columns: {prompt: question}}]")
    columns = (("prompt", "question"),)
    assert sequences(run) == tokens_of(tokenized(base, rows, sample_format="preference", columns=columns))


def test_text_is_fine_tuned_on_as_ever(here: Path) -> None:
    write_rows(here / "text.jsonl", [{"text": "some words"}] * 300)
    run = prepared("data.format=text", "data.train=[{path: text.jsonl}]")
    assert [Path(file.path).suffix for file in run.data.sources[0].files] == [".bin", ".idx"]


def test_parts_of_the_shards_are_made_on_several_machines(here: Path, base: Path) -> None:
    recipe = load_recipe("recipe.yaml", ["data.shards=3"])
    cluster = load_cluster()
    made = [tokenise_part(recipe, cluster, here / "no-run", part, 2) for part in range(2)]
    assert made == [2, 1]
    run = prepare_run(recipe)
    assert run.data.sources[0].reused
    assert sequences(run) == tokens_of(tokenized(base, ROWS, length=256))


def test_a_template_beside_the_recipe_travels_with_it(here: Path, base: Path) -> None:
    (here / "templates").mkdir()
    (here / "templates" / "own.jinja").write_text(STYLES["llama3"].marked)
    recipe = load_recipe("recipe.yaml", ["data.template=templates/own.jinja"])
    run = prepare_run(recipe)
    text = STYLES["llama3"].marked
    assert (run.folder / "templates" / "own.jinja").read_text() == text
    assert load_recipe(str(run.folder / RECIPE_FILE)).data.template == "templates/own.jinja"
    assert _scripts(recipe) == {"templates/own.jinja": text}
    before = run.data.sources[0].prefixes
    (here / "templates" / "own.jinja").write_text(text.replace("<|eot_id|>", "<|end|>"))
    assert prepare_run(recipe, id="other").data.sources[0].prefixes != before
    with pytest.raises(RecipeError, match="does not lie beside the recipe"):
        _scripts(load_recipe("recipe.yaml", [f"data.template={here}/own.jinja"]))


@pytest.mark.parametrize(
    ("override", "why", "hint"),
    [
        ("data.template=zephyr", "there is no chat template 'zephyr'", "write `data.template` with one of chatml"),
        ("data.train=[{path: bad.jsonl}]", "unknown role 'bard'", "write `data.on_bad_line: skip`"),
        ("data.train=[{path: thinking.jsonl}]", "has a thinking trace", "write `data.thinking: keep` to learn it"),
        ("data.train=[{path: chat.jsonl, split: 'train['}]", "is not understood", "train[:95%]"),
        (
            "data.train=[{path: chat.jsonl, columns: {messages: talk}}]",
            "there is no `talk`",
            "`columns: {messages: NAME}`",
        ),
        (
            "data.on_too_long=stop",
            "more than the 256 of sequence_length",
            "write `data.on_too_long: truncate` or `drop`",
        ),
        ("data.train=[{path: notes.txt}]", "holds text, and no rows with columns", ".jsonl"),
        ("data.bos=true", "is not read with chat data", "delete it"),
        ("data.eod=false", "is not read with chat data", "delete it"),
    ],
)
def test_errors_speak_of_keys(here: Path, override: str, why: str, hint: str) -> None:
    write_rows(here / "bad.jsonl", [{"messages": [{"role": "bard", "content": "x"}]}])
    thinking = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>t</think>a"}]
    write_rows(here / "thinking.jsonl", [{"messages": thinking}])
    (here / "notes.txt").write_text("words")
    with pytest.raises(InputError) as error:
        prepared(override)
    assert why in str(error.value)
    assert hint in str(error.value.hint) + str(error.value)


def test_given_tokens_must_be_what_the_mode_learns_from(here: Path, base: Path) -> None:
    write_rows(here / "text.jsonl", [{"text": "some words"}] * 300)
    write_rows(here / "pairs.jsonl", [{"prompt": "q", "chosen": "yes", "rejected": "no"}])
    command = ["data", "prepare", "--tokenizer", str(base), "-i"]
    assert run_cli([*command, "text.jsonl", "--output", "text"]) == 0
    length = ("--sequence-length", "512")
    assert run_cli([*command, "chat.jsonl", "--output", "chat", "--rows", "chat", *length]) == 0
    assert run_cli([*command, "pairs.jsonl", "--output", "pairs", "--rows", "preference", *length]) == 0

    def refused(tokens: str, *overrides: str) -> str:
        with pytest.raises(InputError) as error:
            prepared(f"data.train=[{{tokens: {tokens}}}]", *overrides)
        return str(error.value)

    assert "do not say which of them are learned" in refused("text")
    assert "up to 512 tokens, more than the 256" in refused("chat")
    assert "made of preference rows, and the recipe wants chat" in refused("pairs", "data.sequence_length=512")
    assert "made of chat rows, and the recipe wants preference" in refused(
        "chat", "train.mode=dpo", "data.sequence_length=512"
    )
    assert "these tokens are conversations" in refused("chat", "data.format=text", "data.sequence_length=512")
    run = prepared("data.train=[{tokens: chat}]", "data.sequence_length=512")
    assert [Path(file.path).suffix for file in run.data.sources[0].files] == [".bin", ".idx", ".learned"]


def test_a_recipe_is_inspected_before_anything_is_made(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (here / "chat.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "bard", "content": "x"}]}\n')
    assert run_cli(["data", "inspect", "recipe.yaml", "data.thinking=drop", "-o", "json"]) == 0
    (source,) = json.loads(capsys.readouterr().out)["sources"]
    assert (source["source"], source["sequences"], source["bad_lines"]) == ("source-0", 24, 1)
    assert source["roles"] == {"user": 48, "assistant": 48, "system": 12}
    assert source["bad_line_examples"] == ["chat.jsonl:25: message 1 has the unknown role 'bard'"]
    assert source["template"] == "the tokenizer's own"
    assert not (here / "store").exists()
    assert run_cli(["data", "inspect", "recipe.yaml", "--rows", "5", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"][0]["sequences"] == 5
    assert run_cli(["data", "inspect", "recipe.yaml", "data.format=text"]) == 2
    assert "this recipe reads text" in capsys.readouterr().err
