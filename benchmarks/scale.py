"""What a rank of a very large job pays before and between its steps, measured on one CPU without any GPU.

    python benchmarks/scale.py [--ranks 512 4096 16384] [--model llama3.1-405b] [--before]

Rank 0 and a middle rank are built with PyTorch's fake process group and the model on the meta device: seconds until
the first step could begin, process groups, and what the rank reads of a checkpoint. The checkpoint's tables are made of
the records of all ranks, in the process that the writer starts for them. `--before` adds the tables as they were until
format 2 (an object for every item, JSON, pickled objects). All seconds are those of the processor. Host syncs are
counted in a step of a narrow model on as many ranks: reads of a value on the host while the step is launched, and those
after it.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from measure import table
from trainshed.catalog import model_preset
from trainshed.checkpoints.dcp import DcpMetadataBuilder
from trainshed.checkpoints.native.folder import CompleteCheckpoint, open_checkpoint
from trainshed.checkpoints.native.index import read_index
from trainshed.checkpoints.native.shards import DTYPES, make_save_plan
from trainshed.checkpoints.native.table_process import make_tables
from trainshed.checkpoints.native.tables import (
    CheckpointContents,
    PlannedBox,
    RankFileRecord,
    assemble_index,
    encode_boxes,
)
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.optimizer_registry import build_rank_optimizer
from trainshed.engines.torch.parallel import build_mesh
from trainshed.engines.torch.state import state_tensors
from trainshed.engines.torch.step import StepRunner
from trainshed.models.collectives import AxisGroup
from trainshed.models.decoder import Regularization
from trainshed.models.parameters import Parameter, parameters
from trainshed.plan.layout import RankLayout, resolve_layout
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Optimizer
from trainshed.storage import FileEntry, LocalStore, checksum_of

TP, PP = 8, 16
ADAMW = Optimizer(lr=1e-3)
AVERAGES = ("exp_avg", "exp_avg_sq")
ITEM_BYTES = 500_000_000  # shards are not cut: the real plan has the same items


def layout_of(config: ModelConfig, ranks: int, pp: int = PP) -> RankLayout:
    return resolve_layout(Layout(tp=TP, pp=pp, shard="zero1"), config, world_size=ranks)


def middle_rank(ranks: int) -> int:
    return ranks // 2 + ranks // 4 + 3


def start_up(config: ModelConfig, ranks: int, rank: int) -> dict[str, Any]:
    """Build one rank; seconds and process groups, and the items that it would write."""
    layout = layout_of(config, ranks)
    began = time.process_time()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = build_mesh(layout, torch.device("cpu"), config)
    groups_seconds = time.process_time() - began
    model = build_model(
        config,
        replace(mesh, device=torch.device("meta")),
        sequence_length=8192,
        precision="bf16",
        regularization=Regularization(),
    )
    model_seconds = time.process_time() - began - groups_seconds
    optimizer = build_rank_optimizer(model, ADAMW)
    plan = make_save_plan(state_tensors(model, optimizer), ITEM_BYTES)
    seconds = time.process_time() - began
    return {
        "groups": mesh.group_count,
        "groups_seconds": groups_seconds,
        "model_seconds": model_seconds,
        "seconds": seconds,
        "items": len(plan.items),
        "boxes": checksum_of(plan.boxes),
    }


class CountHostReads(TorchDispatchMode):
    """Counts operators that a GPU's host would wait for: a value read, or a shape that depends on values."""

    WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique")

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rpartition(".")[0]
        if name.startswith(self.WAITS):
            self.reads[name] += 1
        return func(*args, **kwargs or {})


def host_syncs(config: ModelConfig, ranks: int, rank: int) -> dict[str, int]:
    """Count the host's reads in one step of a narrow model.

    It has no pipeline: stages ask each other for shapes before their first step, and a fake group answers nothing.
    """
    narrow = config.model_copy(
        update={"hidden": 64, "heads": 8, "kv_heads": 8, "head_dim": 8, "ffn": 64, "vocab_size": 256, "layers": 2}
    )
    layout = layout_of(narrow, ranks, pp=1)
    mesh = build_mesh(layout, torch.device("cpu"), narrow)
    model = build_model(narrow, mesh, sequence_length=16, precision="fp32", regularization=Regularization())
    for shard in model.shards:
        shard.local_tensor.zero_()
    runner = StepRunner(model, build_rank_optimizer(model, ADAMW))
    rows = 2
    tokens = torch.zeros(rows, 16, dtype=torch.int64)
    batch = LocalBatch(rows, tokens, tokens)
    with CountHostReads() as counting:
        pending = runner.step(batch, rows * layout.dp, 1e-3)
    in_step = sum(counting.reads.values())
    with CountHostReads() as counting:
        pending.read()
    return {"in_step": in_step, "after_step": 1 + sum(counting.reads.values())}


