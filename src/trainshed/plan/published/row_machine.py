"""What a published row was measured on: the GPU, its network, the engine and the dtype of products."""

from __future__ import annotations

import re

from trainshed.catalog.gpus import gpu
from trainshed.errors import InputError
from trainshed.plan.performance.hardware import Hardware
from trainshed.plan.published.rows import Row, Skip

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
_PLAIN_NETWORK_GBPS = 100  # of a node without a fabric for its GPUs
_RACK = 72
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


def engine_of(row: Row) -> str:
    """Return the stack that a row ran on, as the planner names it."""
    engine = row.text("engine")
    if engine not in _ENGINES:
        raise Skip(f"the engine `{engine}` is not known here")
    known = _ENGINES[engine]
    if known == "megatron" and (version_of(row) >= (26, 6) or "verification card" in row.notes):
        return "megatron-26.06"
    if known == "megatron-deepspeed" and row.text("dp_shard") == "none" and "opa100" not in row.notes:
        # Without ZeRO it is Megatron of its time; on BLOOM's Omni-Path the network says more than ZeRO does.
        return "megatron-2021"
    if known == "megatron" and row.text("precision") == "fp16" and row.text("gpu").startswith("A100"):
        return "megatron-2021"
    return known


def version_of(row: Row) -> tuple[int, ...]:
    """Return the container of NVIDIA's framework that a row was measured with: (26, 6, 1)."""
    found = re.search(r"(?:nemo|bridge) (\d\d)\.(\d\d)(?:\.(\d\d))?", row.notes)
    return tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)


def precision_of(row: Row) -> str:
    """Return the dtype of its matrix products."""
    written = row.text("precision").lower()
    if not written:
        raise Skip("the row does not say its precision")
    for known in ("mxfp8", "nvfp4", "fp8", "bf16", "fp16", "fp32"):
        if written.startswith(known):
            return known
    raise Skip(f"the precision `{written}` is not known here")


def hardware_of_row(row: Row) -> Hardware:
    """Return its GPUs and their network: what the row says of it, else what such nodes usually have."""
    written = row.text("gpu")
    try:
        found = gpu(_GPUS.get(written, written.lower()))
    except InputError:
        raise Skip(f"the GPU `{written}` is not in the catalog") from None
    name = found.name
    per_node = row.count("gpus_per_node", 8)
    gbps = _stated_network(row, per_node)
    if gbps is None:
        known = (value for prefix, value in _NETWORK_GBPS.items() if name.startswith(prefix))
        gbps = next(known, _PLAIN_NETWORK_GBPS / per_node)
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
