"""`data.stage`: tokens and indexes copied once per node, proven by hash, resumed, reused, removed, or refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.recipes.text_recipes import write_script, write_small_recipe
from trainshed.cli import run_cli
from trainshed.data import staging
from trainshed.data.order import DataOrder
from trainshed.data.sampling.sources import TokenDataset
from trainshed.errors import CorruptData, NoSpace, RecipeError
from trainshed.observe.event_log import read_events
from trainshed.recipe import Cluster, load_cluster, load_recipe
from trainshed.storage import LocalStore
from trainshed.workflow import PreparedRun, open_run_folder, prepare_run
from trainshed.workflow.runnable import check_runnable

USER = f"trainshed-{os.getuid()}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedRun:
    """A prepared run that asks for copies on the nodes' disks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(staging, "_SPARE_BYTES", 0)
    write_small_recipe(tmp_path)
    write_script(tmp_path)
    return prepare_run(load_recipe("recipe.yaml", ["data.stage=nvme", "data.shards=2"]), here(tmp_path))


def here(folder: Path) -> Cluster:
    return load_cluster(overrides=[f"local_disk={folder / 'ssd'}"])


def opened(run: PreparedRun, attempt: int = 1) -> PreparedRun:
    return open_run_folder(run.folder, here(Path.cwd()), attempt=attempt)


def shard_of(order: DataOrder) -> str:
    source = order.sources[0]
    assert isinstance(source, TokenDataset)
    return source.shards[0]


def copies(folder: Path) -> list[Path]:
    return sorted((folder / "ssd" / USER / "tokens").rglob("*.bin"))


def test_ranks_read_the_same_samples_from_copies_on_the_node(run: PreparedRun, tmp_path: Path) -> None:
    staged = opened(run)
    assert shard_of(staged.order).startswith(str(tmp_path / "ssd" / USER / "tokens"))
    source = staged.order.sources[0]
    assert isinstance(source, TokenDataset)
    assert source.index.folder.is_relative_to(tmp_path / "ssd" / USER / "indexes")
    assert [staged.order.batch_hash(step) for step in range(3)] == [run.order.batch_hash(step) for step in range(3)]
    assert staged.data == run.data, "what proves the run's tokens are the files that were prepared"


