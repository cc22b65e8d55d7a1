"""Native checkpoints: what is written, that stock PyTorch reads it, and that any layout loads any other's."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from support.runs.checkpoint_parts import (
    FOLDER,
    RUN,
    SPEC,
    HookedStore,
    Ranks,
    by_rows,
    empty_like,
    loaded,
    same,
    save_whole,
    some_state,
    whole,
)
from trainshed.checkpoints.native import shards as plan_module
from trainshed.checkpoints.native.folder import complete_checkpoints, latest_complete, open_checkpoint
from trainshed.checkpoints.native.reader import load_checkpoint
from trainshed.checkpoints.native.shards import TensorShard
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.errors import InputError
from trainshed.storage import LocalStore, Manifest
from trainshed.storage.attempts import Attempt, take_attempt


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_stock_pytorch_reads_what_three_ranks_wrote(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "ITEM_BYTES", 40)  # so that pieces are cut into several items
    state = some_state()
    assert Ranks(take_attempt(store, RUN), 3).save(100, by_rows(state, 3)) == [None] * 3
    folder = tmp_path / FOLDER / "step-00000100"
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    assert same(torch.load(tmp_path / "whole.pt"), state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(into, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert same(into, state)


def test_a_checkpoint_is_described_by_its_manifest(store: LocalStore) -> None:
    state = some_state()
    save_whole(take_attempt(store, RUN), 100, state)
    found = latest_complete(store, FOLDER)
    assert found is not None
    assert (found.step, found.attempt, found.path) == (100, 1, f"{FOLDER}/step-00000100")
    manifest = Manifest.read(store, f"{found.path}/manifest.json")
    manifest.verify_files(store, found.path)
    assert manifest.kind == "checkpoint"
    assert manifest.spec == SPEC
    assert manifest.facts["consumed_samples"] == 800
    assert manifest.facts["tensors"]["model.norm.weight"] == {"shape": [4], "dtype": "bfloat16"}
    assert [entry.path for entry in manifest.files] == [".metadata", "__0_1.distcp", "pieces-0001.bin"]
    assert open_checkpoint(store, found.path) == found
    assert same(loaded(store, found, state), state)


def test_looking_at_checkpoints_needs_no_torch() -> None:
    code = (
        "import sys, trainshed.checkpoints.native.folder,"
        " trainshed.checkpoints.native.index, trainshed.cli.checkpoints; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@st.composite
def cuts(draw: st.DrawFn, shape: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A tensor cut into boxes by a few cuts on every dim, some of them empty."""
    sides = []
    for length in shape:
        at = sorted([0, *draw(st.lists(st.integers(0, length), max_size=2)), length])
        sides.append([(start, end - start) for start, end in itertools.pairwise(at)])
    boxes = list(itertools.product(*sides))
    return [(tuple(start for start, _ in box), tuple(size for _, size in box)) for box in boxes]


def cut_out(tensor: torch.Tensor, offset: tuple[int, ...], box: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(offset, box, strict=True))]


@settings(max_examples=30)
@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=3))
def test_any_cut_is_loaded_into_any_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: list[int]
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("cut"))
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    written = data.draw(cuts(shape))
    pieces = [{"x": TensorShard(tuple(shape), offset, cut_out(tensor, offset, box))} for offset, box in written]
    with mock.patch.object(plan_module, "ITEM_BYTES", data.draw(st.sampled_from([8, 24, 1 << 20]))):
        assert not any(Ranks(take_attempt(store, RUN), len(written)).save(1, pieces))
    (found,) = complete_checkpoints(store, FOLDER)
    for offset, box in data.draw(cuts(shape)):
        target = torch.full(box, -1.0)
        load_checkpoint(store, found, {"x": TensorShard(tuple(shape), offset, target)})
        assert torch.equal(target, cut_out(tensor, offset, box))


def test_pieces_may_be_views_with_gaps_and_parameters(store: LocalStore) -> None:
    wide = torch.arange(24.0).reshape(4, 6)
    parameter = torch.nn.Parameter(torch.ones(3))
    pieces = {"left": TensorShard((4, 6), (0, 0), wide[:, :6]), "row": TensorShard((4,), (0,), wide[:, 2])}
    with CheckpointWriter(take_attempt(store, RUN), spec=SPEC) as writer:
        writer.save(1, pieces | {"p": TensorShard((3,), (0,), parameter)}, {})
    (found,) = complete_checkpoints(store, FOLDER)
    into, into_parameter = torch.zeros(8, 12), torch.nn.Parameter(torch.zeros(3))
    wanted = {
        "left": TensorShard((4, 6), (0, 3), into[::2, 1:4]),
        "row": TensorShard((4,), (0,), into[4:, 11]),
        "p": TensorShard((3,), (0,), into_parameter),
    }
    load_checkpoint(store, found, wanted)
    assert torch.equal(into[::2, 1:4], wide[:, 3:])
    assert torch.equal(into[4:, 11], wide[:, 2])
    assert torch.equal(into_parameter, parameter)


