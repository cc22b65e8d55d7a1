"""Published measurements, one row of a CSV each, turned into jobs the planner can predict.

A table says little about the software behind it; what a row leaves out is filled in here by stated rules, and a row
that stays ambiguous is skipped with its reason, never guessed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainshed.catalog.gpus import gpu
from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout, even_stages
from trainshed.plan.performance.anatomy import Anatomy, Experts, Latent
from trainshed.plan.performance.hardware import Hardware
from trainshed.plan.performance.prediction import Job
from trainshed.plan.performance.stacks import Habits, stack
from trainshed.recipe.layout import Recompute, Shard

_GPUS = {
    "H100-SXM-80GB": "h100-sxm",
    "H100": "h100-sxm",
    "H100-96GB-HBM2e-500W": "h100-sxm",
    "H200-SXM-141GB": "h200",
    "H200": "h200",
    "A100": "a100-80gb",
    "A100-80GB": "a100-80gb",
    "A800-80GB": "a100-80gb",
    "A100-40GB": "a100-40gb",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
}
# What nodes of these GPUs usually have, in Gbit a second per GPU: HDR or 1,600 Gbit RoCE for A100, NDR for Hopper,
# NDR for B200, XDR-class 800G for B300 and the NVL72 racks of GB300.
_NETWORK_GBPS = {"a100": 200, "h100": 400, "h200": 400, "b200": 400, "gb200": 400, "b300": 800, "gb300": 800, "mi": 400}
_RACK = 72
_NOT_GATED = ("gpt", "bloom", "mpt", "mt-nlg", "nemotron3-8b", "nemotron4", "megatron-ci:gpt3")
_NOT_TRANSFORMERS = ("nemotron-3", "nemotron3_", "nemotron3-s", "qwen3-next", "deepseek-v4", "qwen3.", "glm5", "mamba")
_ENGINES = {
    "torch": "torch",
    "nanotron": "nanotron",
    "megatron": "megatron",
    "nemo": "megatron",
    "megatron-fsdp": "megatron-fsdp",
    "primus-megatron": "megatron",
    "megatron-deepspeed": "megatron-deepspeed",
    "fsdp(composer)": "llm-foundry",
    "torchtitan-fsdp2": "torchtitan",
    "pytorch-fsdp": "torchtitan",
    "torchtune": "torchtune",
    "internevo": "internevo",
    "maxtext-jax": "jax",
    "paxml-jax": "jax",
    "meta-internal (fsdp+4D)": "torchtitan",
}


class Skip(Exception):
    """A row that says too little, or that no layout here describes."""


@dataclass(frozen=True)
class Case:
    """A row as the planner takes it."""

    job: Job
    layout: RankLayout
    cannot_run: str | None = None
    """Why its engine cannot run the layout, whatever the memory; published failures do not tell the two apart."""


@dataclass(frozen=True)
class Row:
    """One published measurement; what it does not say is None."""

    fields: dict[str, str]
    number: int

    def text(self, key: str) -> str:
        """Return a field, empty where the table has none."""
        return (self.fields.get(key) or "").strip()

    def value(self, key: str) -> float | None:
        """Return a field as a number."""
        try:
            return float(self.text(key).replace(",", ""))
        except ValueError:
            return None

    def count(self, key: str, default: int | None = None) -> int:
        """Return a field as a whole number, or skip the row."""
        found = self.value(key)
        if found is None:
            if default is None:
                raise Skip(f"the row does not say its {key}")
            return default
        return int(found)

    @property
    def source(self) -> str:
        """Where it was published."""
        return self.text("source")

    @property
    def model(self) -> str:
        """The model's name in the table."""
        return self.text("model")

    @cached_property
    def notes(self) -> str:
        """What else was said, in lower case."""
        return self.text("notes").lower()

    @property
    def out_of_memory(self) -> bool:
        """Whether the run died of memory."""
        return bool(re.search(r"\boom\b", self.notes)) and self.value("step_time_s") is None

    @property
    def step_seconds(self) -> float | None:
        """The measured step, or what the measured tokens a second say."""
        if (seconds := self.value("step_time_s")) is not None:
            return seconds
        rate, tokens = self.value("tokens_per_s_per_gpu"), self._tokens()
        gpus = self.value("num_gpus")
        return tokens / rate / gpus if rate and tokens and gpus else None

    def _tokens(self) -> float | None:
        batch, length = self.value("global_batch"), self.value("seq_len")
        return batch * length if batch and length else None

    @property
    def memory_gib(self) -> float | None:
        """The measured peak."""
        return self.value("peak_mem_gib")

    @property
    def memory_metric(self) -> str:
        """Which peak it is: allocated, reserved, active, nvidia-smi or unstated."""
        if stated := self.text("memory_metric"):
            return stated
        if "nvidia-smi" in self.notes:
            return "nvidia-smi"
        if "torchtitan" in self.source or "max_reserved" in self.notes:
            return "reserved"
        return "active" if "active" in self.notes else "allocated"

    @property
    def memory_stage(self) -> str:
        """Whose peak it is: `last` (Megatron's golden files log the last rank), `first` or `worst`."""
        if stated := self.text("memory_stage"):
            return stated
        return "last" if "last global rank" in self.notes else "worst"

    @property
    def mfu(self) -> float | None:
        """Published MFU."""
        return self.value("mfu")

    @property
    def group(self) -> tuple[str, ...]:
        """What rows must share for their layouts to be compared."""
        keys = ("source", "model", "num_gpus", "seq_len", "global_batch", "precision", "gpu", "engine")
        return tuple(self.text(key) for key in keys)

    def case(self) -> Case:
        """Return the job and the layout of this row, or raise `Skip`."""
        for word in ("qlora", "8bit", "offload", "optimizer-in-bwd"):
            if f"technique: {word}" in self.notes.replace("+", "").replace("activation ", ""):
                raise Skip(f"it is of a technique that no key here names: {word}")
        model = _anatomy(self)
        hardware = _hardware(self)
        layout = _layout(self, model)
        job = Job(
            model=model,
            sequence_length=self.count("seq_len"),
            global_batch=_global_batch(self, layout.dp * layout.micro_batch * layout.pp),
            precision=_precision(self),
            hardware=hardware,
            gpus=layout.world_size,
            stack=stack(_engine(self)),
            habits=_habits(self, model, layout),
        )
        return Case(job, layout, _cannot_run(self, model, layout))


