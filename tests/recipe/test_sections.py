"""What the keys of a recipe ask of each other. Each message is written out once, here."""

from collections.abc import Callable

import pytest

from trainshed.errors import RecipeError
from trainshed.recipe import Recipe, parse_recipe, run_id
from trainshed.recipe.section import format_short_duration

CONFIG = (
    "model.config={family: llama, layers: 2, hidden: 64, heads: 4, ffn: 128, vocab_size: 1000, max_positions: 256, "
    "rope: {base: 1e4}}"
)
GPT2 = "model.config={family: gpt2, layers: 2, hidden: 64, heads: 4, ffn: 128, vocab_size: 1000, max_positions: 128}"
MIXTRAL = (
    "model.config={family: mixtral, layers: 2, hidden: 64, heads: 4, vocab_size: 1000, max_positions: 128, "
    "rope: {base: 1e4}, moe: {experts: 4, top_k: 2, ffn: 32}}"
)
NO_PRESET = "model.preset=null"
FROM = ("model.init=null", "model.from=hf://org/name")

CASES: dict[str, tuple[tuple[str, ...], str, str, str | None]] = {
    # model
    "two architectures": (
        (CONFIG,),
        "model.config",
        "`preset` and `config` both name the architecture",
        "keep one of them",
    ),
    "no architecture": (
        (NO_PRESET,),
        "model",
        "names no architecture",
        "write `preset: llama3.1-8b`, `config: {…}` or `from: hf://…`",
    ),
    "added tokens without weights": (
        ("model.added_tokens=[<tool>]",),
        "model.added_tokens",
        "are for weights that lack them, and there are none to start from",
        "delete the line: a model that starts from nothing has the words of its tokenizer",
    ),
    "added tokens of synthetic data": (
        (*FROM, "model.added_tokens=[<tool>]", "data={synthetic: true, sequence_length: 8}"),
        "model.added_tokens",
        "synthetic data has no text",
        "delete the line",
    ),
    "added tokens without a tokenizer": (
        (*FROM, "model.added_tokens=[<tool>]", "data.train=[{tokens: prefix}]", "tokenizer=null"),
        "model.added_tokens",
        "there is no tokenizer to add them to",
        "write `tokenizer: hf://org/name`",
    ),
    "an added token with white space": (
        (*FROM, "model.added_tokens=['<tool> ']"),
        "model.added_tokens.0",
        "'<tool> ' begins or ends with white space, which templates and tokenizers remove",
        "write '<tool>'",
    ),
    "an added token that is white space": (
        (*FROM, "model.added_tokens=['<tool>', ' ']"),
        "model.added_tokens.1",
        "' ' begins or ends with white space, which templates and tokenizers remove",
        "write a text",
    ),
    "an added token twice": (
        (*FROM, "model.added_tokens=[<a>, <b>, <a>]"),
        "model.added_tokens.2",
        "'<a>' is named twice",
        "delete one of them",
    ),
    "no weights": (
        ("model.init=null",),
        "model.init",
        "there are no weights to start from and nobody said to train from nothing",
        "write `from: hf://org/name` or `init: random` under `model`",
    ),
    "two origins": (
        ("model.from=hf://org/name",),
        "model.init",
        "`from` and `init: random` contradict each other",
        "keep one of them",
    ),
    "a verdict of nothing": (
        ("model.verdict=ignore",),
        "model.verdict",
        "there are no weights with a verdict",
        "delete the line",
    ),
    # what nothing reads
    "steps between checkpoints that are off": (
        ("checkpoint={save: false, every: 7}",),
        "checkpoint.every",
        "is not read: no checkpoint is written (`save: false`)",
        "delete one of the two; on the command line: checkpoint=off",
    ),
    "number of checkpoints that are off": (
        ("checkpoint={save: false, keep: 7}",),
        "checkpoint.keep",
        "is not read: no checkpoint is written (`save: false`)",
        "delete one of the two; on the command line: checkpoint=off",
    ),
    "how checkpoints that are off are written": (
        ("checkpoint={save: false, async: false}",),
        "checkpoint.async",
        "is not read: no checkpoint is written (`save: false`)",
        "delete one of the two",
    ),
    "a budget of checkpoints that are off": (
        ("checkpoint=off", "budgets={checkpoint: 5m}"),
        "budgets.checkpoint",
        "no checkpoint is written (`checkpoint: off`)",
        "delete it",
    ),
    "a budget of no validation": (
        ("budgets={validation: 5m}",),
        "budgets.validation",
        "no validation loss is measured",
        "write `data.validation`, or delete it",
    ),
    "averages of no validation": (
        ("train.ema={decay: 0.9, validation: true}",),
        "train.ema.validation",
        "no validation loss is measured",
        "write `data.validation`, or delete it",
    ),
    **{
        f"{key} of {what}": (
            (data, "tokenizer=null", f"data.{key}={value}"),
            f"data.{key}",
            f"is not read: {why}",
            "delete it",
        )
        for what, data, why in (
            ("prepared tokens", "data={sequence_length: 8, train: [{tokens: a}]}", "all tokens are prepared already"),
            ("synthetic data", "data={sequence_length: 8, synthetic: true}", "synthetic data has no text"),
        )
        for key, value in (("shards", "3"), ("eod", "false"), ("bos", "true"), ("on_bad_line", "skip"))
    },
    "a share that nobody is told of": (
        ("notify=[{command: [page], on: [end], low_goodput: 0.2}]",),
        "notify.0.low_goodput",
        "is not told of (`on`)",
        "write low_goodput in `on`, or delete it",
    ),
    # architecture
    "fixed by the family": (
        (NO_PRESET, CONFIG, "model.config.norm=layer"),
        "model.config.norm",
        "the family llama has `norm: rms`",
        "delete the line",
    ),
    "kv heads": (
        (NO_PRESET, CONFIG, "model.config.kv_heads=3"),
        "model.config.kv_heads",
        "3 does not divide the 4 heads",
        "write a divisor of 4",
    ),
    "heads do not divide": (
        (NO_PRESET, CONFIG, "model.config.heads=3"),
        "model.config.head_dim",
        "is missing",
        "write for example `head_dim: 128`",
    ),
    "rope missing": (
        (NO_PRESET, CONFIG, "model.config.rope=null"),
        "model.config.rope",
        "is missing: the family llama has rotary positions",
        "rope: {base: 10000.0}",
    ),
    "odd head": (
        (NO_PRESET, CONFIG, "model.config.head_dim=15"),
        "model.config.head_dim",
        "15 is odd; rotary positions turn pairs",
        "write an even number",
    ),
    "rope with learned positions": (
        (NO_PRESET, GPT2, "model.config.rope.base=1e4", "data.sequence_length=128"),
        "model.config.rope",
        "the family gpt2 has learned positions",
        "delete `rope`",
    ),
    "no ffn": ((NO_PRESET, CONFIG, "model.config.ffn=null"), "model.config.ffn", "is missing", "ffn: 256"),
    "ffn with experts": (
        (NO_PRESET, MIXTRAL, "model.config.ffn=64"),
        "model.config.ffn",
        "is not read where every layer has experts",
        "write the width as `moe.ffn`",
    ),
    "experts missing": (
        (NO_PRESET, MIXTRAL, "model.config.moe=null"),
        "model.config.moe",
        "is missing: the family mixtral has experts",
        "moe: {experts: 8, top_k: 2, ffn: 14336}",
    ),
    "experts in a dense family": (
        (NO_PRESET, MIXTRAL, "model.config.family=llama"),
        "model.config.moe",
        "the family llama has no experts",
        "write `family: mixtral`",
    ),
    "too many experts": (
        (NO_PRESET, MIXTRAL, "model.config.moe.top_k=5"),
        "model.config.moe.top_k",
        "5 is more than the 4 experts",
        "write fewer",
    ),
    "llama3 scaling in part": (
        (
            NO_PRESET,
            CONFIG,
            "model.config.rope.scaling={kind: llama3, factor: 8, low_frequency_factor: 1, high_frequency_factor: 4}",
        ),
        "model.config.rope.scaling.original_positions",
        "is missing",
        "Llama 3.1 has low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_positions: 8192",
    ),
    "linear scaling with more": (
        (NO_PRESET, CONFIG, "model.config.rope.scaling={kind: linear, factor: 8, original_positions: 9}"),
        "model.config.rope.scaling.original_positions",
        "is not read with `kind: linear`",
        "delete it, or write `kind: llama3`, `kind: yarn` or `kind: longrope`",
    ),
    "yarn without the context before it": (
        (NO_PRESET, CONFIG, "model.config.rope.scaling={kind: yarn, factor: 8}"),
        "model.config.rope.scaling.original_positions",
        "is missing",
        "write the context length before the stretch, for example original_positions: 8192",
    ),
    "a pattern of windows without a window": (
        (NO_PRESET, CONFIG, "model.config.attention_pattern=[window, full]"),
        "model.config.sliding_window",
        "is missing: `attention_pattern` names layers that have it",
        "write it",
    ),
    "a pattern that is one kind": (
        (NO_PRESET, CONFIG, "model.config.sliding_window=8", "model.config.attention_pattern=[window, window]"),
        "model.config.attention_pattern",
        "gives all 2 layers the same attention",
        "delete `attention_pattern`",
    ),
    "a pattern that repeats itself": (
        (
            NO_PRESET,
            CONFIG,
            "model.config.sliding_window=8",
            "model.config.attention_pattern=[window, full, window, full]",
        ),
        "model.config.attention_pattern",
        "repeats itself, or is longer than the 2 layers",
        "write [window, full]",
    ),
    "a rotary base for windows that no layer has": (
        (NO_PRESET, CONFIG, "model.config.rope.local_base=10000"),
        "model.config.rope.local_base",
        "is for layers with a window, and there are none",
        "delete the line",
    ),
    # sources
    "two origins of documents": (
        ("data.train.0.tokens=corpus",),
        "data.train.0.tokens",
        "`path` and `tokens` in one source",
        "make them two sources",
    ),
    "no origin": (
        ("data.train=[{name: x}]", "tokenizer=null"),
        "data.train.0",
        "a source without `path`, `tokens` or `script`",
        "write for example `path: corpus/*.jsonl`",
    ),
    "a source that is a word": (
        ("data.train=corpus.jsonl",),
        "data.train",
        "`corpus.jsonl` is not a source",
        "write {path: corpus.jsonl}",
    ),
    "a source among sources that is a word": (
        ("data.train=[{path: a}, b]",),
        "data.train.1",
        "`b` is not a source",
        "write {path: b}",
    ),
    "args without script": (
        ("data.train.0.args=[x]",),
        "data.train.0.args",
        "is read with `script` only",
        "delete it",
    ),
    "key of tokens": (
        ("data.train=[{tokens: x, key: text}]",),
        "data.train.0.key",
        "is not read: these tokens are already prepared",
        "delete it",
    ),
    "documents of tokens": (
        ("data.train=[{tokens: x, documents: line}]",),
        "data.train.0.documents",
        "is not read: these tokens are already prepared",
        "delete it",
    ),
    # between steps
    "answers without prompts": (
        ("data.validation={path: v.jsonl, answer_tokens: 8}",),
        "data.validation.answer_tokens",
        "is read with `prompts` only",
        "write `prompts: [...]`, or delete it",
    ),
    "prompts without a tokenizer": (
        ("data.train=[{tokens: x}]", "tokenizer=null", "data.validation={tokens: v, prompts: [Why?]}"),
        "tokenizer",
        "is missing: text must become tokens",
        "tokenizer: hf://org/name, or {train: {vocab_size: 8192}}",
    ),
    "early stop without a loss": (
        ("train.early_stop={patience: 3}",),
        "train.early_stop",
        "needs a validation loss, and none is measured",
        "write `data.validation`",
    ),
    "best without a loss": (
        ("checkpoint.best={by: validation}",),
        "checkpoint.best",
        "needs a validation loss, and none is measured",
        "write `data.validation`",
    ),
    # data
    "data is a word": (
        ("data=corpus.jsonl",),
        "data",
        "`corpus.jsonl` is not a data section",
        "write `data: {sequence_length: …, train: [{path: …}]}`",
    ),
    "no sources": (
        ("data.train=null", "data.train=[]"),
        "data.train",
        "is missing",
        "train: [{path: corpus/*.jsonl}], or `data: synthetic`",
    ),
    "no sequence length": (
        ("data.sequence_length=null",),
        "data.sequence_length",
        "is missing",
        "sequence_length: 8192",
    ),
    "synthetic with sources": (
        ("data.synthetic=true",),
        "data.train",
        "is not read with synthetic data",
        "delete it, or `synthetic`",
    ),
    "some weights": (
        ("data.train.0.weight=0.5", "data.train.1={path: b}"),
        "data.train.1.weight",
        "is missing: other sources have a weight",
        "give every source a weight, or none (then shares follow the number of tokens)",
    ),
    "one name twice": (
        ("data.train.0.name=a", "data.train.1={path: b, name: a}"),
        "data.train.0.name",
        "two sources are called `a`",
        "rename one",
    ),
    "validation of nothing": (
        ("data.validation.every=10",),
        "data.validation",
        "has no documents",
        "write `path: …` there, or `split: {train: 0.98, validation: 0.02}` under `data`",
    ),
    "split and validation": (
        ("data.split={train: 0.9, validation: 0.1}", "data.validation.path=valid.jsonl"),
        "data.split",
        "`validation` already has its own documents",
        "delete `split`, or the source",
    ),
    "split without validation": (
        ("data.split={train: 0.9, test: 0.1}", "data.validation.every=5"),
        "data.split.validation",
        "is 0, but the loss is to be measured",
        "split: {train: 0.98, validation: 0.02}",
    ),
    "split of more than all": (
        ("data.split={train: 0.9, validation: 0.2}",),
        "data.split",
        "the fractions sum to 1.1",
        "make them sum to 1, e.g. {train: 0.98, validation: 0.02}",
    ),
    "empty skip": (
        ("data.skip=[[5, 5]]",),
        "data.skip.0",
        "[5, 5] is empty",
        "write [start, stop] with start < stop",
    ),
    "overlapping skips": (
        ("data.skip=[[0, 10], [9, 12]]",),
        "data.skip.1",
        "[9, 12] begins before the range above it ends",
        "sort the ranges and join those that overlap",
    ),
    # addresses
    "empty address": (
        ("tokenizer=' '",),
        "tokenizer",
        "an empty address",
        "write a path, or s3://, gs://, az:// or hf://…",
    ),
    "unknown scheme": (
        ("store=ftp://host/x",),
        "store",
        "`ftp://` is not known",
        "write one of s3://, gs://, az://, hf://, http://, https://, or a path",
    ),
    "mistaken scheme": (("store=gcs://b/x",), "store", "`gcs://` is not known here", "write gs://bucket/path"),
    "file scheme": (("store=file:///x",), "store", "`file:///x`: files are written as plain paths", "write /x"),
    "no place": (
        ("tokenizer=hf://name",),
        "tokenizer",
        "`hf://name` names no place to read",
        "write hf://org/name@revision or hf://datasets/org/name@revision/path",
    ),
    "half a scheme": (("store=s3:bucket",), "store", "`s3:bucket` names no place to read", "write s3://bucket/path"),
    # train
    "no length": (
        ("train.steps=null",),
        "train",
        "says nothing about the length of the run",
        "write `steps: 1000`, `tokens: 20B` or `epochs: 1`",
    ),
    "two lengths": (
        ("train.epochs=1",),
        "train.epochs",
        "`steps` and `epochs` both say how long to train",
        "keep one of them; on the command line: train.steps=null",
    ),
    "min_lr above lr": (
        ("train.schedule={name: cosine, min_lr: 1.0}",),
        "train.schedule.min_lr",
        "1 is above the peak `optimizer.lr` of 0.001",
        "write a smaller one",
    ),
    "constant with decay": (
        ("train.schedule.decay=5",),
        "train.schedule.decay",
        "a constant schedule has no decay",
        "delete it, or write `name: cosine`",
    ),
    "constant with min_lr": (
        ("train.schedule.min_lr=1e-5",),
        "train.schedule.min_lr",
        "a constant schedule has no decay",
        "delete it, or write `name: cosine`",
    ),
    "wsd without decay": (
        ("train.schedule.name=wsd",),
        "train.schedule.decay",
        "is missing: wsd needs the length of its final decay",
        "decay: 1000",
    ),
    "decay before warm-up": (
        ("train.schedule={name: linear, warmup: 10, decay: 10}",),
        "train.schedule.decay",
        "the decay ends at step 10, before the warm-up of 10 steps",
        "write the step at which `min_lr` is reached",
    ),
    "warm-up as long as the run": (
        ("train.schedule={name: cosine, warmup: 50}", "train.steps=50"),
        "train.schedule.warmup",
        "the warm-up of 50 steps leaves nothing of a run of 50: the learning rate would never reach its peak",
        "write `warmup: 5`, or a longer run; on the command line: train.schedule.warmup=5",
    ),
    "warm-up longer than the tokens": (
        ("train.schedule.warmup=4", "train.steps=null", "train.tokens=4097"),
        "train.schedule.warmup",
        "the warm-up of 4 steps leaves nothing of a run of 3: the learning rate would never reach its peak",
        "write `warmup: 0`, or a longer run; on the command line: train.schedule.warmup=0",
    ),
    "ramp from the top": (
        ("train.batch_ramp={start: 8, increment: 2, samples: 100}",),
        "train.batch_ramp.start",
        "8 is not below `global_batch: 8`",
        "write a smaller one, or delete `batch_ramp`",
    ),
    "ramp that never arrives": (
        ("train.batch_ramp={start: 2, increment: 4, samples: 1k}",),
        "train.batch_ramp.increment",
        "steps of 4 from 2 never meet 8",
        "write a divisor of 6",
    ),
    # layout
    "interleaving nothing": (
        ("layout.vp=2",),
        "layout.vp",
        "vp: 2 interleaves a pipeline, and pp is 1",
        "write pp: 2 or more, or delete vp",
    ),
    "schedule of no pipeline": (
        ("layout.schedule=1f1b",),
        "layout.schedule",
        "is not read without a pipeline",
        "write pp: 2 or more, or delete it",
    ),
    "more chunks than any model has layers": (
        ("layout={pp: 8, vp: 1000000000000}",),
        "layout.vp",
        "pp · vp = 8,000,000,000,000 chunks: no model has so many layers",
        "write smaller ones",
    ),
    "interleaved without vp": (
        ("layout={pp: 2, schedule: interleaved}",),
        "layout.schedule",
        "interleaved needs vp of 2 or more",
        "write vp: 2, or `schedule: 1f1b`",
    ),
    "1f1b with vp": (
        ("layout={pp: 2, vp: 2, schedule: 1f1b}",),
        "layout.schedule",
        "1f1b has one chunk per rank, and vp is 2",
        "write `schedule: interleaved`, or delete vp",
    ),
    "stages": (
        ("layout={pp: 2, stages: [1, 2, 1]}",),
        "layout.stages",
        "3 numbers for pp · vp = 2 chunks",
        "write the layers of every chunk",
    ),
    "replicate": (
        ("layout={dp: 4, replicate: 3}",),
        "layout.replicate",
        "3 does not divide dp: 4",
        "write a divisor of 4",
    ),
    # engine
    "args of our engine": (
        ("engine.args={x: 1}",),
        "engine.args",
        "the torch engine takes no `args`: its options are keys of the recipe",
        "delete it",
    ),
    # the whole
    "nothing to fine-tune": (
        ("train.mode=finetune",),
        "model.from",
        "is missing: there is nothing to fine-tune",
        "from: hf://org/name",
    ),
    "nothing under the adapters": (
        ("train.lora={rank: 8, alpha: 16}",),
        "model.from",
        "is missing: adapters need weights to sit on",
        "from: hf://org/name",
    ),
    "no tokenizer": (
        ("tokenizer=null",),
        "tokenizer",
        "is missing: text must become tokens",
        "tokenizer: hf://org/name, or {train: {vocab_size: 8192}}",
    ),
    "no tokenizer beside weights": (
        ("tokenizer=null", "model.init=null", "model.from=s3://bucket/llama"),
        "tokenizer",
        "is missing: text must become tokens",
        "tokenizer: s3://bucket/llama, or {train: {vocab_size: 8192}}",
    ),
    "new tokenizer, old weights": (
        ("tokenizer={train: {vocab_size: 300}}", *FROM),
        "tokenizer",
        "a new tokenizer does not fit weights that know another",
        "tokenizer: hf://org/name",
    ),
    "tokenizer from tokens": (
        ("tokenizer={train: {vocab_size: 300}}", "data.train=[{tokens: x}]"),
        "tokenizer",
        "there is no text to learn a tokenizer from",
        "write the address of one",
    ),
    "fine-tuning on noise": (
        ("data={synthetic: true, sequence_length: 8}", "train.mode=finetune", *FROM),
        "data",
        "synthetic data has no answers to fine-tune on",
        "write `train.mode: pretrain`",
    ),
    "epochs of noise": (
        ("data=synthetic", "train.steps=null", "train.epochs=1"),
        "train.epochs",
        "synthetic data has no end to pass",
        "write `steps` or `tokens`",
    ),
    "too long for learned positions": (
        (NO_PRESET, GPT2),
        "data.sequence_length",
        "256 is more than the 128 positions the model learns",
        "write 128 or less",
    ),
    "longer than rotary positions are made for": (
        (NO_PRESET, CONFIG, "data.sequence_length=512"),
        "data.sequence_length",
        "512 is more than the 256 positions the model is made for",
        "write 256 or less; to go beyond it on purpose, raise `model.config.max_positions`",
    ),
    "vocabulary larger than the embedding": (
        (NO_PRESET, CONFIG, "tokenizer={train: {vocab_size: 1001}}"),
        "tokenizer.train.vocab_size",
        "1001 is more than the 1000 rows of the model's embedding",
        "write 1000 or less",
    ),
    "router losses without a router": (
        (NO_PRESET, CONFIG, "train.moe.z_loss=0.1"),
        "train.moe",
        "the model has no experts",
        "delete it",
    ),
    "expert parallel without experts": (
        (NO_PRESET, CONFIG, "layout.ep=2"),
        "layout.ep",
        "the model has no experts to spread",
        "delete it",
    ),
}


