"""`trainshed generate`: a checkpoint tried at once, whatever it is called by."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.models.lora_checkpoints import save_lora_checkpoint
from support.models.made_tokenizers import CONFIGS, KINDS, save
from support.models.tiny_models import save_tiny_hf
from support.recipes.text_recipes import write_recipe, write_script
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.cli import run_cli
from trainshed.errors import NoSuchName, NotFound
from trainshed.recipe import Lora
from trainshed.serve.loading import model_name
from trainshed.workflow.known_runs import checkpoint_address


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_hf("llama", folder, seed=1, vocab_size=2000)
    template = "{% for message in messages %}<|im_start|>{{ message.role }}: {{ message.content }}{% endfor %}"
    save(KINDS["qwen"](), CONFIGS["qwen"] | {"chat_template": template}, folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a recipe was run, with a tokenizer learned on the way."""
    folder = tmp_path_factory.mktemp("work")
    before = Path.cwd()
    os.chdir(folder)
    try:
        write_script(folder)
        write_recipe(folder, "{script: numbers.py}")
        assert run_cli(["run", "recipe.yaml", "model.preset=null", f"model.config={json.dumps(SMALL)}"]) == 0
    finally:
        os.chdir(before)
    return folder


SMALL = {
    "family": "llama",
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "ffn": 24,
    "vocab_size": 280,
    "max_positions": 64,
    "rope": {"base": 1e4},
}


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert run_cli(["generate", *map(str, arguments), "-o", "json", "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_streams_to_stdout_and_the_rest_to_stderr(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = report(capsys, model, "--prompt", "Return the value", "--max-tokens", 5)
    assert run_cli(["generate", str(model), "--prompt", "Return the value", "--max-tokens", "5", "--device=cpu"]) == 0
    shown = capsys.readouterr()
    assert shown.out == data["text"] + "\n"
    assert "5 tokens, " in shown.err
    assert "weights in fp32 on cpu" in shown.err
    assert data["schema"] == "trainshed.generate/1"
    assert (data["tokens"], data["finish_reason"], data["prompt"]) == (5, "length", "Return the value")
    assert data["tokens_per_second"] > 0


def test_the_prompt_comes_from_a_file_or_from_stdin(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("Return the value")
    monkeypatch.setattr("sys.stdin", io.StringIO("Return the value"))
    told = [
        report(capsys, model, "--max-tokens", 5, *given)
        for given in (["--prompt", "Return the value"], ["--file", tmp_path / "prompt.txt"], [])
    ]
    assert told[0]["text"] == told[1]["text"] == told[2]["text"]


def test_a_seed_gives_the_same_answer_again(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [model, "--prompt", "Return", "--temperature", 1, "--max-tokens", 12]
    told = [report(capsys, *asked, "--seed", seed)["text"] for seed in (1, 1, 2)]
    assert told[0] == told[1] != told[2]


def test_a_stop_text_ends_the_answer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = report(capsys, model, "--prompt", "Return", "--max-tokens", 12)["text"]
    stop = whole[len(whole) // 2 :][:3]
    data = report(capsys, model, "--prompt", "Return", "--max-tokens", 12, "--stop", "never", "--stop", stop)
    assert (data["text"], data["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_a_chat_is_written_by_the_template(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = report(capsys, model, "--prompt", "<|im_start|>user: Why?", "--max-tokens", 5)
    assert report(capsys, model, "--chat", "--prompt", "Why?", "--max-tokens", 5)["text"] == plain["text"]


def test_a_run_is_called_by_its_name_its_folder_or_one_of_its_steps(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    (run,) = (trained / "store" / "runs" / "small").iterdir()
    (step,) = (run / "checkpoints").glob("step-*")
    told = [
        report(capsys, called, "--prompt", "one two", "--max-tokens", 6)
        for called in ("small", f"small/{run.name}", f"store/runs/small/{run.name}", run, step)
    ]
    assert told[0]["prompt_tokens"] > 0
    assert len({each["text"] for each in told}) == 1
    monkeypatch.chdir("/")
    assert report(capsys, run, "--prompt", "one two", "--max-tokens", 6)["text"] == told[0]["text"]


def test_the_export_of_a_run_has_the_words_of_the_run(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    (run,) = (trained / "store" / "runs" / "small").iterdir()
    assert run_cli(["model", "convert", str(run), str(run / "export"), "--to", "hf", "--no-logits"]) == 0
    told = [report(capsys, each, "--prompt", "one two", "--max-tokens", 6) for each in (run, run / "export")]
    assert told[0]["text"] == told[1]["text"]
    # Both are called as the run, not by its id or by the folder's name.
    assert {model_name(str(each)) for each in (run, run / "export")} == {"small"}


def test_a_run_is_converted_and_compared_by_its_name_and_its_tokenizer_goes_along(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    made = str(tmp_path / "made")
    assert run_cli(["model", "convert", "small", made, "--to", "hf", "--no-logits"]) == 0
    shown = capsys.readouterr()
    assert "has no tokenizer" not in shown.err
    assert "1 file of weights" in shown.out
    assert run_cli(["model", "compare", "small", made]) == 0
    assert "equal: " in capsys.readouterr().out
    told = [report(capsys, each, "--prompt", "one two", "--max-tokens", 6) for each in ("small", made)]
    assert told[0]["text"] == told[1]["text"]
    for asked in (["convert", "nobody", str(tmp_path / "none"), "--to", "hf"], ["compare", "small", "nobody"]):
        assert run_cli(["model", *asked]) == 2
        assert "nobody: there is no such folder, and no such run" in capsys.readouterr().err


def test_a_name_that_nobody_knows_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(NoSuchName, match="there is no such folder, and no such run"):
        checkpoint_address("nothing")
    assert run_cli(["generate", "nothing", "--prompt", "x"]) == 2
    assert "no such run" in capsys.readouterr().err
    run = tmp_path / "store" / "runs" / "new" / "1"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("")
    with pytest.raises(NotFound, match="this run has no checkpoint and no export yet"):
        checkpoint_address("new")
    assert checkpoint_address("hf://org/name") == "hf://org/name"


def test_an_answer_of_white_space_alone_is_seen(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "blank")
    # All logits are alike, so that the first token is always taken; and that is the line break.
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    words = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first = next(token for token, number in vocabulary.items() if number == 0)
    vocabulary[first], vocabulary["Ċ"] = vocabulary["Ċ"], 0
    (folder / "tokenizer.json").write_text(json.dumps(words))
    asked = ["generate", str(folder), "--prompt", "Return", "--max-tokens", "5", "--device", "cpu"]
    assert report(capsys, *asked[1:6])["text"] == "\n" * 5
    assert run_cli(asked) == 0
    shown = capsys.readouterr()
    assert shown.out == repr("\n" * 5) + "\n"
    assert "nothing but white space" in shown.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--file", "b"], "both say the prompt"),
        (["--prompt", "a", "--top-p", "2"], "`top_p: 2.0` means nothing"),
        (["--prompt", "a", "--max-tokens", "-1"], "`max_tokens: -1` means nothing"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens 0 is an answer of no tokens"),
        (["--prompt", "word " * 80], "tokens, and prompt and answer have room for 64"),
        (["--file", "none.txt"], "there is no such file"),
    ],
)
def test_wrong_input_says_what_to_write(
    model: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["generate", str(model), *arguments, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_weights_without_a_tokenizer_ask_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_hf("llama", tmp_path)
    assert run_cli(["generate", str(tmp_path), "--prompt", "a", "--device", "cpu"]) == 2
    assert "write --tokenizer FOLDER" in capsys.readouterr().err


def test_an_adapter_is_tried_over_the_weights_that_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HfWeights(model) as weights:
        config = weights.config
    # Its own base is not here: the weights that are named count.
    run = save_lora_checkpoint(tmp_path / "run", config, Lora(rank=4, alpha=32.0), "hf://org/gone", seed=1)
    (step,) = (run / "checkpoints").glob("step-*")
    asked = ("--prompt", "Return the value", "--max-tokens", 8)
    plain = report(capsys, model, *asked)
    adapted = report(capsys, model, "--adapter", run, *asked)
    assert adapted["text"] != plain["text"]
    assert report(capsys, model, "--adapter", step, *asked)["text"] == adapted["text"]
    assert report(capsys, run, "--base", model, *asked)["text"] == adapted["text"]
    merged = tmp_path / "merged"
    assert run_cli(["model", "merge", str(model), str(run), str(merged), "--no-logits"]) == 0
    assert report(capsys, merged, *asked)["text"] == adapted["text"]
    assert run_cli(["generate", str(model), "--adapter", str(run), "--base", str(model), "--prompt", "x"]) == 2
    assert "--base and --adapter both name weights" in capsys.readouterr().err