def read_rows(path: str | Path) -> list[Row]:
    """Read a CSV with the columns of the published tables."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.DictReader(file)
            rows = [Row(dict(fields), number) for number, fields in enumerate(reader, start=2)]
            known = set(reader.fieldnames or ())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except csv.Error as error:
        raise InputError(f"is no table of comma-separated values: {error}", where=str(path)) from None
    missing = {"model", "layers", "gpu", "num_gpus", "tp", "pp"} - known
    if missing:
        raise InputError(
            f"has no column {', '.join(sorted(missing))}",
            where=str(path),
            hint="the columns are those of the shipped measurements: trainshed plan validate --columns",
        )
    return rows


def _engine(row: Row) -> str:
    engine = row.text("engine")
    if engine not in _ENGINES:
        raise Skip(f"the engine `{engine}` is not known here")
    known = _ENGINES[engine]
    if known == "megatron" and (_version(row) >= (26, 6) or "verification card" in row.notes):
        return "megatron-26.06"
    if known == "megatron-deepspeed" and row.text("dp_shard") == "none":
        return "megatron-2021"
    if known == "megatron" and row.text("precision") == "fp16" and row.text("gpu").startswith("A100"):
        return "megatron-2021"
    return known


def _version(row: Row) -> tuple[int, ...]:
    """The container of NVIDIA's framework that a row was measured with: (26, 6)."""
    found = re.search(r"(?:nemo|bridge) (\d\d)\.(\d\d)", row.notes)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _precision(row: Row) -> str:
    written = row.text("precision").lower()
    if not written:
        raise Skip("the row does not say its precision")
    for known in ("mxfp8", "nvfp4", "fp8", "bf16", "fp16", "fp32"):
        if written.startswith(known):
            return known
    raise Skip(f"the precision `{written}` is not known here")