def test_a_warm_up_may_outlast_a_leg_of_a_longer_schedule_or_be_the_whole_of_a_constant_one(
    recipe: Callable[..., Recipe],
) -> None:
    assert recipe("train.schedule={name: cosine, warmup: 50, decay: 900}", "train.steps=20").train.steps == 20
    assert recipe("train.schedule.warmup=20", "train.steps=20").train.steps == 20


@pytest.mark.parametrize("case", CASES)
def test_a_contradiction_says_where_it_is_and_what_to_write(error: Callable[..., RecipeError], case: str) -> None:
    overrides, key, what, hint = CASES[case]
    found = error(*overrides)
    assert (found.what, found.hint) == (what, hint)
    assert found.where is not None
    assert f"({key})" in found.where or f" {key}=" in found.where


def test_credentials_in_an_address_are_refused_and_not_repeated(error: Callable[..., RecipeError]) -> None:
    found = error("store=s3://AKIA123:hunter2@bucket/x")
    assert found.what.startswith("credentials do not belong into an address: ")
    assert found.hint == "use the cluster file's `secrets`, or the environment"
    assert found.where == "command line: store=…"


@pytest.mark.parametrize(
    "address",
    [
        "corpus/*.jsonl",
        "/data/x",
        "./C:odd",
        "a:b",
        "s3://b/x",
        "gs://b",
        "az://account/container",
        "hf://datasets/a/b@c/d",
    ],
)
def test_addresses_that_a_store_can_read_pass(recipe: Callable[..., Recipe], address: str) -> None:
    assert recipe(f"data.train.0.path={address}").data.train[0].path == (address,)


