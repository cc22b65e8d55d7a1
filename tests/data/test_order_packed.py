"""A recipe's conversations in order: steps, tokens and epochs, blends, validation, skips, and going on after a stop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from support.runs.conversations import numbered_documents, write_conversations
from support.runs.preparing import Notes
from trainshed.data.order import RunOrders, run_orders, run_steps
from trainshed.data.sampling.packing import PackedDataset
from trainshed.data.tokens.token_source import RunTokens, TokenSource, fingerprint_shard
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.recipe import Recipe, parse_recipe

LENGTH = 32
BATCH = 4
FIRST_LENGTHS = [int(n) for n in 2 + np.arange(150) * 37 % 29]
SECOND_LENGTHS = [int(n) for n in 2 + np.arange(60) * 11 % 19]


def recipe_of(mode="finetune", *, data=None, train=None) -> Recipe:
    body = {
        "trainshed": 1,
        "name": "chat",
        "model": {"from": "base"},
        "tokenizer": "base",
        "data": {"sequence_length": LENGTH, "train": [{"tokens": "a"}], **(data or {})},
        "train": {"mode": mode, "global_batch": BATCH, "precision": "fp32", "optimizer": {"lr": 1e-3}}
        | (train or {"epochs": 1}),
    }
    return parse_recipe(yaml.safe_dump(body))


def source_of(folder: Path, lengths, label="source-0", *, weight=None, first=1) -> TokenSource:
    prefix = write_conversations(folder / label, numbered_documents(lengths, first), dtype="<i4")
    files = fingerprint_shard(prefix)
    return TokenSource.open(label, [prefix], weight=weight, files=files)


@pytest.fixture
def tokens(tmp_path: Path) -> RunTokens:
    return RunTokens((source_of(tmp_path, FIRST_LENGTHS),))


def orders_of(recipe: Recipe, tokens: RunTokens, folder: Path, *, build=True, reporter=None) -> RunOrders:
    more = {"reporter": reporter} if reporter else {}
    return run_orders(recipe, tokens, folder / "index", build=build, **more)


def tokens_seen(orders: RunOrders, steps: int) -> list[int]:
    batches = [orders.train.batch(step).tokens for step in range(steps)]
    return sorted(token for batch in batches for token in batch.reshape(-1).tolist() if token)


def test_an_epoch_is_every_row_once(tokens, tmp_path):
    orders = orders_of(recipe_of(), tokens, tmp_path)
    (dataset,) = orders.train.sources
    rows = dataset.epoch_samples
    assert orders.steps == -(-rows // BATCH)
    assert orders.train.keeps_documents_apart
    whole = run_orders(recipe_of(train={"epochs": BATCH}), tokens, tmp_path / "index", build=True)
    # Four epochs are a whole number of batches: every token comes four times.
    assert whole.steps == rows
    assert tokens_seen(whole, rows) == sorted(list(range(1, sum(FIRST_LENGTHS) + 1)) * BATCH)


@pytest.mark.parametrize(
    ("train", "samples"), [({"steps": 9}, 36), ({"tokens": 700}, 22), ({"epochs": 0.5}, None), ({"epochs": 3}, None)]
)
def test_the_length_of_a_run_is_said_in_steps_tokens_or_epochs(tokens, tmp_path, train, samples):
    recipe = recipe_of(train=train)
    orders = orders_of(recipe, tokens, tmp_path)
    rows = orders.train.sources[0].epoch_samples
    samples = samples or -(-int(train["epochs"] * rows * LENGTH) // LENGTH)
    assert orders.steps == -(-samples // BATCH) == run_steps(recipe, tokens, tmp_path / "index")
    (budget,) = orders.train.budget(orders.steps)
    assert (budget.samples, budget.tokens) == (orders.steps * BATCH, orders.steps * BATCH * LENGTH)
    assert budget.epochs == pytest.approx(orders.steps * BATCH / rows)


def test_a_longer_run_and_another_process_go_on_in_the_same_order(tokens, tmp_path):
    short = orders_of(recipe_of(train={"steps": 5}), tokens, tmp_path)
    before = [short.train.batch_hash(step) for step in range(5)]
    index = {path: path.stat().st_mtime_ns for path in (tmp_path / "index").rglob("*.npy")}
    reopened = RunTokens.from_plain(tokens.to_plain())
    long = orders_of(recipe_of(train={"epochs": 40}), reopened, tmp_path, build=False)
    assert [long.train.batch_hash(step) for step in range(5)] == before
    assert len({long.train.batch_hash(step) for step in range(long.steps)}) == long.steps
    assert index == {path: path.stat().st_mtime_ns for path in (tmp_path / "index").rglob("*.npy")}
    halves = [long.train.rows(7, start, start + 2) for start in (0, 2)]
    whole = long.train.batch(7)
    for part, array in zip(zip(*(half.arrays() for half in halves), strict=True), whole.arrays(), strict=True):
        assert np.array_equal(np.concatenate(part), array)
    assert np.array_equal(long.train.document_starts(7, 1, 4), whole.document_starts[1:4])


def test_sources_are_blended_by_their_weights(tmp_path):
    weighted = RunTokens(
        (
            source_of(tmp_path, FIRST_LENGTHS, "source-0", weight=3),
            source_of(tmp_path, SECOND_LENGTHS, "source-1", weight=1, first=100_000),
        )
    )
    orders = orders_of(recipe_of(train={"steps": 50}), weighted, tmp_path)
    assert [budget.samples for budget in orders.train.budget(50)] == [150, 50]
    batch = orders.train.batch(11)
    assert ((batch.tokens >= 100_000).any(1)).sum() == 1
    assert np.array_equal(orders.train.document_starts(11, 0, BATCH), batch.document_starts)
    assert (batch.learned <= (batch.tokens > 0)).all()


def test_without_weights_one_epoch_is_one_of_every_source(tmp_path):
    lengths = (FIRST_LENGTHS, SECOND_LENGTHS)
    sources = [source_of(tmp_path, part, f"source-{number}") for number, part in enumerate(lengths)]
    orders = orders_of(recipe_of(), RunTokens(tuple(sources)), tmp_path)
    rows = sum(source.epoch_samples for source in orders.train.sources)
    assert orders.steps == -(-rows // BATCH)
    for source, budget in zip(orders.train.sources, orders.train.budget(orders.steps), strict=True):
        assert budget.samples == pytest.approx(source.epoch_samples, abs=BATCH)


def test_skipped_samples_are_left_out(tokens, tmp_path):
    plain = orders_of(recipe_of(train={"steps": 10}), tokens, tmp_path).train
    skipping = orders_of(recipe_of(data={"skip": [[5, 9]]}, train={"steps": 10}), tokens, tmp_path).train
    stream = np.concatenate([plain.batch(step).learned for step in range(10)])
    ours = np.concatenate([skipping.batch(step).learned for step in range(9)])
    assert np.array_equal(ours, np.delete(stream, range(5, 9), axis=0))


def test_validation_has_a_share_or_a_source_of_its_own(tokens, tmp_path):
    split = {"split": {"train": 0.8, "validation": 0.2}}
    orders = orders_of(recipe_of(data=split), tokens, tmp_path)
    parts = []
    for order in (orders.train, *orders.validations.values()):
        (dataset,) = order.sources
        rows = dataset.read(np.arange(dataset.epoch_samples)).tokens
        parts.append(set(rows.reshape(-1).tolist()) - {0})
    assert parts == [
        set(range(1, sum(FIRST_LENGTHS[:120]) + 1)),
        set(range(sum(FIRST_LENGTHS[:120]) + 1, sum(FIRST_LENGTHS) + 1)),
    ]
    assert orders.steps == -(-orders.train.sources[0].epoch_samples // BATCH)
    own = RunTokens(tokens.sources, source_of(tmp_path, SECOND_LENGTHS, "validation"))
    other = orders_of(recipe_of(data={"validation": {"tokens": "v", "batches": 2}}), own, tmp_path)
    (validation,) = other.validations.values()
    assert validation.sources[0].index.documents == len(SECOND_LENGTHS)
    assert validation.batch(1).learned is not None
    assert orders_of(recipe_of(data=split), tokens, tmp_path, build=False).validations


def test_preference_pairs_are_packed_as_pairs(tokens, tmp_path):
    with pytest.raises(InputError, match=r"pair \d+ has \d+ tokens, more than a sample of 32"):
        orders_of(recipe_of("dpo"), tokens, tmp_path)
    pairs = RunTokens((source_of(tmp_path, SECOND_LENGTHS[:10] * 2, "source-0"),))
    notes = Notes()
    orders = orders_of(recipe_of("dpo", data={"sequence_length": 48}), pairs, tmp_path, reporter=notes)
    (dataset,) = orders.train.sources
    assert isinstance(dataset, PackedDataset)
    assert dataset.pairs
    assert dataset.sequence_length == 48
    assert notes.notes[0].startswith("source-0: 10 pairs in ")


def test_text_in_fine_tuning_is_cut_into_windows(tokens, tmp_path):
    orders = orders_of(recipe_of(data={"format": "text"}), tokens, tmp_path)
    assert not isinstance(orders.train.sources[0], PackedDataset)
    assert not orders.train.keeps_documents_apart


def test_what_packing_did_is_said(tmp_path):
    lengths = [31, 1, 16, 16, 16]
    notes = Notes()
    orders_of(recipe_of(train={"steps": 1, "global_batch": 2}), one_source(tmp_path, lengths), tmp_path, reporter=notes)
    assert notes.notes == ["source-0: 5 documents in 3 samples of 32 tokens, 83.3% full"]
    notes = Notes()
    recipe = recipe_of(data={"packing": False}, train={"steps": 1, "global_batch": 2})
    orders_of(recipe, one_source(tmp_path, lengths), tmp_path, reporter=notes)
    assert "in 5 samples of 32 tokens, 50.0% full" in notes.notes[0]


def one_source(folder: Path, lengths) -> RunTokens:
    return RunTokens((source_of(folder, lengths),))


def test_missing_indexes_and_too_few_conversations_are_errors(tokens, tmp_path):
    for function in (
        lambda: orders_of(recipe_of(), tokens, tmp_path, build=False),
        lambda: run_steps(recipe_of(), tokens, tmp_path / "index"),
    ):
        with pytest.raises(NotFound, match="source 'source-0' has no index"):
            function()
    with pytest.raises(InputError, match="the sources hold 3 samples of 33 tokens, fewer than one batch of 4"):
        orders_of(recipe_of(), one_source(tmp_path, [30, 30, 30]), tmp_path)
    with pytest.raises(InputError, match="source 'source-0' holds no conversations"):
        orders_of(recipe_of(), one_source(tmp_path, []), tmp_path)


def test_the_mask_of_learned_tokens_is_one_of_the_files_of_a_run(tokens, tmp_path):
    assert [Path(file.path).suffix for file in tokens.sources[0].files] == [".bin", ".idx", ".learned"]
    mask = tmp_path / "source-0.learned"
    mask.write_bytes(mask.read_bytes()[::-1])
    with pytest.raises(CorruptData, match=r"source-0\.learned: this token file is not the one that was proven"):
        tokens.check_files()


def test_how_full_rows_are_is_told_over_all_shards(tmp_path):
    prefixes = [write_conversations(tmp_path / f"part-{number}", numbered_documents([8] * 8)) for number in range(2)]
    notes = Notes()
    tokens = RunTokens((TokenSource.open("source-0", prefixes),))
    orders_of(recipe_of(), tokens, tmp_path, reporter=notes)
    assert notes.notes == ["source-0: 16 documents in 4 samples of 32 tokens, 100.0% full"]
