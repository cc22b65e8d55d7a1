"""Checkpoints of a foreign engine go to a bucket when they are committed, and come back before a run goes on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.models.tiny_models import save_tiny_hf
from trainshed.checkpoints import mirror
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.foreign import list_foreign
from trainshed.checkpoints.formats import TargetFormat, detect_format
from trainshed.checkpoints.mirror import fetch_checkpoints, mirrored_checkpoints, upload_checkpoints
from trainshed.errors import CorruptData, StorageError
from trainshed.storage import open_folder

BRIDGE_LATEST = "checkpoints/latest_train_state.pt"
LATEST = "checkpoints-megatron/latest_checkpointed_iteration.txt"


def write_iteration(run: Path, iteration: int, *, complete: bool = True, latest: bool = True) -> Path:
    """A checkpoint in the form of Megatron's `torch_dist`."""
    folder = run / f"checkpoints-megatron/iter_{iteration:07d}"
    folder.mkdir(parents=True)
    for rank in range(2):
        (folder / f"__{rank}_0.distcp").write_bytes(bytes([iteration % 256]) * (1000 + rank))
    (folder / "common.pt").write_bytes(b"common")
    if complete:
        (folder / ".metadata").write_bytes(b"table")
    if latest:
        (run / LATEST).write_text(str(iteration))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "bucket" / "llama" / "1a2b")
    return f"s3://{request.getfixturevalue('s3_bucket')}/experiments/llama/1a2b"