def test_the_designs_own_recipe_loads() -> None:
    text = """
name: llama3-8b-tech
model:
  preset: llama3.1-8b
  from: hf://meta-llama/Llama-3.1-8B@0123abc
tokenizer: hf://meta-llama/Llama-3.1-8B
data:
  sequence_length: 8192
  seed: 1234
  train:
    - {path: "s3://corpus/articles/*.jsonl.zst", weight: 0.7}
    - {path: "s3://corpus/code/*.parquet", key: content, weight: 0.3}
  validation: {path: "s3://corpus/valid/*.jsonl", every: 500, batches: 20}
train:
  mode: pretrain
  steps: 1000
  global_batch: 1024
  precision: bf16
  optimizer: {name: adamw, lr: 3.0e-4, betas: [0.9, 0.95], weight_decay: 0.1, clip: 1.0}
  schedule: {name: cosine, warmup: 100, min_lr: 3.0e-5}
  lora: null
layout: {tp: 4, pp: 4, vp: 5, cp: 2, ep: 1, micro_batch: 1, recompute: none, shard: zero1}
engine: {name: megatron, image: "nvcr.io/x@sha256:00", args: {overlap-grad-reduce: true, split: [1, 2]}}
checkpoint: {every: 100, keep: 3, async: true, resume: auto}
observe: {tensorboard: true, dllogger: true, profile: null}
resources: {nodes: 2}
"""
    recipe = parse_recipe(text)
    assert recipe.data.train[1].key == "content"
    assert recipe.data.train[0].key == "text"
    assert recipe.data.weights() == pytest.approx((0.7, 0.3))
    assert recipe.engine.args == {"overlap-grad-reduce": True, "split": [1, 2]}


