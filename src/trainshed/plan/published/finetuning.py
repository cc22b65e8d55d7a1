"""What published rows of fine-tuning ran: which weights were trained, and how long the documents were.

A table of fine-tuning says `SFT` or `LoRA` and little more. The rest is in the recipes that the tables were measured
with, and these are the rules here:

- NVIDIA's tables (NeMo, Megatron-Bridge, dgxc-benchmarking) pack SQuAD into each sequence and keep the questions apart.
  A token is in a question of 206 tokens: Megatron-Bridge counts 842,603 as the sum of squared lengths of 4,096 tokens
  (`flop_utils.py`, commit fa4a01b79). Adapters are on queries, keys and values alone, as one.
- MLPerf's Llama-2-70B LoRA packs reports into 8,192 tokens and does not keep them apart. (NVIDIA's submissions say
  `packed_sequence_return_cu_seqlen: False`.) Adapters of rank 16 with dropout are on all of attention, and frozen
  weights are kept in fp8 (`fp8_params`).
- NeMo AutoModel's benchmarks have full sequences of random tokens, and adapters of rank 16 on every projection.
- torchtune's ablation packs Alpaca and keeps its answers apart, some 150 tokens each. Adapters of rank 64 are on all
  projections but keys.
"""

from __future__ import annotations

import re

from trainshed.plan.lora_shape import DOUBLE_QUANTIZED_NF4_BYTES, LoraShape
from trainshed.plan.published.rows import PublishedRow
from trainshed.recipe.train import LORA_GROUPS, LoraProjection

SQUAD_DOCUMENT = 842_603 / 4096
"""Tokens of the SQuAD question that an average token is in."""
_ALPACA_DOCUMENT = 150.0
"""The same for Alpaca: an estimate."""
_LORA = re.compile(r"(?<![a-z])(?:q|r?s?)lora(?![a-z])")
_ALL_WEIGHTS = re.compile(r"(?<![a-z])(?:sft|full[ -]fine-?tun\w*|full sft)(?![a-z])")
_FINE_TUNING = re.compile(r"(?<![a-z])(?:sft|dpo|peft|fine-?tun\w*)(?![a-z])")
_NVIDIA_TABLES = re.compile(r"(?<![a-z])(?:nemo|megatron-bridge|dgxc-benchmarking)(?![a-z])")
_MLPERF = re.compile(r"mlperf|mlcommons|training_results_v|llama-?2[-_ ]70b[-_ ]lora")
_NEMO_LAUNCHER = "24.07"
"""NeMo's release whose table was measured with the scripts of NeMo-Framework-Launcher (examples/peft/llama/h100)."""
_QUERIES_KEYS_VALUES: tuple[LoraProjection, ...] = ("q_proj", "k_proj", "v_proj")
_WITHOUT_KEYS: tuple[LoraProjection, ...] = ("q_proj", "v_proj", "o_proj", *LORA_GROUPS["mlp"])


def is_lora(row: PublishedRow) -> bool:
    """Whether only adapters were trained: as its notes say, or else the names of its model and source."""
    if _LORA.search(row.notes):
        return True
    says_all = _ALL_WEIGHTS.search(f"{row.notes} {row.model.lower()}")
    return not says_all and bool(_LORA.search(_words(row)))


def is_fine_tuning(row: PublishedRow) -> bool:
    """Whether a row is of fine-tuning: of adapters, or of all weights."""
    return row.text("engine") == "torchtune" or is_lora(row) or bool(_FINE_TUNING.search(_words(row)))


def is_preference(row: PublishedRow) -> bool:
    """Whether a row is of DPO."""
    return bool(re.search(r"(?<![a-z])dpo(?![a-z])", row.notes))


def row_lora(row: PublishedRow) -> LoraShape | None:
    """Return the adapters of a row; None where all weights were trained."""
    if not is_lora(row):
        return None
    stated = re.search(r"(?<![a-z])rank[ =](\d+)", row.notes)
    nvidia, mlperf = _is_nvidia_table(row), _is_mlperf(row)
    usual_rank = 64 if row.text("engine") == "torchtune" else 32 if _is_of_launcher(row) else 16
    return LoraShape(
        rank=int(stated[1]) if stated else usual_rank,
        projections=_projections(row),
        dropout=mlperf or "dropout" in row.notes,
        dora="dora" in row.notes,
        base_bytes=_base_bytes(row),
        joint=nvidia or mlperf,
    )


def _projections(row: PublishedRow) -> tuple[LoraProjection, ...]:
    if re.search(r"all[- ]linear|\*_proj", row.notes) or _is_automodel(row):
        return LORA_GROUPS["all-linear"]
    if row.text("engine") == "torchtune":
        return _WITHOUT_KEYS
    qkv_alone = "qkv" in row.notes or (_is_nvidia_table(row) and "attention" not in row.notes)
    return _QUERIES_KEYS_VALUES if qkv_alone else LORA_GROUPS["attn"]


def _base_bytes(row: PublishedRow) -> float | None:
    if "qlora" in row.notes or "nf4" in row.notes:
        return DOUBLE_QUANTIZED_NF4_BYTES
    narrow = row.text("precision").lower().startswith(("fp8", "mxfp8", "nvfp4"))
    return 1.0 if narrow and (_is_mlperf(row) or "fp8 param" in row.notes) else None


def row_document_length(row: PublishedRow) -> float | None:
    """Return the length of the document that an average token is in; None where documents are not kept apart."""
    if stated := re.search(r"documents? of ([\d,]+)", row.notes):
        return float(stated[1].replace(",", ""))
    if not is_fine_tuning(row) or _is_mlperf(row) or re.search(r"mock|synthetic|full sequences", row.notes):
        return None
    if "squad" in row.notes or _is_nvidia_table(row):
        return SQUAD_DOCUMENT
    return _ALPACA_DOCUMENT if row.text("engine") == "torchtune" and row.value("seq_len") else None


def row_chunks(row: PublishedRow, layers: int, pp: int) -> int:
    """Return the virtual stages of a row that does not say them: NeMo's scripts interleave single layers in SFT."""
    single = _is_of_launcher(row) and not is_lora(row) and pp > 1 and layers % pp == 0
    return layers // pp if single else 1


def has_sequence_parallel(row: PublishedRow) -> bool:
    """Whether tensor-parallel ranks divide the residual stream: NeMo's scripts do not with LoRA."""
    return not (_is_of_launcher(row) and is_lora(row))


def _is_nvidia_table(row: PublishedRow) -> bool:
    """Whether it is of a table of Megatron's fine-tuning; AutoModel's benchmarks have other data."""
    if _is_automodel(row) or _is_mlperf(row) or row.text("engine") not in ("megatron", "nemo", "megatron-fsdp"):
        return False
    return bool(_NVIDIA_TABLES.search(f"{_words(row)} {row.text('engine')}"))


def _is_of_launcher(row: PublishedRow) -> bool:
    return is_fine_tuning(row) and _is_nvidia_table(row) and f"nemo {_NEMO_LAUNCHER}" in row.notes


def _is_mlperf(row: PublishedRow) -> bool:
    return bool(_MLPERF.search(_words(row)))


def _is_automodel(row: PublishedRow) -> bool:
    return "automodel" in f"{_words(row)} {row.text('engine')}"


def _words(row: PublishedRow) -> str:
    return f"{row.notes} {row.model} {row.source}".lower()
