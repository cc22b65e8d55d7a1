"""Published fine-tuning: what a row ran is read from its words, and its step is predicted within 15%."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from trainshed.plan.published.cases import PublishedCase, row_case
from trainshed.plan.published.finetuning import SQUAD_DOCUMENT, is_fine_tuning
from trainshed.plan.published.rows import PublishedRow, read_rows, read_tables, shipped_tables
from trainshed.plan.published.validation import JudgedRow, validate_rows
from trainshed.recipe.train import LATENT_PROJECTIONS

BOUND = 0.15
ROW = {
    "source": "NVIDIA/dgxc-benchmarking:llama3/finetuning/README_8b.md@v25.02",
    "model": "Llama3-8B",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "seq_len": "4096",
    "gpu": "H100-SXM-80GB",
    "gpus_per_node": "8",
    "num_gpus": "8",
    "precision": "bf16",
    "engine": "megatron",
    "tp": "1",
    "pp": "1",
    "micro_batch": "1",
    "global_batch": "32",
    "dp_shard": "zero1",
    "recompute": "none",
    "step_time_s": "0.92",
}


def case(**changes: str) -> PublishedCase:
    return row_case(PublishedRow({**ROW, **changes}, 2))


@pytest.fixture(scope="module")
def judged() -> list[JudgedRow]:
    rows = [row for row in read_tables(shipped_tables()) if is_fine_tuning(row)]
    return [one for one in validate_rows(rows).judged if one.step_seconds is not None]


def errors(rows: list[JudgedRow]) -> list[float]:
    return [abs(one.prediction.step_seconds / (one.step_seconds or 1.0) - 1) for one in rows]


def test_no_constant_was_fitted_to_this_table_and_it_is_predicted_within_the_bound() -> None:
    (table,) = (path for path in shipped_tables() if path.name == "finetuning.csv")
    validation = validate_rows(read_rows(table))
    assert validation.skipped == ()
    sizes = errors(list(validation.judged))
    assert len(sizes) == 55
    assert fmean(sizes) <= 0.08
    assert median(sizes) <= 0.06


@pytest.mark.parametrize("lora", [True, False])
def test_adapters_and_all_weights_are_predicted_within_the_bound(judged: list[JudgedRow], lora: bool) -> None:
    rows = [one for one in judged if (one.case.training.lora is not None) == lora]
    assert len(rows) >= 25
    assert fmean(errors(rows)) <= BOUND
    assert median(errors(rows)) <= BOUND / 2


@pytest.mark.parametrize(
    "source",
    [
        "NVIDIA/NeMo",
        "NVIDIA-NeMo/Megatron-Bridge",
        "NVIDIA/dgxc",
        "NVIDIA-NeMo/Automodel",
        "mlcommons",
        "pytorch/torch",
    ],
)
def test_every_source_is_predicted_within_the_bound(judged: list[JudgedRow], source: str) -> None:
    rows = [one for one in judged if one.row.source.startswith(source)]
    assert len(rows) >= 5
    assert fmean(errors(rows)) <= BOUND


def test_runs_that_were_published_fit_their_gpus(judged: list[JudgedRow]) -> None:
    assert [one.description for one in judged if one.case.training.lora is not None and not one.prediction.fits] == []


def test_a_table_of_nvidia_packs_questions_and_adapts_queries_keys_and_values() -> None:
    adapters = case(notes="nemo 24.12 container; LoRA; packed SQuAD").training
    assert adapters.lora is not None
    assert (adapters.lora.rank, adapters.lora.projections) == (16, ("q_proj", "k_proj", "v_proj"))
    assert adapters.document_length == SQUAD_DOCUMENT == pytest.approx(205.7, abs=0.1)
    everything = case(notes="nemo 25.07; SFT", seq_len="16384", global_batch="8").training
    assert (everything.lora, everything.document_length) == (None, SQUAD_DOCUMENT)


@pytest.mark.parametrize(
    "changes",
    [
        {"notes": "nemo 25.07 container; task LoRA"},
        {"model": "Llama3-8B LoRA", "notes": "nemo 25.04"},
        {"source": "mlcommons/training_results_v5.0:NVIDIA/results/x/llama2_70b_lora", "notes": ""},
        {"notes": "cumulative technique: QLoRA", "engine": "torchtune", "source": "pytorch/torchtune:README.md"},
    ],
    ids=str,
)
def test_a_row_says_in_its_notes_its_model_or_its_source_that_only_adapters_were_trained(
    changes: dict[str, str],
) -> None:
    assert case(**changes).training.lora is not None


def test_a_page_about_lora_has_rows_of_other_training_too() -> None:
    source = "NVIDIA/dgxc-benchmarking:llama3/lora_and_sft.md"
    assert case(source=source, notes="nemo 24.12; SFT").training.lora is None
    assert case(source="NVIDIA/NeMo:docs/performance.md", notes="nemo 24.12; pretraining").training.lora is None
    assert case(source="NVIDIA/NeMo:docs/performance.md", notes="nemo 24.12").training.document_length is None


def test_mlperf_does_not_keep_its_reports_apart_and_has_its_base_in_fp8() -> None:
    training = case(
        source="mlcommons/training_results_v4.1:NVIDIA/results/x/llama2_70b_lora",
        notes="MLPerf Llama-2-70B LoRA; GovReport packed to 8192",
        precision="fp8",
    ).training
    assert training.document_length is None
    assert training.lora is not None
    assert (training.lora.base_bytes, training.lora.dropout) == (1.0, True)
    assert set(training.lora.projections) - set(LATENT_PROJECTIONS) == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_the_scripts_of_nemo_interleave_single_layers_where_the_table_is_silent() -> None:
    keys = {"pp": "4", "notes": "NeMo 24.07 final; SFT", "source": "NVIDIA/NeMo:docs/performance_summary.md"}
    assert case(**keys).layout.vp == 8
    assert case(**keys | {"notes": "NeMo 24.07 final; LoRA"}).layout.vp == 1
    assert case(**keys | {"vp": "2"}).layout.vp == 2
    shared = case(**keys | {"tp": "2", "notes": "NeMo 24.07 final; LoRA"})
    assert not shared.training.options.sequence_parallel


def test_what_a_row_states_wins_over_the_rules() -> None:
    training = case(notes="nemo 24.12; LoRA all-linear rank 64; documents of 1,500 tokens").training
    assert training.lora is not None
    assert (training.lora.rank, len(set(training.lora.projections) - set(LATENT_PROJECTIONS))) == (64, 8)
    assert training.document_length == 1500
    assert case(notes="nemo 24.12; LoRA; full sequences of mock data").training.document_length is None


def test_a_row_of_dpo_has_a_reference() -> None:
    assert case(notes="nemo 25.07; DPO").training.preference
    assert not case(notes="nemo 25.07; SFT").training.preference