def test_only_what_is_committed_goes_to_the_bucket_once_and_comes_back_as_it_was(address: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = write_iteration(run, 10), write_iteration(run, 20)
    write_iteration(run, 30, complete=False, latest=False)
    write_iteration(run, 40, latest=False)  # its save has not ended: the marker is written last
    assert upload_checkpoints(run, address) == [10, 20]
    assert upload_checkpoints(run, address) == []
    before = files_of(second)
    assert sorted(each.step for each in mirrored_checkpoints(open_folder(address))) == [10, 20]
    assert fetch_checkpoints(run, address) is None, "the run has its own"
    shutil.rmtree(run)
    assert fetch_checkpoints(run, address) == 20
    assert files_of(second) == before
    assert (run / LATEST).read_text() == "20"
    assert sorted(path.name for path in (run / "checkpoints-megatron").iterdir()) == [second.name, Path(LATEST).name]
    assert not first.exists()


def write_bridge_iteration(run: Path, iteration: int, *, configured: bool = True) -> Path:
    """A checkpoint as Megatron-Bridge 0.5.0 saves it: its configuration comes after what names the latest."""
    folder = run / f"checkpoints/iter_{iteration:07d}"
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", "common.pt", ".metadata", "metadata.json"):
        (folder / name).write_bytes(f"{name} of {iteration}".encode() * 50)
    (folder / "train_state.pt").write_bytes(f"state {iteration}".encode())
    shutil.copy(folder / "train_state.pt", run / BRIDGE_LATEST)
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_text(str(iteration))
    if configured:
        (folder / "run_config.yaml").write_text("model: {}\n")
    return folder


def test_checkpoints_of_megatron_bridge_come_back_with_both_files_that_name_the_latest(
    address: str, tmp_path: Path
) -> None:
    run, bucket = tmp_path / "run", open_folder(address)
    write_bridge_iteration(run, 10)
    last = write_bridge_iteration(run, 20)
    write_bridge_iteration(run, 30, configured=False)  # killed before its last file
    assert upload_checkpoints(run, address) == [10, 20]
    assert bucket.read(BRIDGE_LATEST) == b"state 20"
    before = files_of(last)
    shutil.rmtree(run)
    assert fetch_checkpoints(run, address) == 20
    assert files_of(last) == before
    assert (run / BRIDGE_LATEST).read_bytes() == b"state 20"
    assert (run / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "20"
    listing = list_foreign(run)
    assert listing is not None
    assert (listing.engine, listing.latest) == ("megatron-bridge", 20)
    # The run goes on: the next one is sent, and of those that the recipe keeps one is left.
    write_bridge_iteration(run, 30)
    assert upload_checkpoints(run, address, keep=1) == [30]
    assert [each.step for each in mirrored_checkpoints(bucket)] == [30]
    assert bucket.read(BRIDGE_LATEST) == b"state 30"


def write_torchtune_weights(run: Path, number: int) -> Path:
    folder = run / f"checkpoints/epoch_{number}"
    folder.mkdir(parents=True, exist_ok=True)
    file = "model-00001-of-00001.safetensors"
    save_file({"weight": torch.full((64,), float(number))}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": file}}))
    return folder


def write_torchtune_state(run: Path, passes: int) -> Path:
    """torchtune 0.6 writes it anew after the weights of every pass but the last."""
    file = run / "checkpoints/recipe_state/recipe_state.pt"
    file.parent.mkdir(exist_ok=True)
    torch.save({"epochs_run": passes, "optimizer": {"weight": torch.full((64,), float(passes))}}, file)
    return file


def end_torchtune(run: Path, last: str) -> None:
    (run / "checkpoints/finished.json").write_text(json.dumps({"length": "epochs=3", "checkpoint": last}))


def test_weights_of_torchtune_go_to_the_bucket_with_the_state_after_them(address: str, tmp_path: Path) -> None:
    run, bucket = tmp_path / "run", open_folder(address)
    write_torchtune_weights(run, 0)
    assert upload_checkpoints(run, address) == [], "a state is written after them"
    state = write_torchtune_state(run, 1)
    assert upload_checkpoints(run, address) == [0]
    write_torchtune_weights(run, 1)
    content = state.read_bytes()
    state.write_bytes(content[: len(content) // 2])  # the next state is being written
    assert upload_checkpoints(run, address) == []
    shutil.rmtree(run)
    assert fetch_checkpoints(run, address) == 0
    assert state.read_bytes() == content
    before = files_of(write_torchtune_weights(run, 1))
    content = write_torchtune_state(run, 2).read_bytes()
    assert upload_checkpoints(run, address) == [1]
    assert fetch_checkpoints(run, address) is None, "the run has its own"
    write_torchtune_weights(run, 2)
    assert upload_checkpoints(run, address) == [], "the last weights have no state"
    shutil.rmtree(run)
    assert fetch_checkpoints(run, address) == 1
    assert (files_of(run / "checkpoints/epoch_1"), state.read_bytes()) == (before, content)
    write_torchtune_weights(run, 2)
    end_torchtune(run, "epoch_2")
    assert upload_checkpoints(run, address, keep=2) == [2]
    assert [info.path for info in bucket.list("checkpoints") if "epoch_0" in info.path] == []
    shutil.rmtree(run)
    assert fetch_checkpoints(run, address) == 2
    assert json.loads((run / "checkpoints/finished.json").read_text())["checkpoint"] == "epoch_2"


def test_weights_of_torchtune_whose_state_is_gone_are_copied_and_nothing_goes_on_from_them(
    address: str, tmp_path: Path
) -> None:
    """A job on Slurm copies after training: of the state there is only the last."""
    run = tmp_path / "run"
    for number in range(3):
        write_torchtune_weights(run, number)
    write_torchtune_state(run, 2)
    assert upload_checkpoints(run, address) == [0, 1], "the last pass is not over"
    copies = {each.step: each.resumable for each in mirrored_checkpoints(open_folder(address))}
    assert copies == {0: False, 1: True}
    other = tmp_path / "other"
    assert fetch_checkpoints(other, address) == 1
    assert (other / "checkpoints/recipe_state/recipe_state.pt").is_file()


def test_a_state_of_torchtune_that_is_written_while_it_is_copied_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, address = tmp_path / "run", str(tmp_path / "bucket")
    write_torchtune_weights(run, 0)
    write_torchtune_state(run, 1)
    copy = mirror.copy_tree

    def next_save(source: str, *arguments: Any, **keywords: Any) -> Any:
        done = copy(source, *arguments, **keywords)
        if source.endswith("recipe_state") and not (run / "checkpoints/epoch_1").exists():
            write_torchtune_weights(run, 1)
            write_torchtune_state(run, 2)
        return done

    monkeypatch.setattr(mirror, "copy_tree", next_save)
    assert upload_checkpoints(run, address, keep=1) == []
    assert fetch_checkpoints(tmp_path / "other", address) is None
    assert upload_checkpoints(run, address, keep=1) == [1]
    assert fetch_checkpoints(tmp_path / "other", address) == 1


def test_a_checkpoint_that_grows_while_it_is_copied_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tokenizer files do that Megatron-Bridge writes after its configuration."""
    run, address = tmp_path / "run", str(tmp_path / "bucket")
    folder = write_bridge_iteration(run, 10)
    copy, copies = mirror.copy_tree, []

    def grows(*arguments: Any, **keywords: Any) -> Any:
        copies.append(arguments)
        done = copy(*arguments, **keywords)
        (folder / "tokenizer.json").write_text("{}")
        return done

    monkeypatch.setattr(mirror, "copy_tree", grows)
    bucket = open_folder(address)
    mirror.follow_checkpoints(
        run, address, lambda: len(copies) > 5 or bool(list(mirrored_checkpoints(bucket))), every_seconds=0.01
    )
    assert len(copies) == 2
    assert bucket.read("checkpoints/iter_0000010/tokenizer.json") == b"{}"


def test_the_bucket_keeps_as_many_as_the_recipe_says(address: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for iteration in (10, 20, 30):
        write_iteration(run, iteration)
        upload_checkpoints(run, address, keep=2)
    bucket = open_folder(address)
    assert sorted(each.step for each in mirrored_checkpoints(bucket)) == [20, 30]
    assert not [info.path for info in bucket.list("checkpoints-megatron/iter_0000010")]


def test_a_copy_that_was_interrupted_is_no_checkpoint_and_goes_on(address: str, tmp_path: Path) -> None:
    run, bucket = tmp_path / "run", open_folder(address)
    folder = write_iteration(run, 10)
    # Killed after the first file.
    bucket.put("checkpoints-megatron/iter_0000010/__0_0.distcp", (folder / "__0_0.distcp").read_bytes())
    assert list(mirrored_checkpoints(bucket)) == []
    assert fetch_checkpoints(tmp_path / "other", address) is None
    assert upload_checkpoints(run, address) == [10]
    # Somebody has shortened a file there since: it is not taken for what was committed.
    bucket.put("checkpoints-megatron/iter_0000010/__1_0.distcp", b"short")
    with pytest.raises(CorruptData, match="iter_0000010: it has"):
        fetch_checkpoints(tmp_path / "other", address)
    assert not (tmp_path / "other" / LATEST).exists()


UPLOAD = """
import sys
from pathlib import Path
from trainshed.checkpoints.mirror import upload_checkpoints
upload_checkpoints(Path(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.s3
def test_an_upload_that_is_killed_goes_on_where_it_was(s3_bucket: str, tmp_path: Path) -> None:
    run, address = tmp_path / "run", f"s3://{s3_bucket}/killed/llama/1a2b"
    folder = write_bridge_iteration(run, 10)
    for rank in range(300):
        (folder / f"__{rank}_1.distcp").write_bytes(bytes([rank % 256]) * 20_000)
    bucket = open_folder(address)
    process = subprocess.Popen([sys.executable, "-c", UPLOAD, str(run), address])
    while process.poll() is None and sum(1 for _ in bucket.list("checkpoints")) < 20:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was still copying"
    sent = {info.path for info in bucket.list("checkpoints") if info.path.endswith(".distcp")}
    assert len(sent) < 301
    assert list(mirrored_checkpoints(bucket)) == []
    assert bucket.head(BRIDGE_LATEST) is None
    assert fetch_checkpoints(tmp_path / "other", address) is None
    assert upload_checkpoints(run, address) == [10]
    before = files_of(folder)
    shutil.rmtree(run)
    assert fetch_checkpoints(run, address) == 10
    assert files_of(folder) == before


def test_a_byte_that_has_changed_in_the_bucket_is_found_before_the_engine_sees_it(address: str, tmp_path: Path) -> None:
    run, bucket = tmp_path / "run", open_folder(address)
    write_iteration(run, 10)
    upload_checkpoints(run, address)
    path = "checkpoints-megatron/iter_0000010/__1_0.distcp"
    good = bucket.read(path)
    bucket.put(path, bytes([good[0] ^ 1]) + good[1:])
    other = tmp_path / "other"
    with pytest.raises(CorruptData, match=r"__1_0\.distcp does not have the checksum of its manifest"):
        fetch_checkpoints(other, address)
    assert not (other / LATEST).exists()
    bucket.put(path, good)
    assert fetch_checkpoints(other, address) == 10


def test_a_checkpoint_that_is_removed_while_it_is_copied_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, address = tmp_path / "run", str(tmp_path / "bucket")
    old = write_iteration(run, 10)
    write_iteration(run, 20)
    copy = mirror.copy_tree

    def removed_on_the_way(source: str, *arguments: Any, **keywords: Any) -> Any:
        if source == str(old):  # as keep_checkpoints.py does: what makes it loadable goes first
            (old / ".metadata").unlink()
            (old / "common.pt").unlink()
        return copy(source, *arguments, **keywords)

    monkeypatch.setattr(mirror, "copy_tree", removed_on_the_way)
    assert upload_checkpoints(run, address) == [20]
    assert [each.step for each in mirrored_checkpoints(open_folder(address))] == [20]


def test_checkpoints_follow_a_training_and_a_bucket_that_is_away_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, address = tmp_path / "run", str(tmp_path / "bucket")
    upload = mirror.upload_checkpoints
    looks: list[int] = []

    def now_and_then(*arguments: Any, **keywords: Any) -> list[int]:
        looks.append(len(looks))
        if len(looks) == 1:
            raise StorageError("no answer")
        return upload(*arguments, **keywords)

    monkeypatch.setattr(mirror, "upload_checkpoints", now_and_then)

    def training() -> bool:
        """What happens between two looks; says when it is over."""
        there = [each.step for each in mirrored_checkpoints(open_folder(address))]
        if not run.exists():
            write_iteration(run, 10)
        elif there == [10] and not (run / "checkpoints-megatron/iter_0000020").exists():
            write_iteration(run, 20)
        return 20 in there

    mirror.follow_checkpoints(run, address, training, every_seconds=0.01)
    assert [each.step for each in mirrored_checkpoints(open_folder(address))] == [10, 20]
    assert len(looks) == 3, "a bucket is asked only when there is something new"


def test_weights_that_went_through_the_bucket_are_read_by_their_format(tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path / "hf", seed=1)
    run, address = tmp_path / "run", str(tmp_path / "bucket")
    made = run / "checkpoints-megatron"
    convert_weights(str(tmp_path / "hf"), str(made), TargetFormat("megatron", "torch_dist"), logits=False)
    (made / "release").rename(made / "iter_0000007")  # as if Megatron had trained seven steps
    (run / LATEST).write_text("7")
    before = files_of(made / "iter_0000007")
    assert upload_checkpoints(run, address) == [7]
    shutil.rmtree(run)
    assert fetch_checkpoints(run, address) == 7
    assert files_of(made / "iter_0000007") == before
    assert detect_format(str(made)) == "megatron-torch_dist"


def test_the_newest_goes_first_and_what_is_not_kept_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sources = tmp_path / "run", []
    for iteration in (10, 20, 30):
        write_iteration(run, iteration)
    copy = mirror.copy_tree

    def noted(source: str, *arguments: Any, **keywords: Any) -> Any:
        sources.append(Path(source).name)
        return copy(source, *arguments, **keywords)

    monkeypatch.setattr(mirror, "copy_tree", noted)
    assert upload_checkpoints(run, str(tmp_path / "bucket"), keep=2) == [20, 30]
    assert sources == ["iter_0000030", "iter_0000020"]