def _hardware(row: Row) -> Hardware:
    name = _GPUS.get(row.text("gpu"))
    if name is None:
        raise Skip(f"the GPU `{row.text('gpu')}` is not in the catalog")
    found = gpu(name)
    per_node = row.count("gpus_per_node", 8)
    gbps = _stated_network(row, per_node)
    if gbps is None:
        gbps = next(value for prefix, value in _NETWORK_GBPS.items() if name.startswith(prefix))
    link = (found.link_gb_per_s or 64.0) / 2
    if row.text("gpu") == "A800-80GB":
        link = 200.0
    return Hardware(
        gpu_name=name,
        gpu=found,
        gpus_per_node=per_node,
        link_domain=_RACK if name.startswith("gb") else per_node,
        link_gb_per_s=link,
        network_gb_per_s=gbps / 8,
        fabric="efa" if "efa" in row.notes else "infiniband",
    )


def _stated_network(row: Row, per_node: int) -> float | None:
    if found := re.search(r"(\d+)x(\d+)gb", row.notes):
        return int(found[1]) * int(found[2]) / per_node
    if found := re.search(r"(\d+) ?gb(?:ps|/s)", row.notes):
        return int(found[1]) / per_node
    if "4xopa100" in row.notes:
        return 400 / per_node
    return None


def _anatomy(row: Row) -> Anatomy:
    name = row.model.lower()
    if any(word in name for word in _NOT_TRANSFORMERS):
        raise Skip(f"{row.model} is not a plain transformer")
    layers, hidden, heads = (row.count(key) for key in ("layers", "hidden", "heads"))
    experts_count = row.count("num_experts", 0)
    base = Anatomy(
        name=row.model,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=row.count("kv_heads", heads),
        head_dim=hidden // heads,
        value_dim=hidden // heads,
        ffn=row.count("ffn", 4 * hidden),
        vocab_size=row.count("vocab", 131072 if "megatron-ci" in name else None),
    )
    if name.startswith(_NOT_GATED) and "gpt-oss" not in name:
        base = replace(base, gated=False, tied=not name.startswith("nemotron"))
        if name.startswith("mpt"):
            base = replace(base, positions=row.count("seq_len"))
        elif not name.startswith("nemotron"):
            base = replace(base, norm_vectors=2, qkv_bias=True, output_bias=True, mlp_bias=True)
        return replace(base, tied=base.tied and "untie-embeddings-and-output-weights=true" not in row.notes)
    if experts_count:
        return _with_experts(row, base, experts_count)
    if "qwen3" in name:
        base = replace(base, head_dim=128, value_dim=128, qk_norm=True)
    return _tied_if_that_fits(row, base)


def _tied_if_that_fits(row: Row, model: Anatomy) -> Anatomy:
    stated = row.value("params_b")
    if stated is None:
        return model
    choices = [replace(model, tied=tied) for tied in (False, True)]
    return min(choices, key=lambda choice: abs(choice.weights / 1e9 / stated - 1))


def _with_experts(row: Row, base: Anatomy, count: int) -> Anatomy:
    name = row.model.lower()
    experts = Experts(count, row.count("top_k"), row.count("moe_ffn"))
    if "qwen3" in name:
        return replace(base, head_dim=128, value_dim=128, qk_norm=True, experts=experts, ffn=0)
    if "gpt-oss" in name:
        biases = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
        return replace(base, head_dim=64, value_dim=64, experts=experts, ffn=0, window=128, windowed_every=2, **biases)
    if "deepseek" in name:
        shared = experts.ffn * (2 if "v2" in name else 1)
        return replace(
            base,
            head_dim=192,
            value_dim=128,
            latent=Latent(query_rank=1536, value_rank=512, rope_dim=64),
            experts=replace(experts, shared_ffn=shared),
            dense_first=0 if base.layers < 20 else 1 if "v2" in name else 3,
            extra_heads=0 if "w/o mtp" in row.notes or "v2" in name else 1,
        )
    if "llama4" in name:
        return replace(base, experts=replace(experts, shared_ffn=experts.ffn), experts_every=2)
    return replace(base, experts=experts, ffn=0)


