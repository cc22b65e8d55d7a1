"""The torchtune of PyPI runs what we render, on CPUs: the tokens and the mask that are expected, and the same loss.

We render for 0.7.0, which is on no index; the newest there is 0.6.1. It differs in these keys: the loss is another
component, checkpoints are all kept, and it has no validation, no checkpoints between epochs, no fp8, no mesh of
several axes (`data_parallel_*`, `context_parallel_dim`) and no log level. Keys that it does not know at the top of the
file it does not read. 0.7.0 itself was run by hand from its source (41aaca4) on what this test writes: the same
losses, and two failures of its LoRA recipe that are refused since (checkpoints by steps, clipping on one GPU).
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from support import TESTS
from support.recipes.foreign_tasks import task_of, written
from trainshed.catalog import model_preset
from trainshed.data.sampling.rows import SampleRows
from trainshed.engines.keys import flatten, nest
from trainshed.engines.launch import build_launch
from trainshed.engines.torch.rank import train_rank
from trainshed.engines.torchtune.adapters import ADAPTER_ROWS, WITHOUT_DORA
from trainshed.engines.torchtune.builders import builder_of, known_presets
from trainshed.launch.ranks import free_port
from trainshed.observe.event_log import read_steps
from trainshed.observe.profile_summary import find_traces, summarize_trace
from trainshed.recipe import Recipe, parse_recipe
from trainshed.storage import open_store, parse
from trainshed.workflow import prepare_run, run_layout, train_job

SPECIAL_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
)
# As torchtune's Llama 3 tokenizer cuts text (tiktoken's cl100k).
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEQUENCE_LENGTH = 128
ASKED_STEPS = 3
SIZES = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2}
RECIPE = f"""
name: real
model: {{preset: llama3.1-8b, from: hf://org/tiny}}
tokenizer: hf://org/tiny
data:
  sequence_length: {SEQUENCE_LENGTH}
  train: [{{path: talks.jsonl}}]
train:
  mode: finetune
  steps: {ASKED_STEPS}
  global_batch: 12
  precision: fp32
  optimizer: {{lr: 1.0e-3, clip: null}}
layout: {{shard: full, micro_batch: 12}}
engine:
  name: torchtune
  args:
    device: cpu
    compile: false
    loss._component_: torchtune.modules.loss.CEWithChunkedOutputLoss
    tokenizer.special_tokens_path: tokenizer.json
"""
ONE_BY_ONE = ("data.packing=false",)
PACKED = ("data.packing=true", "train.global_batch={packs}", "layout.micro_batch={packs}")
TINY_BUILDER = {
    "vocab_size": 0,
    "num_layers": SIZES["layers"],
    "num_heads": SIZES["heads"],
    "num_kv_heads": SIZES["kv_heads"],
    "embed_dim": SIZES["hidden"],
    "intermediate_dim": SIZES["ffn"],
    "max_seq_len": SEQUENCE_LENGTH,
    "rope_base": 10000,
    "norm_eps": 1e-5,
    "attn_dropout": 0.0,
}


def conversations() -> list[dict[str, Any]]:
    """Twelve conversations; one has a system prompt and two answers."""
    talks = [
        [
            {"role": "user", "content": f"What is {number} plus {number + 1}?"},
            {"role": "assistant", "content": f" The answer is {2 * number + 1}.\n"},
        ]
        for number in range(12)
    ]
    more = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": "Nothing."}]
    talks[3] = [{"role": "system", "content": "Be brief."}, *talks[3], *more]
    return [{"messages": messages} for messages in talks]


def llama3_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [message["content"] for talk in conversations() for message in talk["messages"]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*texts, *["user assistant system"] * 5], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def write_tiktoken(tokenizer: Tokenizer, file: Path) -> None:
    """Write the ranks of a byte-level BPE as tiktoken reads them."""
    to_byte = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ranks = sorted((number, token) for token, number in tokenizer.get_vocab(with_added_tokens=False).items())
    lines = (
        f"{base64.b64encode(bytes(map(to_byte.__getitem__, token))).decode()} {number}\n" for number, token in ranks
    )
    file.parent.mkdir(parents=True)
    file.write_text("".join(lines))


@dataclass(frozen=True)
class Site:
    """The run's folder as the stages before training leave it: base weights, a tokenizer, and data."""

    folder: Path
    tokenizer: Tokenizer
    model: LlamaForCausalLM

    @property
    def data(self) -> Path:
        return self.folder / "talks.jsonl"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("tune")
    tokenizer = llama3_tokenizer()
    write_tiktoken(tokenizer, folder / "engine/tokenizer/original/tokenizer.model")
    tokenizer.save(str(folder / "engine/tokenizer/tokenizer.json"))
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "engine/tokenizer/tokenizer_config.json").write_text(json.dumps(ends))
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in conversations()))
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=SIZES["hidden"],
        intermediate_size=SIZES["ffn"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        max_position_embeddings=SEQUENCE_LENGTH,
        rms_norm_eps=1e-5,
        initializer_range=0.3,  # so that attention across conversations would show in the loss
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(sizes).float()
    model.save_pretrained(folder / "engine/base", safe_serialization=True)
    return Site(folder, tokenizer, model)


def expected_sample(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Llama 3's form of a conversation as one text, and which tokens torchtune learns: an answer with its header."""
    tokens, learned = [tokenizer.token_to_id("<|begin_of_text|>")], [False]
    for message in messages:
        header = f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n"
        ids = tokenizer.encode(f"{header}{message['content'].strip()}<|eot_id|>", add_special_tokens=False).ids
        tokens += ids
        learned += [message["role"] == "assistant"] * len(ids)
    return [*tokens, tokenizer.token_to_id("<|end_of_text|>")], [*learned, False]


def expected_loss(site: Site) -> float:
    """The mean over all learned tokens, each conversation by itself, by transformers."""
    total, count = 0.0, 0
    for talk in conversations():
        tokens, learned = expected_sample(site.tokenizer, talk["messages"])
        ids = torch.tensor([tokens])
        labels = torch.where(torch.tensor([learned]), ids, -100)
        with torch.no_grad():
            logits = site.model(ids).logits
        total += float(torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum"))
        count += sum(learned)
    return total / count


@dataclass(frozen=True)
class TorchtuneRun:
    """What one run of torchtune gave."""

    samples: list[dict[str, list[int]]]
    losses: list[float]
    output: str


def run_torchtune(site: Site, name: str, *overrides: str, program: str = "llama3") -> TorchtuneRun:
    """Start what we render in one process; of the file, only the model's builder is another."""
    run = site.folder / name
    run.mkdir()
    (run / "engine").symlink_to(site.folder / "engine")
    path = f"data.train=[{{path: {site.data}}}]"
    special = f'engine.args."tokenizer.special_tokens_path"={site.folder}/engine/tokenizer/tokenizer.json'
    recipe = written(RECIPE, [path, special, *overrides])
    task = task_of(
        recipe, nodes=1, steps=ASKED_STEPS, gpus_per_node=1, run_folder=str(run), job_folder=str(run), image=None
    )
    launch = build_launch(task)
    config = flatten(yaml.safe_load(launch.files["torchtune.yaml"]))
    config |= {f"model.{key}": value for key, value in TINY_BUILDER.items()}
    config |= {"model._component_": f"torchtune.models.llama3.{program}", "model.vocab_size": site.model.vocab_size}
    del config["checkpointer.keep_last_n_checkpoints"]
    (run / "torchtune.yaml").write_text(yaml.safe_dump(nest(config), sort_keys=False))
    (run / "start_torchtune.py").write_text(launch.files["start_torchtune.py"])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    driver = TESTS / "engines" / "torchtune" / "cpu_torchtune.py"
    done = subprocess.run(
        [sys.executable, str(driver), launch.program, str(run / "samples.json"), *launch.arguments],
        env={**os.environ, **ranks, **place, "HF_DATASETS_CACHE": str(site.folder / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    log = next((run / "torchtune").glob("log_*.txt")).read_text()
    losses = [float(loss) for loss in re.findall(r"^Step \d+ \| loss:([\d.]+)", log, re.MULTILINE)]
    return TorchtuneRun(json.loads((run / "samples.json").read_text()), losses, done.stderr)


@pytest.fixture(scope="module")
def one_by_one(site: Site) -> TorchtuneRun:
    return run_torchtune(site, "one-by-one", *ONE_BY_ONE, "observe.profile={start: 2, steps: 1, shapes: true}")


def test_torchtune_reads_the_conversations_as_the_recipe_says(site: Site, one_by_one: TorchtuneRun) -> None:
    for talk, sample in zip(conversations(), one_by_one.samples, strict=True):
        tokens, learned = expected_sample(site.tokenizer, talk["messages"])
        assert sample["tokens"] == tokens
        assert [not masked for masked in sample["mask"]] == learned


def test_the_loss_of_the_first_step_is_that_of_the_answers(site: Site, one_by_one: TorchtuneRun) -> None:
    assert one_by_one.losses[0] == pytest.approx(expected_loss(site), abs=1e-4)


def test_a_run_has_exactly_the_steps_of_the_recipe_though_the_data_has_fewer(one_by_one: TorchtuneRun) -> None:
    assert len(one_by_one.losses) == ASKED_STEPS
    assert "3 steps: 3 passes of 1 of the 1 steps that the data has" in one_by_one.output
    assert one_by_one.losses == sorted(one_by_one.losses, reverse=True), "the weights did not move"


def test_the_profile_covers_the_step_that_the_recipe_names(site: Site, one_by_one: TorchtuneRun) -> None:
    assert one_by_one.losses, "it has run"
    (trace,) = find_traces(site.folder / "one-by-one")
    summary = summarize_trace(trace)
    assert (summary.device, summary.steps) == ("cpu", 1)
    assert summary.compute > 0


def test_packed_conversations_do_not_see_each_other(site: Site) -> None:
    sizes = [len(expected_sample(site.tokenizer, talk["messages"])[0]) for talk in conversations()]
    packs = packed_rows(sizes)
    assert packs < len(sizes) / 2
    run = run_torchtune(site, "packed", *(override.format(packs=packs) for override in PACKED))
    assert len(run.samples) == packs
    assert {len(sample["tokens"]) for sample in run.samples} == {SEQUENCE_LENGTH}
    assert run.losses[0] == pytest.approx(expected_loss(site), abs=1e-4)


def test_every_builder_that_we_name_takes_the_keys_that_we_write() -> None:
    """Read from the source of the installed torchtune, which has no Qwen 3 yet."""
    taken = dict(installed_builders())
    keys = {key.removeprefix("model.") for row in ADAPTER_ROWS for key in row.keys} | {"apply_lora_to_output"}
    # Llama 3.3's are other names of Llama 3.1's.
    presets = [preset for preset in known_presets() if not preset.startswith(("qwen3", "llama3.3"))]
    assert len(presets) > 15
    for preset in presets:
        builder = builder_of(written(RECIPE, [f"model={{preset: {preset}, from: hf://org/x}}"]), model_preset(preset))
        assert builder is not None
        without_dora = {"use_dora"} if builder.name in WITHOUT_DORA else set()
        assert builder.component(lora=False) in taken
        assert taken[builder.component(lora=True)] >= keys - without_dora, preset


def installed_builders() -> Iterator[tuple[str, set[str]]]:
    """Every builder of a model that the installed torchtune has, and the arguments that it takes."""
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None
    assert spec.origin is not None
    for file in (Path(spec.origin).parent / "models").glob("*/_model_builders.py"):
        for line in ast.parse(file.read_text()).body:
            if isinstance(line, ast.FunctionDef):
                taken = {argument.arg for argument in line.args.args}
                yield f"torchtune.models.{file.parent.name}.{line.name}", taken


OURS = """
name: ours
model: {{from: {folder}/engine/base}}
tokenizer: {folder}/engine/tokenizer
data:
  sequence_length: {length}
  template: torchtune_llama3.jinja
  train: [{{path: {folder}/talks.jsonl}}]
train: {{mode: finetune, steps: 1, global_batch: 12, precision: fp32, optimizer: {{lr: 1.0e-3, clip: null}}}}
layout: {{dp: 1, micro_batch: 1}}
store: {folder}/store
"""


@pytest.mark.parametrize("packing", [False, True])
def test_our_engine_learns_the_same_tokens_and_begins_at_the_same_loss(
    site: Site, one_by_one: TorchtuneRun, packing: bool
) -> None:
    """With the chat template that writes conversations, and marks answers, as torchtune does."""
    shutil.copy(TESTS.parent / "docs" / "examples" / "torchtune_llama3.jinja", site.folder)
    text = OURS.format(folder=site.folder, length=SEQUENCE_LENGTH)
    overrides = [f"data.packing={str(packing).lower()}"]
    rows = epoch_rows(parse_recipe(text, [*overrides, "train.global_batch=1"], folder=site.folder))
    run = prepare_run(parse_recipe(text, [*overrides, f"train.global_batch={rows}"], folder=site.folder))
    assert (rows == len(one_by_one.samples)) is not packing
    theirs = [(sample["tokens"], [not masked for masked in sample["mask"]]) for sample in one_by_one.samples]
    assert sorted(documents(run.order.rows(0, 0, rows), site.tokenizer)) == sorted(theirs)
    train_rank(train_job(run, run_layout(run)), run_folder=run.folder)
    losses = [step["loss"] for step in read_steps(*open_store(parse(str(run.folder))))]
    assert losses[0] == pytest.approx(one_by_one.losses[0], abs=1e-4)


def epoch_rows(recipe: Recipe) -> int:
    """How many rows one pass over the data has."""
    rows = prepare_run(recipe).order.sources[0].epoch_samples
    assert rows is not None
    return rows


def documents(rows: SampleRows, tokenizer: Tokenizer) -> list[tuple[list[int], list[bool]]]:
    """The conversations of some rows, with what is learned of each."""
    assert rows.document_starts is not None
    assert rows.learned is not None
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    found = []
    for tokens, starts, learned in zip(rows.tokens, rows.document_starts, rows.learned, strict=True):
        for start in sorted(set(starts.tolist())):
            columns = starts == start
            if tokens[start] == begin:  # not the padding
                found.append((tokens[columns].tolist(), learned[columns].tolist()))
    return found


def packed_rows(sizes: list[int]) -> int:
    """How many rows torchtune packs into: each in turn, as long as the next one fits."""
    rows, used = 1, 0
    for size in sizes:
        rows, used = (rows, used + size) if used + size <= SEQUENCE_LENGTH else (rows + 1, size)
    return rows


def test_adapters_begin_at_the_loss_of_the_base_and_are_all_that_is_saved(site: Site) -> None:
    lora = "train.lora={rank: 2, alpha: 4, targets: [q_proj, v_proj, mlp], dora: true}"
    schedule = "train.schedule={name: cosine, warmup: 1}"
    run = run_torchtune(site, "lora", *ONE_BY_ONE, lora, schedule, program="lora_llama3")
    assert run.losses[0] == pytest.approx(expected_loss(site), abs=1e-4)
    assert len(run.losses) == ASKED_STEPS
    saved = [file.name for file in (site.folder / "lora/checkpoints").rglob("*.safetensors")]
    assert set(saved) == {"adapter_model.safetensors"}