def test_what_does_not_fit_is_refused_by_name(store: LocalStore) -> None:
    state = some_state()
    save_whole(take_attempt(store, RUN), 100, state)
    (found,) = complete_checkpoints(store, FOLDER)
    more = {f"extra.{number}": torch.full((1,), 7.0) for number in range(7)}
    with pytest.raises(InputError, match=r"does not hold extra\.0, .*extra\.4 and 2 more"):
        load_checkpoint(store, found, whole(state | more))
    pieces = empty_like(whole(state)) | whole(more)
    assert load_checkpoint(store, found, pieces, strict=False)["consumed_samples"] == 800
    assert same({name: pieces[name].local for name in state | more}, state | more)
    for wrong in (torch.zeros(4, dtype=torch.float32), torch.zeros(5, dtype=torch.bfloat16)):
        with pytest.raises(InputError, match=r"model\.norm\.weight is bfloat16 \[4\] in the checkpoint and .* here"):
            load_checkpoint(store, found, whole({"model.norm.weight": wrong}))
    with pytest.raises(ValueError, match="is not inside"):
        load_checkpoint(
            store, found, {"model.norm.weight": TensorShard((4,), (2,), torch.zeros(3, dtype=torch.bfloat16))}
        )


def test_steps_go_on_while_a_write_is_blocked_and_what_is_stored_is_what_was_then(store: LocalStore) -> None:
    go_on = threading.Event()

    def block(what: str, path: str) -> None:
        go_on.wait(60)

    take_attempt(store, RUN)
    attempt = Attempt(HookedStore(store, block), RUN, 1)
    events: list[dict[str, Any]] = []
    state, before = some_state(), some_state()
    with CheckpointWriter(attempt, spec=SPEC, on_event=lambda kind, **rest: events.append(rest)) as writer:
        writer.save(100, whole(state), {})
        for tensor in state.values():  # training goes on in place
            tensor.add_(1)
        assert writer.busy
        assert complete_checkpoints(store, FOLDER) == []
        threading.Timer(0.2, go_on.set).start()
        writer.save(101, whole(state), {})
        assert [found.step for found in complete_checkpoints(store, FOLDER)][-1] == 100
    newer, older = complete_checkpoints(store, FOLDER)
    assert same(loaded(store, older, state), before)
    assert same(loaded(store, newer, state), state)
    staged = [event for event in events if event["phase"] == "staged"]
    assert staged[1]["stall_seconds"] > staged[1]["seconds"], "the wait for the save before it is part of the stall"
    assert [event["step"] for event in events if event["phase"] == "committed"] == [100, 101]


class Overheard:
    """A meeting point that remembers what was said there."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.said: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        self.said.append((key.rpartition("/")[2], len(value)))
        self._store.set(key, value)


def test_the_plan_is_made_and_told_once(store: LocalStore) -> None:
    meeting, state = Overheard(), some_state()
    ranks = Ranks(take_attempt(store, RUN), 2, store=meeting)
    with mock.patch("trainshed.checkpoints.native.writer.make_save_plan", wraps=plan_module.make_save_plan) as planning:
        for step in (1, 2):
            assert ranks.save(step, by_rows(state, 2)) == [None, None]
        first, second = [size for name, size in meeting.said if name == "part-1"]
        assert second < first
        assert planning.call_count == 2
        assert ranks.save(3, by_rows(state | {"new": torch.ones(4)}, 2)) == [None, None]
        assert planning.call_count == 4
    newest = complete_checkpoints(store, FOLDER)[0]
    assert same(loaded(store, newest, state | {"new": torch.ones(4)}), state | {"new": torch.ones(4)})
    # Parts are fetched and an outcome goes with the next one: a long run does not fill its rank 0's memory.
    assert meeting.num_keys() <= 3


def test_a_step_that_is_stored_is_not_written_again(store: LocalStore) -> None:
    state, events = some_state(), []
    options = {"spec": SPEC, "on_event": lambda kind, **rest: events.append(kind)}
    with CheckpointWriter(take_attempt(store, RUN), **options) as writer:
        writer.save(5, whole(state), {})
        writer.save(5, whole(some_state(1)), {})
    before = {info.path: info for info in store.list(FOLDER)}
    with CheckpointWriter(take_attempt(store, RUN), resumed_step=5, **options) as writer:
        writer.save(5, whole(some_state(2)), {})
    assert {info.path: info for info in store.list(FOLDER)} == before
    assert events.count("note") == 2


def test_ranks_meet_in_a_real_tcp_store(store: LocalStore) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    attempt, state = take_attempt(store, RUN), some_state()
    writers = [
        CheckpointWriter(attempt, rank=rank, world_size=2, store=meeting, spec=SPEC)
        for rank, meeting in enumerate((server, client))
    ]
    for step in (1, 2):
        for writer, pieces in zip(writers, by_rows(state, 2), strict=True):
            writer.save(step, pieces, {})
    for writer in reversed(writers):
        writer.close()
    assert [found.step for found in complete_checkpoints(store, FOLDER)] == [2, 1]
    assert same(loaded(store, complete_checkpoints(store, FOLDER)[0], state), state)
