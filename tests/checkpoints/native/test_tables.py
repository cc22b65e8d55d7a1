"""The tables of a checkpoint: binary arrays that a rank reads in part; and readers of all older formats."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from support.runs.checkpoint_parts import FOLDER, RUN, Ranks, by_rows, empty_like, loaded, same, some_state, whole
from trainshed.checkpoints.dcp import DcpMetadataBuilder
from trainshed.checkpoints.native import table_process
from trainshed.checkpoints.native.folder import complete_checkpoints, latest_complete, list_checkpoints
from trainshed.checkpoints.native.index import read_index
from trainshed.checkpoints.native.reader import load_checkpoint
from trainshed.checkpoints.native.shards import DTYPES, TensorShard
from trainshed.checkpoints.native.table_process import make_tables
from trainshed.checkpoints.native.tables import ItemSpan, PlannedBox, RankFileRecord, encode_boxes
from trainshed.errors import CorruptData, TrainshedError
from trainshed.models.collectives import AxisGroup
from trainshed.storage import FileEntry, LocalStore, checksum_of
from trainshed.storage.attempts import take_attempt

OF_BEFORE = Path(__file__).parent / "data" / "format-1"
"""A checkpoint of three ranks that Trainshed wrote when its index was JSON."""


FAR = 2**40
"""Where the items of the third rank begin: more than four bytes hold."""


def record(rank: int, boxes: Sequence[PlannedBox]) -> RankFileRecord:
    """What a rank tells about a file of items of 100 bytes."""
    spans = [
        ItemSpan(
            FAR * (rank == 2) + 100 * number, 0 if 0 in box.sizes else 100, checksum_of(f"{rank} {number}".encode())
        )
        for number, box in enumerate(boxes)
    ]
    return RankFileRecord.of(
        f"plan {rank}", encode_boxes(boxes), spans, FileEntry(f"__{rank}_1.distcp", 1000, checksum_of(b"file"))
    )


def records(ranks: int = 3) -> list[RankFileRecord]:
    """Ranks that hold tensors of none to five dims, one of them on the first rank alone, one with an empty part."""
    return [
        record(
            rank,
            [
                PlannedBox("model.rows", (2 * ranks, 5), "bfloat16", (2 * rank, 0), (1, 5)),
                PlannedBox("model.rows", (2 * ranks, 5), "bfloat16", (2 * rank + 1, 0), (1, 5)),
                PlannedBox("model.columns", (3, ranks), "float32", (0, rank), (3, 1)),
                PlannedBox("model.few", (1,), "float64", (min(rank, 1),), (int(rank == 0),)),
                PlannedBox("model.ä deep", (ranks, 1, 2, 2, 3), "int64", (rank, 0, 0, 0, 0), (1, 1, 2, 2, 3)),
                *([PlannedBox("optimizer.updates", (), "float32", (), ())] if rank == 0 else []),
            ],
        )
        for rank in range(ranks)
    ]


def test_pytorch_unpickles_what_its_own_classes_would_have_pickled() -> None:
    parts = records()
    builder = DcpMetadataBuilder()
    contents = make_tables(parts, 1, 1, {}, {})
    shown = {
        "model.rows": ((6, 5), torch.bfloat16),
        "model.columns": ((3, 3), torch.float32),
        "model.few": ((1,), torch.float64),
        "model.ä deep": ((3, 1, 2, 2, 3), torch.int64),
        "optimizer.updates": ((), torch.float32),
    }
    for name, (shape, dtype) in shown.items():
        builder.add_tensor(name, shape, dtype)
    for rank, far in enumerate((0, 0, FAR)):
        file = f"__{rank}_1.distcp"
        for half in range(2):
            builder.add_chunk("model.rows", (2 * rank + half, 0), (1, 5), file, far + 100 * half, 100)
        builder.add_chunk("model.columns", (0, rank), (3, 1), file, far + 200, 100)
        builder.add_chunk("model.ä deep", (rank, 0, 0, 0, 0), (1, 1, 2, 2, 3), file, far + 400, 100)
    builder.add_chunk("model.few", (0,), (1,), "__0_1.distcp", 300, 100)
    builder.add_chunk("optimizer.updates", (), (), "__0_1.distcp", 500, 100)
    assert pickle.loads(contents.metadata) == pickle.loads(builder.to_bytes())


def test_a_process_of_its_own_makes_the_same_tables_without_torch() -> None:
    facts = {"step": 7, "lr_decay": None, "note": "ä"}
    here = make_tables(records(), 7, 2, {"name": "demo"}, facts)
    assert make_tables(records(), 7, 2, {"name": "demo"}, facts, own_process_items=1) == here
    with pytest.raises(TrainshedError, match=r"model.rows: the ranks wrote 20 elements of a tensor of 30") as caught:
        make_tables(records()[:2], 7, 2, {}, {}, own_process_items=1)
    assert "report it" in str(caught.value.hint)
    assert "torch" not in subprocess_modules()


def subprocess_modules() -> set[str]:
    import subprocess

    code = "import sys, trainshed.checkpoints.native.table_process; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_a_process_that_dies_fails_the_save_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TrainshedError, match="the process that makes the checkpoint's tables ended with code 1"):
        make_tables(records(), 7, 2, {}, {}, own_process_items=1)


def test_large_saves_go_through_that_process_and_load_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_process, "OWN_PROCESS_ITEMS", 1)
    store, state = LocalStore(tmp_path), some_state()
    ranks = Ranks(take_attempt(store, RUN), 2)
    for step in (1, 2):  # the second sends records without boxes
        assert ranks.save(step, by_rows(state, 2)) == [None, None]
    for checkpoint in complete_checkpoints(store, FOLDER):
        assert same(loaded(store, checkpoint, state), state)
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / checkpoint.path), no_dist=True)
        assert same(into, state)


def test_a_checkpoint_of_format_1_is_read_verified_and_followed_by_new_ones(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(OF_BEFORE, tmp_path, dirs_exist_ok=True)
    store, state = LocalStore(tmp_path), some_state()
    checkpoint = latest_complete(store, "checkpoints")
    assert checkpoint is not None
    assert checkpoint.facts["format"] == 1
    checkpoint.manifest.verify_files(store, checkpoint.path)
    assert same(loaded(store, checkpoint, state), state)
    attempt = take_attempt(store, "")
    assert Ranks(attempt, 2, keep=1, resumed_step=100).save(200, by_rows(some_state(2), 2)) == [None, None]
    listing = list_checkpoints(store, "checkpoints")
    assert [found.step for found in listing.complete] == [200], "the older one is pruned"
    assert listing.complete[0].facts["format"] == 2
    assert same(loaded(store, listing.complete[0], state), some_state(2))


def test_a_newer_index_is_refused_by_its_format(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert Ranks(take_attempt(store, RUN), 1).save(1, [whole(some_state())]) == [None]
    (checkpoint,) = complete_checkpoints(store, FOLDER)
    file = tmp_path / checkpoint.path / "pieces-0001.bin"
    data = bytearray(file.read_bytes())
    data[8] = 4
    file.write_bytes(data)
    checkpoint.facts["pieces_header"]["checksum"] = checksum_of(data[: checkpoint.facts["pieces_header"]["bytes"]])
    with pytest.raises(CorruptData, match="has format 4, this Trainshed reads up to 3"):
        read_index(store, checkpoint)


def test_a_rank_reads_the_rows_of_its_own_tensors_and_finds_those_that_overlap(tmp_path: Path) -> None:
    read: list[tuple[int, int]] = []

    class Counting(LocalStore):
        def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
            data = super().read(path, start, end)
            read.append((start, start + len(data)))
            return data

    layers = {f"model.layers.{number}": torch.arange(4000.0).view(1000, 4) + number for number in range(8)}
    store = Counting(tmp_path)
    assert not any(Ranks(take_attempt(store, RUN), 100).save(1, by_rows(layers, 100)))
    (checkpoint,) = complete_checkpoints(store, FOLDER)
    header_bytes = checkpoint.facts["pieces_header"]["bytes"]
    read.clear()
    stored = read_index(store, checkpoint, ["model.layers.3", "model.missing"])
    assert list(stored) == ["model.layers.3"]
    block = 100 * (8 * (2 * 2 + 3) + 32)
    assert read == [(0, header_bytes), (header_bytes + 3 * block, header_bytes + 4 * block)]
    items = stored["model.layers.3"].overlapping((15, 1), (20, 2))
    assert [item.offset for item in items] == [(10, 0), (20, 0), (30, 0)]
    assert [item.file for item in items] == ["__1_1.distcp", "__2_1.distcp", "__3_1.distcp"]
    assert stored["model.layers.3"].overlapping((15, 1), (0, 2)) == []


def _load_as_replica(rank: int, folder: str, meeting: str) -> None:
    """Two by two ranks hold the same shard; only rank 0 has a store that can be read."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(meeting, 4), rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    axes = AxisGroup(2, rank % 2, pairs[rank // 2]), AxisGroup(2, rank // 2, across[rank % 2])
    store: Any = LocalStore(folder)
    (checkpoint,) = complete_checkpoints(store, FOLDER)
    state = some_state()
    shards = {
        name: TensorShard(shard.global_shape, shard.global_offset, shard.local, replicas=axes)
        for name, shard in empty_like(whole(state)).items()
    }
    name = "model.embedding.weight"  # not contiguous in memory
    shards[name] = TensorShard((7, 4), (0, 0), torch.zeros(4, 7).t(), replicas=axes)
    load_checkpoint(store if rank == 0 else None, checkpoint, shards)  # type: ignore[arg-type]
    assert same({name: shard.local for name, shard in shards.items()}, state)
    dist.destroy_process_group()


def test_of_four_ranks_with_the_same_shard_one_reads_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert Ranks(take_attempt(store, RUN), 1).save(1, [whole(some_state())]) == [None]
    mp.start_processes(_load_as_replica, (str(tmp_path), str(tmp_path / "meeting")), nprocs=4, start_method="fork")


def test_every_dtype_has_a_name_that_pytorch_knows() -> None:
    for name, dtype in DTYPES.items():
        assert getattr(torch, name) is dtype
