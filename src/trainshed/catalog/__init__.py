"""Facts as data files with their sources: models, GPUs, machines, fabrics, storage tiers, prices."""

from trainshed.catalog.fabrics import Fabric, fabric, fabric_names
from trainshed.catalog.gpus import Gpu, find_gpu, gpu, gpu_by_device_name, gpu_from_file, gpu_names
from trainshed.catalog.machines import (
    Machine,
    MachinePrice,
    find_machine,
    machine,
    machine_from_file,
    machine_names,
    machine_of_gpu,
    machines_with,
    price_of,
    priced_machines,
)
from trainshed.catalog.models import ModelEntry, architecture, model_entry, model_preset, preset_names
from trainshed.catalog.storage_tiers import StorageTier, storage_tier, tier_names

__all__ = [
    "Fabric",
    "Gpu",
    "Machine",
    "MachinePrice",
    "ModelEntry",
    "StorageTier",
    "architecture",
    "fabric",
    "fabric_names",
    "find_gpu",
    "find_machine",
    "gpu",
    "gpu_by_device_name",
    "gpu_from_file",
    "gpu_names",
    "machine",
    "machine_from_file",
    "machine_names",
    "machine_of_gpu",
    "machines_with",
    "model_entry",
    "model_preset",
    "preset_names",
    "price_of",
    "priced_machines",
    "storage_tier",
    "tier_names",
]