def test_the_first_process_of_a_node_copies_and_the_others_take_its_copy(
    run: PreparedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(run)

    def nobody_does(*_: Any) -> str:
        raise AssertionError("it is there already")

    monkeypatch.setattr(staging._Stager, "_copy", nobody_does)
    assert shard_of(opened(run, attempt=2).order) == shard_of(first.order), "the next attempt uses it again, by hash"
    monkeypatch.setattr(staging._Stager, "stage", nobody_does)
    assert shard_of(opened(run).order) == shard_of(first.order)


def test_an_interrupted_copy_goes_on_where_it_stopped_and_a_torn_one_begins_again(
    run: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(run)
    whole, read = copies(tmp_path)[0], []
    data = whole.read_bytes()
    shutil.rmtree(tmp_path / "ssd" / USER / "runs")
    original = staging.read_into

    def counting(store: Any, path: str, start: int, memory: memoryview) -> int:
        read.append((path.rpartition("/")[2], start))
        return original(store, path, start, memory)

    monkeypatch.setattr(staging, "read_into", counting)
    for begun, starts in ((data[: len(data) // 2], [len(data) // 2]), (b"torn" * 3, [12, 0])):
        (whole.parent / "staged.json").unlink()
        whole.unlink()
        (whole.parent / f"{whole.name}.partial").write_bytes(begun)
        read.clear()
        opened(run, attempt=len(starts) + 1)
        assert whole.read_bytes() == data
        assert [start for name, start in read if name == whole.name] == starts


def test_a_copy_that_is_not_what_the_manifest_says_stops_the_run(run: PreparedRun) -> None:
    originals = sorted(str(path) for path in Path("store").rglob("*.bin"))
    for original in map(Path, originals):
        data = bytearray(original.read_bytes())
        data[len(data) // 2] ^= 1
        original.write_bytes(data)
    with pytest.raises(CorruptData, match="is not what its manifest says") as caught:
        opened(run)
    assert caught.value.where in originals
    assert "trainshed data verify" in str(caught.value.hint)


def test_a_copy_that_changed_on_the_node_is_made_again(run: PreparedRun, tmp_path: Path) -> None:
    opened(run)
    copy = copies(tmp_path)[0]
    data = copy.read_bytes()
    copy.write_bytes(data[:-4] + b"\x01\x01\x01\x01")
    opened(run, attempt=2)
    assert copy.read_bytes() == data


def test_room_is_checked_before_and_made_of_what_nobody_uses(
    run: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(run)  # held by this process
    in_use = copies(tmp_path)[0].parent
    unused = tmp_path / "ssd" / USER / "tokens" / "0123456789abcdef"
    unused.mkdir()
    (unused / "old.bin").write_bytes(bytes(100))
    (in_use / "staged.json").unlink()

    def full(path: Path) -> Any:
        return shutil._ntuple_diskusage(1000, 1000, 0)

    monkeypatch.setattr(staging, "_SPARE_BYTES", 1 << 20)
    monkeypatch.setattr(staging.shutil, "disk_usage", full)
    with pytest.raises(NoSpace, match=r"need 0\.0 GiB on each node, and 0\.0 are free") as caught:
        opened(run, attempt=2)
    assert "`data.stage: direct`" in str(caught.value.hint)
    assert "`local_disk`" in str(caught.value.hint)
    assert not unused.exists()
    assert in_use.exists(), "a living process reads it"


def test_memory_is_freed_when_the_last_process_of_the_node_ends(run: PreparedRun, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainshed.data.staging import stage_run\n"
        "from trainshed.workflow import open_run_folder\n"
        "run = open_run_folder(Path(sys.argv[1]))\n"
        "index = [source.index.folder for source in run.order.sources]\n"
        "stage_run(run.data, lambda: index, Path(sys.argv[2]), 'x-0001', in_memory=True)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-P", "-c", code, str(run.folder), str(tmp_path / "memory")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    tokens = tmp_path / "memory" / USER / "tokens"
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        for process in (one, other):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        one.communicate()
        assert list(tokens.rglob("*.bin")), "the other still reads it"
        other.communicate()
        assert not list(tokens.rglob("*.bin"))
        assert (one.returncode, other.returncode) == (0, 0)


KUBERNETES = """\
name: pods
target: kubernetes
machine: p5
store: /data
image: registry/x@sha256:0123
volumes:
  - {mount: /data, pvc: shared}
"""


@pytest.mark.parametrize(
    ("more", "overrides", "what"),
    [
        ("", (), "pods names no disk of its nodes"),
        ("local_disk: /var/tmp\n", (), "`local_disk: /var/tmp` is in no volume of the nodes"),
        ("  - {mount: /a, host: /mnt/a}\n  - {mount: /b, host: /mnt/b}\n", (), "no single writable volume"),
        (
            "  - {mount: /ssd, host: /mnt/ssd}\n",
            ("data.synthetic=true", "data.train=[]", "tokenizer=null"),
            "there is nothing to copy",
        ),
        ("  - {mount: /ssd, host: /mnt/ssd}\n", (), None),
        ("  - {mount: /ssd, host: /mnt/ssd}\nlocal_disk: /ssd/tokens\n", (), None),
    ],
)
def test_a_cluster_says_where_its_nodes_have_a_disk_or_is_refused_by_name(
    tmp_path: Path, more: str, overrides: tuple[str, ...], what: str | None
) -> None:
    write_small_recipe(tmp_path)
    (tmp_path / "cluster.yaml").write_text(KUBERNETES + more)
    source = "data.train=[{path: /data/x.jsonl}]"
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), ["data.stage=nvme", source, *overrides])
    cluster = load_cluster(tmp_path / "cluster.yaml")
    if what is None:
        check_runnable(recipe, cluster)
        return
    with pytest.raises(RecipeError) as caught:
        check_runnable(recipe, cluster)
    assert what in str(caught.value)
    assert "data.stage" in str(caught.value.where)


def test_a_training_reads_its_tokens_from_the_disk_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_small_recipe(tmp_path)
    write_script(tmp_path)
    assert run_cli(["run", "recipe.yaml"]) == 0
    staged = ["run", "recipe.yaml", "--id", "staged", "data.stage=nvme", f"cluster.local_disk={tmp_path / 'ssd'}"]
    assert run_cli(staged) == 0, capsys.readouterr().err
    assert len(copies(tmp_path)) == 1
    runs = sorted((tmp_path / "store" / "runs" / "small").iterdir())
    losses = [[event["loss"] for event in read_events(LocalStore(run), "") if event["kind"] == "step"] for run in runs]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