def stage_parameters(config: ModelConfig, layout: RankLayout, stage: int) -> list[Parameter]:
    """The tensors of a pipeline rank, in the order in which its model names them."""
    layers = set(layout.chunk_layers(stage))
    chosen = []
    for parameter in parameters(config):
        top, _, rest = parameter.name.partition(".")
        if top == "layers":
            if int(rest.partition(".")[0]) in layers:
                chosen.append(parameter)
        elif (stage == 0 and top == "embedding") or (stage == layout.pp - 1 and top != "embedding"):
            chosen.append(parameter)
    return chosen


def state_names(stage: Sequence[Parameter]) -> Iterator[tuple[str, Parameter]]:
    """The tensors of a rank's state in the order in which it saves them."""
    yield from ((f"model.{parameter.name}", parameter) for parameter in stage)
    yield from ((f"optimizer.{kind}.{parameter.name}", parameter) for parameter in stage for kind in AVERAGES)


def all_records(config: ModelConfig, ranks: int) -> Iterator[RankFileRecord]:
    """What every rank would send about its file, boxes as the engine cuts them: tp, then FSDP along the first dim."""
    layout = layout_of(config, ranks)
    digests = np.random.default_rng(0).integers(0, 256, (4096, 32), np.uint8)
    for rank in range(ranks):
        at = layout.coordinates(rank)
        boxes: list[PlannedBox] = []
        for name, parameter in state_names(stage_parameters(config, layout, at.pp)):
            if parameter.tp_dim is None and at.tp:
                continue
            offset, shape = [0] * len(parameter.shape), list(parameter.shape)
            if parameter.tp_dim is not None:
                start, stop = AxisGroup(layout.tp, at.tp).shard_bounds(shape[parameter.tp_dim])
                offset[parameter.tp_dim], shape[parameter.tp_dim] = start, stop - start
            share = -(-shape[0] // layout.dp)
            start = min(at.dp * share, shape[0])
            offset[0], shape[0] = offset[0] + start, min(share, shape[0] - start)
            boxes.append(PlannedBox(name, parameter.shape, "float32", tuple(offset), tuple(shape)))
        if rank == 0:
            boxes.append(PlannedBox("optimizer.updates", (), "float32", (), ()))
        lengths = np.array([4 * int(np.prod(box.sizes)) for box in boxes])
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        spans = np.stack([starts, lengths], 1)
        file = FileEntry(f"__{rank}_1.distcp", int(lengths.sum()), checksum_of(b""))
        yield RankFileRecord(f"{rank}", encode_boxes(boxes), spans, digests[: len(boxes)], "blake3", file)


def after(records: Sequence[RankFileRecord], names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Make the tables as the writer does; read what one rank needs of them."""
    began, of_children = time.process_time(), children_seconds()
    contents = make_tables(records, 1, 1, {}, {}, own_process_items=1)
    own_seconds = time.process_time() - began
    seconds = own_seconds + children_seconds() - of_children
    checkpoint = stored(contents, folder)
    began = time.process_time()
    tensors = read_index(LocalStore(folder), checkpoint, names)
    read_seconds = time.process_time() - began
    header = checkpoint.facts["pieces_header"]["bytes"]
    read_bytes = header + sum(tensor.table.rows.nbytes + tensor.table.digests.nbytes for tensor in tensors.values())
    return {
        "index_bytes": len(contents.index),
        "metadata_bytes": len(contents.metadata),
        "seconds": seconds,
        "training_process_seconds": own_seconds,
        "read_bytes": read_bytes,
        "read_seconds": read_seconds,
    }


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def stored(contents: CheckpointContents, folder: Path) -> CompleteCheckpoint:
    store = LocalStore(folder)
    store.put("step-00000001/pieces-0001.bin", contents.index)
    store.put("step-00000001/manifest.json", contents.manifest)
    return open_checkpoint(store, "step-00000001")


def before(records: Sequence[RankFileRecord]) -> dict[str, Any]:
    """The tables of format 2: JSON with a list for every item, and DCP's own objects pickled."""
    tensors = assemble_index(records)
    gc.collect()
    began = time.process_time()
    items = {name: list(tensor.items) for name, tensor in tensors.items()}
    files = {record.file.path: number for number, record in enumerate(records)}
    document = {
        name: {
            "shape": tensors[name].shape,
            "dtype": tensors[name].dtype,
            "items": [[i.offset, i.sizes, files[i.file], i.start, i.length, i.checksum] for i in of_tensor],
        }
        for name, of_tensor in items.items()
    }
    index = orjson.dumps({"format": 2, "files": list(files), "tensors": document})
    builder = DcpMetadataBuilder()
    for name, of_tensor in items.items():
        builder.add_tensor(name, tensors[name].shape, DTYPES[tensors[name].dtype])
        for item in of_tensor:
            builder.add_chunk(name, item.offset, item.sizes, item.file, item.start, item.length)
    metadata = builder.to_bytes()
    seconds = time.process_time() - began
    del items, document, builder
    gc.collect()
    began = time.process_time()
    for tensor in orjson.loads(index)["tensors"].values():
        [(tuple(offset), tuple(sizes), *rest) for offset, sizes, *rest in tensor["items"]]
    read_seconds = time.process_time() - began
    return {
        "index_bytes": len(index),
        "metadata_bytes": len(metadata),
        "seconds": seconds,
        "training_process_seconds": seconds,
        "read_bytes": len(index),
        "read_seconds": read_seconds,
    }


def measure(model: str, ranks: int, rank: int, with_before: bool) -> dict[str, Any]:
    """Everything about one rank; the tables, which are those of all ranks, only for rank 0."""
    config = model_preset(model)
    answer: dict[str, Any] = {"start": start_up(config, ranks, rank), "syncs": host_syncs(config, ranks, rank)}
    if rank == 0:
        records = list(all_records(config, ranks))
        assert records[0].boxes is not None
        assert checksum_of(records[0].boxes) == answer["start"]["boxes"], "the records are those of real ranks"
        layout = layout_of(config, ranks)
        names = [name for name, _ in state_names(stage_parameters(config, layout, 0))]
        answer["items"] = sum(len(record.spans) for record in records)
        with tempfile.TemporaryDirectory() as folder:
            answer["after"] = after(records, names, Path(folder))
        if with_before:
            answer["before"] = before(records)
    return answer


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--model", default="llama3.1-405b")
    parser.add_argument("--before", action="store_true", help="also the tables of format 2 (minutes, gigabytes)")
    parser.add_argument("--one", type=int, nargs=2, metavar=("RANKS", "RANK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        ranks, rank = options.one
        print(json.dumps(measure(options.model, ranks, rank, options.before)))
        return
    print(f"{options.model}, tp {TP}, pp {PP}, zero1 over the rest")
    starts: list[list[str]] = []
    tables: list[list[str]] = []
    for ranks in options.ranks:
        for rank in (0, middle_rank(ranks)):
            command = [sys.executable, __file__, "--model", options.model, "--one", str(ranks), str(rank)]
            command += ["--before"] if options.before else []
            answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
            start, syncs = answer["start"], answer["syncs"]
            starts.append(
                [
                    f"{ranks:,}",
                    f"{rank:,}",
                    f"{start['groups']}",
                    *(f"{start[key]:.2f} s" for key in ("groups_seconds", "model_seconds", "seconds")),
                    f"{syncs['in_step']} + {syncs['after_step']}",
                ]
            )
            for side in ("before", "after"):
                if side in answer:
                    row = answer[side]
                    tables.append(
                        [
                            f"{ranks:,}",
                            side,
                            f"{answer['items']:,}",
                            *(f"{row[key] / 1e6:,.1f} MB" for key in ("index_bytes", "metadata_bytes")),
                            *(f"{row[key]:.2f} s" for key in ("seconds", "training_process_seconds")),
                            f"{row['read_bytes'] / 1e6:,.1f} MB",
                            f"{row['read_seconds']:.2f} s",
                        ]
                    )
    head = ["ranks", "rank", "groups", "groups in", "model in", "all in", "host reads in + after a step"]
    table("Start-up of one rank", head, starts)
    head = ["ranks", "tables", "items", "index", "DCP's", "made in", "of training's process", "a rank reads", "in"]
    table("Tables of one checkpoint", head, tables)


if __name__ == "__main__":
    main()
