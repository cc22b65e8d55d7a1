"""The planner compared with its peers on the same published measurements, and how fast it searches.

    python benchmarks/planner.py [CSV ...] [--llm-analysis PYTHON] [--folder store/bench]

- llm-analysis runs in a Python of its own, as it needs an old transformers: `--llm-analysis PYTHON` names one that has
  it; without the flag a virtual environment is made and it is installed from PyPI. Its input is the share of the peak
  that matmuls reach. It is shown at 100%, its lower bound, and with one factor per source, GPU and precision that makes
  its median error zero: the best input possible, from the very rows it is judged on.
- SimuMax is not on PyPI; its own predictions for its own B200 runs, which it publishes beside the measurements, are
  compared with ours on those rows.
- The null model is a constant TFLOP/s per GPU: the median of the same source, GPU and precision.
- Rows of fine-tuning are shown by themselves: no peer plans adapters, or documents that are kept apart.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import venv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measure import table
from trainshed.catalog import model_preset
from trainshed.errors import TrainshedError
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import engine_constants
from trainshed.plan.published.finetuning import is_fine_tuning
from trainshed.plan.published.plot import short_source
from trainshed.plan.published.rows import read_tables, shipped_tables
from trainshed.plan.published.validation import SLOW_MFU, JudgedRow, error_scores, step_time_scores, validate_rows
from trainshed.plan.search.search import search_layouts
from trainshed.plan.training_shape import TrainingShape, hardware_of_gpu

PEER = Path(__file__).parent / "peers" / "llm_analysis_rows.py"
SIMUMAX = re.compile(r"SimuMax predicted ([\d.]+) ms / ([\d.]+) GiB")
SWEEP = "HF ultra-scale playbook"
"""Every layout was tried, slow ones too: of those it takes more than FLOPs to know what held them up."""
ZERO = {"none": 0, "zero1": 1, "zero2": 2, "full": 3}
RECOMPUTE = {"none": 0, "selective": 1, "full": 2}
SEARCHES = (("llama3-8b", 64, 8192, 512), ("llama3-70b", 512, 8192, 1024), ("llama3.1-405b", 16384, 8192, 2048))


@dataclass(frozen=True)
class Peer:
    """What a peer predicted for a row."""

    judged: JudgedRow
    seconds: float
    gib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help="CSVs of measurements (default: the shipped ones)")
    parser.add_argument("--llm-analysis", type=Path, help="a Python that has llm-analysis")
    parser.add_argument("--folder", type=Path, default=Path("store/bench"), help="where its environment is made")
    arguments = parser.parse_args()
    started = time.perf_counter()
    validation = validate_rows(read_tables(arguments.tables or shipped_tables()))
    seconds = time.perf_counter() - started
    print(f"{len(validation.judged):,} rows predicted in {seconds:.1f} s ({len(validation.skipped)} skipped)")
    timed = [one for one in validation.judged if one.step_seconds]
    tuned = [one for one in timed if is_fine_tuning(one.row)]
    llm_analysis([one for one in timed if not is_fine_tuning(one.row)], arguments.llm_analysis, arguments.folder)
    simumax(timed)
    fine_tuning(tuned)
    searches()


def llm_analysis(timed: Sequence[JudgedRow], python: Path | None, folder: Path) -> None:
    """Compare on every row that it can predict at all."""
    command = python or _installed(folder)
    if command is None:
        return
    dense = [one for one in timed if one.case.training.model.experts is None and one.case.layout.cp == 1]
    peers = _predictions_of_peer(command, dense)
    if not peers:
        return
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, peer in enumerate(peers):
        name = short_source(peer.judged.row.source)
        groups[name].append(index)
        if name == SWEEP and peer.judged.mfu > SLOW_MFU:
            groups[f"{name}, above 10% MFU"].append(index)
    chosen = [(name, rows) for name, rows in groups.items() if len(rows) >= 5] + [("all of them", range(len(peers)))]
    rows = []
    for name, indices in chosen:
        ones = [peers[index].judged for index in indices]
        ours, null = step_time_scores(ones), step_time_scores(ones).null_mape
        theirs = error_scores((peers[index].seconds, _measured(peers[index].judged)) for index in indices)
        corrected = error_scores(_without_bias([peers[index] for index in indices]))
        rows.append([name, str(len(ones)), *map(_percent, (ours.mape, null, corrected.mape, theirs.mape))])
    columns = ["step time, mean error", "rows", "trainshed", "null model", "llm-analysis, told", "llm-analysis"]
    table("llm-analysis: dense models without context parallel", columns, rows)
    memory = [peer for peer in peers if peer.judged.memory_gib]
    pairs = [(peer.judged.predicted_gib, peer.judged.memory_gib or 1.0) for peer in memory]
    theirs = [(peer.gib, peer.judged.memory_gib or 1.0) for peer in memory]
    line = ["peak memory", str(len(memory)), _percent(error_scores(pairs).mape), _percent(error_scores(theirs).mape)]
    table("", ["mean error", "rows", "trainshed", "llm-analysis"], [line])


def _installed(folder: Path) -> Path | None:
    """A Python with llm-analysis, made where there is none; None with the reason printed."""
    home = folder / "llm-analysis"
    python = home / "bin" / "python"
    if not python.exists():
        home.mkdir(parents=True, exist_ok=True)
        venv.create(home, with_pip=True)
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "llm-analysis"], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        print(f"\nllm-analysis could not be installed: {done.stderr.strip().rpartition(chr(10))[2]}")
        return None
    return python


def _predictions_of_peer(python: Path, ones: Sequence[JudgedRow]) -> list[Peer]:
    cases = "".join(json.dumps(_case(number, one)) + "\n" for number, one in enumerate(ones))
    started = time.perf_counter()
    done = subprocess.run([python, PEER], input=cases, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        print(f"\nllm-analysis failed: {done.stderr.strip().rpartition(chr(10))[2]}")
        return []
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    peers = [
        Peer(ones[answer["number"]], answer["seconds"], answer["gib"]) for answer in answers if answer.get("seconds")
    ]
    print(f"\nllm-analysis predicted {len(peers)} of {len(ones)} rows in {time.perf_counter() - started:.1f} s")
    return peers


def _case(number: int, one: JudgedRow) -> dict[str, Any]:
    training, layout = one.case.training, one.case.layout
    model, hardware = training.model, training.hardware
    peak = one.prediction.peak_tflops
    return {
        "number": number,
        "hidden": model.hidden,
        "model": {
            "name": model.name,
            "num_layers": model.layers,
            "n_head": model.heads,
            "hidden_dim": model.hidden,
            "vocab_size": model.vocab_size,
            "max_seq_len": training.sequence_length,
            "num_key_value_heads": model.kv_heads,
            "ffn_embed_dim": model.ffn,
        },
        "gpu": {
            "name": hardware.gpu_name,
            "mem_per_GPU_in_GB": 10_000,  # it refuses what does not fit, and these runs did
            "hbm_bandwidth_in_GB_per_sec": hardware.gpu.memory_gb_per_s,
            "intra_node_bandwidth_in_GB_per_sec": hardware.link_gb_per_s,
            "intra_node_min_message_latency": 8e-6,
            "peak_fp16_TFLOPS": peak,
            "inter_node_bandwidth_in_GB_per_sec": hardware.network_gb_per_s,
        },
        "parallelism": {"tp_size": layout.tp, "pp_size": layout.pp, "dp_size": layout.dp},
        "micro_batch": layout.micro_batch,
        "micro_batches": layout.micro_batches(training.global_batch),
        "sequence_length": training.sequence_length,
        "recompute": RECOMPUTE[layout.recompute],
        "zero": ZERO[layout.shard],
        "gated": model.gated,
    }


def _without_bias(peers: Sequence[Peer]) -> list[tuple[float, float]]:
    """Its seconds times the factor of their source, GPU and precision that makes the median right, and the measured."""
    factors: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for peer in peers:
        factors[_group(peer.judged)].append(_measured(peer.judged) / peer.seconds)
    return [(peer.seconds * median(factors[_group(peer.judged)]), _measured(peer.judged)) for peer in peers]


def _group(one: JudgedRow) -> tuple[str, str, str]:
    return (one.row.source, one.case.training.hardware.gpu_name, one.case.training.precision)


def simumax(timed: Iterable[JudgedRow]) -> None:
    """Compare on the rows that SimuMax publishes its own predictions for."""
    peers = [
        Peer(one, float(match[1]) / 1000, float(match[2]))
        for one in timed
        if (match := SIMUMAX.search(one.row.text("notes")))
    ]
    if not peers:
        print("\nSimuMax: none of these rows carries its prediction")
        return
    ones = [peer.judged for peer in peers]
    ours = step_time_scores(ones)
    rows = [
        ["step time", str(len(peers)), _percent(ours.mape), _percent(ours.null_mape), _mean(peers, "seconds")],
        ["peak memory", str(len(peers)), _percent(_memory_error(ones)), "", _mean(peers, "gib")],
    ]
    columns = ["mean error", "rows", "trainshed", "null model", "SimuMax"]
    table("SimuMax: its own runs on 8 B200, by tables measured on that machine", columns, rows)


def _mean(peers: Sequence[Peer], what: str) -> str:
    measured = [_measured(peer.judged) if what == "seconds" else peer.judged.memory_gib or 1.0 for peer in peers]
    return _percent(error_scores(zip((getattr(peer, what) for peer in peers), measured, strict=True)).mape)


def _memory_error(ones: Sequence[JudgedRow]) -> float | None:
    return error_scores((one.predicted_gib, one.memory_gib) for one in ones if one.memory_gib).mape


def fine_tuning(tuned: Sequence[JudgedRow]) -> None:
    """Print how far off fine-tuning is, by source; no peer here predicts adapters or packed documents."""
    groups: defaultdict[tuple[str, str], list[JudgedRow]] = defaultdict(list)
    for one in tuned:
        kind = "all weights" if one.case.training.lora is None else "adapters"
        groups[(short_source(one.row.source), kind)].append(one)
        groups[("all of them", kind)].append(one)
    rows = []
    for (source, kind), ones in sorted(groups.items()):
        scores = step_time_scores(ones)
        rows.append([source, kind, str(len(ones)), *map(_percent, (scores.mape, scores.median, scores.bias))])
    table("fine-tuning: step time", ["source", "trained", "rows", "mean error", "median", "bias"], rows)


def searches() -> None:
    """Time whole searches, each with cold caches: a process of its own would only add the import."""
    rows = []
    for name, gpus, length, batch in SEARCHES:
        training = TrainingShape(
            model=model_shape(model_preset(name), name),
            sequence_length=length,
            global_batch=batch,
            precision="bf16",
            hardware=hardware_of_gpu("h100"),
            gpus=gpus,
            constants=engine_constants("megatron"),
        )
        started = time.perf_counter()
        try:
            result = search_layouts(training, engine="megatron")
        except TrainshedError as error:
            rows.append([f"{name} on {gpus:,} H100", "", "", error.what])
            continue
        seconds = time.perf_counter() - started
        chosen = f"{result.chosen.layout}, {result.chosen.step_seconds:.2f} s"
        rows.append([f"{name} on {gpus:,} H100", f"{seconds:.2f}", f"{result.considered:,}", chosen])
    table("search, megatron, bf16", ["job", "seconds", "layouts", "chosen"], rows)


def _measured(one: JudgedRow) -> float:
    assert one.step_seconds is not None, "only rows with a step time are compared"
    return one.step_seconds


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    sys.exit(main())
