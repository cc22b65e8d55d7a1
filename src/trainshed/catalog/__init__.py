"""Facts as data files with their sources: models and GPUs (later machines, fabrics, prices)."""

from trainshed.catalog.gpus import Gpu, gpu, gpu_by_device_name, gpu_names
from trainshed.catalog.models import ModelEntry, architecture, model_entry, model_preset, preset_names

__all__ = [
    "Gpu",
    "ModelEntry",
    "architecture",
    "gpu",
    "gpu_by_device_name",
    "gpu_names",
    "model_entry",
    "model_preset",
    "preset_names",
]