def _layout(row: Row, model: Anatomy) -> RankLayout:
    tp, pp, cp = row.count("tp"), row.count("pp"), row.count("cp", 1)
    vp, ep = row.count("vp", 1), row.count("ep", 1)
    etp = row.count("etp", 1 if ep > 1 else tp)
    gpus = row.count("num_gpus")
    if gpus % (tp * pp * cp):
        raise Skip(f"tp {tp} · pp {pp} · cp {cp} does not divide the {gpus} GPUs")
    dp, micro = gpus // (tp * pp * cp), row.count("micro_batch")
    batch = _global_batch(row, dp * micro * pp)
    if batch % (dp * micro) and batch < dp * micro:
        raise Skip(f"dp {dp} · micro-batch {micro} is more than the global batch of {batch}")
    if pp == 1:
        vp = 1
    if not model.experts or (dp * cp * tp) % (ep * etp):
        ep, etp = (1, 1) if not model.experts else (ep, 1)
    if model.experts and (dp * cp * tp) % (ep * etp):
        raise Skip(f"ep {ep} does not divide the {dp * cp * tp} ranks of a stage")
    shard, replicas = _shard(row, dp)
    return RankLayout(
        tp=tp,
        pp=pp,
        vp=vp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        replicate=replicas,
        shard=shard,
        micro_batch=micro,
        recompute=_recompute(row),
        schedule=None if pp == 1 else "interleaved" if vp > 1 else "1f1b",
        stages=_stages(row, model, pp, vp),
    )


def _global_batch(row: Row, filling: int) -> int:
    """The global batch; a row that tells memory alone needs none but a full pipeline."""
    return row.count("global_batch", None if row.step_seconds is not None else filling)


