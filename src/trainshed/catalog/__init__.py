"""Facts as data files with their sources: models (later GPUs, machines, fabrics, prices)."""

from trainshed.catalog.models import ModelEntry, architecture, model_entry, model_preset, preset_names

__all__ = ["ModelEntry", "architecture", "model_entry", "model_preset", "preset_names"]
