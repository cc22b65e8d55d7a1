"""Published rows as jobs: what they say is taken, what they leave open is filled in by rules or skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.catalog.models import model_preset
from trainshed.errors import InputError
from trainshed.plan.model_shape import model_shape
from trainshed.plan.published.cases import PublishedCase, nanotron_stages, row_case
from trainshed.plan.published.rows import PublishedRow, SkippedRow, read_rows, read_tables, shipped_tables

ROW = {
    "source": "a table",
    "model": "Llama3-8B",
    "params_b": "8.03",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "H100-SXM-80GB",
    "gpus_per_node": "8",
    "num_gpus": "64",
    "precision": "bf16",
    "engine": "megatron",
    "tp": "2",
    "sp": "1",
    "pp": "4",
    "vp": "2",
    "cp": "1",
    "dp_shard": "zero1",
    "micro_batch": "1",
    "global_batch": "128",
    "recompute": "none",
    "step_time_s": "1.0",
}


def case(**changes: str) -> PublishedCase:
    return row_case(PublishedRow({**ROW, **changes}, 2))


def test_a_row_is_the_job_and_the_layout_it_describes() -> None:
    found = case()
    assert found.training.model.weights == model_shape(model_preset("llama3-8b")).weights
    assert (found.layout.tp, found.layout.pp, found.layout.vp, found.layout.dp) == (2, 4, 2, 8)
    assert found.training.hardware.network_gb_per_s == 50.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": ""}, "does not say its layers"),
        ({"gpu": "TPU v5"}, "not in the catalog"),
        ({"engine": "homemade"}, "is not known here"),
        ({"precision": ""}, "does not say its precision"),
        ({"num_gpus": "60"}, "does not divide the 60 GPUs"),
        ({"model": "Nemotron-3-Nano"}, "not a plain transformer"),
        ({"global_batch": "4"}, "more than the global batch"),
        ({"pp": "32", "vp": "4", "num_gpus": "64"}, "128 chunks for 32 layers"),
    ],
)
def test_what_a_row_does_not_say_is_never_guessed(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(SkippedRow, match=reason):
        case(**changes)


def test_a_gpu_by_its_name_in_the_catalog() -> None:
    assert case(gpu="L40S").training.hardware.network_gb_per_s == 100 / 8 / 8
    assert case(gpu="h200").training.hardware.gpu_name == "h200"


def test_tied_embeddings_are_told_by_the_number_of_weights() -> None:
    sizes = {"layers": "16", "hidden": "2048", "heads": "32", "kv_heads": "32", "ffn": "8192", "vocab": "131072"}
    assert case(**sizes, params_b="1.342").training.model.tied
    assert not case(**sizes, params_b="1.610").training.model.tied


def test_megatrons_written_pipeline_is_read() -> None:
    found = case(layers="61", pp="2", vp="8", num_gpus="32", tp="1", notes="pp_layout=Et*4|(t*4|)*14tmL")
    assert found.layout.stages == (4,) * 15 + (1,)


def test_chunks_that_count_the_embedding_and_the_loss_as_layers() -> None:
    found = case(layers="126", pp="8", vp="8", num_gpus="64", tp="1")
    assert found.layout.stages == (1, *[2] * 62, 1)


def test_nanotron_cuts_by_the_cost_of_blocks() -> None:
    """Worked by hand: 16 layers of cost 1 and a head of cost 4, on 8 stages of 2.5 each."""
    sizes = {"layers": "16", "hidden": "2048", "heads": "32", "kv_heads": "32", "ffn": "8192", "vocab": "131072"}
    model = case(**sizes, params_b="1.342").training.model
    assert nanotron_stages(model, 8) == ((3, 3, 2, 3, 2, 3, 0, 0), 6)


def test_a_pipeline_with_idle_stages_cannot_run() -> None:
    sizes = {"layers": "16", "hidden": "2048", "heads": "32", "kv_heads": "32", "ffn": "8192", "vocab": "131072"}
    found = case(**sizes, params_b="1.342", engine="nanotron", pp="16", vp="1", num_gpus="32")
    assert found.cannot_run == "2 of 16 stages get no block"


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="has no column"):
        read_rows(tmp_path / "x.csv")


def test_the_shipped_tables_are_whole() -> None:
    assert len(read_tables(shipped_tables())) == 3059


def test_a_nanotron_row_has_the_memory_of_rank_0_whatever_its_table_says() -> None:
    assert PublishedRow({**ROW, "engine": "nanotron", "memory_stage": "worst"}, 2).memory_stage == "first"
    assert PublishedRow({**ROW, "memory_stage": "worst"}, 2).memory_stage == "worst"


def test_megatron_deepspeed_without_zero_is_megatron_of_its_time_except_on_omni_path() -> None:
    plain = {"engine": "megatron-deepspeed", "dp_shard": "none", "vp": "1"}
    assert case(**plain).training.constants.name == "megatron-2021"
    assert case(**plain, notes="Jean Zay A100 4xOPA100").training.constants.name == "megatron-deepspeed"