@pytest.mark.parametrize(
    ("written", "seconds", "short"),
    [("90", 90, "1m30s"), ("2.5", 2.5, "2.5s"), ("20m", 1200, "20m"), ("1h30m", 5400, "1h30m"), ("0.5d", 43200, "12h")],
)
def test_durations_are_read_and_written_as_people_do(
    recipe: Callable[..., Recipe], written: str, seconds: float, short: str
) -> None:
    budgets = recipe(f"budgets.step={written}").budgets
    assert budgets is not None
    assert budgets.written == {"step": seconds}
    assert format_short_duration(seconds) == short
    again = recipe(f"budgets.step={short}").budgets
    assert again == budgets


def test_budgets_do_not_make_another_run(recipe: Callable[..., Recipe]) -> None:
    assert run_id(recipe("budgets={step: 20m}")) == run_id(recipe())


def test_short_forms_mean_their_long_ones(recipe: Callable[..., Recipe], base: str) -> None:
    one = base.replace("    - path: corpus/*.jsonl", "    path: corpus/*.jsonl")
    assert parse_recipe(one) == parse_recipe(base)
    assert recipe("engine=megatron") == recipe("engine={name: megatron}")
    assert recipe("data=synthetic") == recipe("data={synthetic: true}")
    assert recipe("train.steps=null", "train.tokens=20B").train.tokens == 20_000_000_000
    assert recipe("train.steps=null", "train.tokens=2e9").train.tokens == 2_000_000_000
    assert recipe("train.steps=null", "train.tokens=1.5T").train.tokens == 1_500_000_000_000
    assert recipe("data.split={train: 0.9, validation: 0.1}").data.validation is not None


def test_weights_are_scaled_to_one_and_stay_as_written(recipe: Callable[..., Recipe]) -> None:
    data = recipe("data.train=[{path: a, weight: 3}, {path: b, weight: 1}]").data
    assert data.weights() == (0.75, 0.25)
    assert data.train[0].weight == 3
    assert recipe().data.weights() is None


def test_prepared_tokens_need_no_tokenizer(recipe: Callable[..., Recipe]) -> None:
    assert recipe("tokenizer=null", "data.train=[{tokens: [a, b]}]").tokenizer is None


def test_a_family_fills_in_what_it_fixes(recipe: Callable[..., Recipe]) -> None:
    config = recipe(NO_PRESET, GPT2, "data.sequence_length=128").model.config
    assert config is not None
    assert (config.norm, config.positions, config.tied_embeddings, config.qkv_bias) == ("layer", "learned", True, True)
    assert (config.kv_heads, config.head_dim) == (4, 16)