def _shard(row: Row, dp: int) -> tuple[Shard, int]:
    written = row.text("dp_shard").lower()
    replicas = 1
    if found := re.search(r"group=(\d+)", written):
        replicas = max(1, dp // int(found[1]))
    if written.startswith("hsdp"):
        return "full", max(1, dp // row.count("gpus_per_node", 8))
    if "shard_grad_op" in written or "not resharded" in written:
        return "zero2", replicas
    if written.startswith("fsdp"):
        return "full", replicas
    return ("zero1", replicas) if written.startswith("zero1") else ("none", 1)


def _recompute(row: Row) -> Recompute:
    written = row.text("recompute").lower()
    if written.startswith("full"):
        return "full"
    return "selective" if written.startswith("selective") else "none"


def _stages(row: Row, model: Anatomy, pp: int, vp: int) -> tuple[int, ...]:
    if found := re.search(r"pp_layout=([a-z|()*0-9]+)", row.notes):
        chunks = _written_stages(found[1])
        if len(chunks) == pp * vp and sum(chunks) == model.layers:
            return chunks
    if row.text("engine") == "nanotron":
        return nanotron_stages(model, pp)[0]
    chunks = pp * vp
    if chunks > model.layers + 2:
        raise Skip(f"{chunks} chunks for {model.layers} layers")
    if model.extra_heads and chunks > 1:
        # Megatron-Bridge's layouts of models that predict further tokens: full chunks, and a short last one that
        # has those layers and both passes through the head besides.
        each = -(-(model.layers + model.extra_heads + 2) // chunks)
        if 0 <= model.layers - each * (chunks - 1) <= each:
            return (*[each] * (chunks - 1), model.layers - each * (chunks - 1))
    if model.layers % chunks and (model.layers + 2) % chunks == 0:
        # Megatron's account-for-embedding-in-pipeline-split (and -loss-): both count as a layer.
        each = (model.layers + 2) // chunks
        return (each - 1, *[each] * (chunks - 2), each - 1)
    return even_stages(model.layers, chunks)


def _written_stages(text: str) -> tuple[int, ...]:
    """Read Megatron's pipeline layout (`Et*4|(t*4|)*14tmL`, lower case): the layers of each chunk."""
    spread = text
    while found := re.search(r"\(([^()]*)\)\*(\d+)", spread):
        spread = spread[: found.start()] + found[1] * int(found[2]) + spread[found.end() :]
    spread = re.sub(r"([a-z])\*(\d+)", lambda match: match[1] * int(match[2]), spread)
    return tuple(chunk.count("t") for chunk in spread.split("|"))


def nanotron_stages(model: Anatomy, pp: int) -> tuple[tuple[int, ...], int]:
    """Return the layers of each stage as nanotron cuts them, and the stage of the head.

    nanotron (models/base.py, build_model) gives blocks to a stage until their running cost passes its share; a block
    costs the elements of its matrices, the head too, and everything else is free.
    """
    layer = sum(p.inputs * p.outputs for p in (*model.attention_products, *model.feed_forward(model.ffn)))
    blocks = [layer] * model.layers + [model.head_weights]
    total, passed, stage = sum(blocks), 0, 0
    layers, head = [0] * pp, pp - 1
    for index, cost in enumerate(blocks):
        if index < model.layers:
            layers[stage] += 1
        else:
            head = stage
        passed += cost
        if passed > total * (stage + 1) / pp and stage < pp - 1:
            stage += 1
    return tuple(layers), head


def _cannot_run(row: Row, model: Anatomy, layout: RankLayout) -> str | None:
    if row.text("engine") != "nanotron" or layout.pp == 1:
        return None
    head = nanotron_stages(model, layout.pp)[1]
    # The stage after the head's computes the loss; one further on gets no block at all.
    idle = layout.pp - head - 2
    return f"{idle} of {layout.pp} stages get no block" if idle > 1 else None


def _habits(row: Row, model: Anatomy, layout: RankLayout) -> Habits:
    """What this run did otherwise than its engine's usual."""
    chosen: dict[str, Any] = {}
    if row.text("sp") == "0" and layout.tp > 1:
        chosen["sequence_parallel"] = False
    if row.text("engine") == "nanotron" and layout.pp > 1:
        chosen["head_chunk"] = nanotron_stages(model, layout.pp)[1]
    written = row.text("recompute").lower().removeprefix("selective:")
    if layout.recompute == "selective":
        chosen["selective"] = "" if written == "selective" else written
    if any(word in row.notes for word in ("a2a_overlap", "ep overlap on", "a2a overlap")):
        chosen["ep_overlap"] = True
    if "full_iteration" in row.notes:
        chosen["graphs"] = 1.0
    elif "cudagraph" in row.notes or "cuda_graph" in row.notes:
        chosen["graphs"] = 0.3
    elif _engine(row) == "megatron-26.06" and row.text("precision") == "mxfp8" and row.text("gpu").startswith("GB"):
        # Megatron-Bridge's recipes for NVL72 racks capture whole iterations since 26.06.
        chosen["graphs"] = 1.0
    if "no comm overlap" in row.notes:
        chosen["overlap"] = False
    else:
        chosen["tp_overlap"] = True
    if "tokendrop" in row.notes:
        chosen["fixed_routing"] = True
    if _engine(row).startswith("megatron") and re.search(r"nemo|bridge|dgxc", row.notes + row.source.lower()):
        # NVIDIA's performance recipes: grad_reduce_in_fp32 is off.
        chosen["half_gradients"] = True
    if re.search(r"; lora|technique: lora", row.notes):
        chosen["trained_share"] = 0.0
    if "500w" in row.text("gpu").lower():
        chosen["power"] = 0.85
    return Habits(**chosen)


def shipped_tables() -> Iterator[Path]:
    """Yield the published tables that come with the project."""
    folder = Path(__file__).parent
    yield from (folder / name for name in ("throughput_memory.csv", "out_of_memory.csv"))


def column_names() -> list[str]:
    """Return the columns of the tables."""
    with open(next(shipped_tables()), encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


def own_table() -> Path:
    """Return what our own engine did on one GPU, in the same columns."""
    return Path(__file__).with_name("own_engine.csv")


def all_rows(paths: Iterable[str | Path]) -> list[Row]:
    """Read several tables as one."""
    return [row for path in paths for row in read_rows(path)]
