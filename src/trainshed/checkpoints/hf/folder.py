"""What lies in a folder that transformers saved: its config, its tensors, and whether these are the config's.

Nothing is read but JSON and headers; no torch here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainshed.checkpoints.hf.safetensors_file import StoredTensor, read_header
from trainshed.errors import CorruptData, InputError, NoSuchName
from trainshed.models.families import HF_FAMILIES
from trainshed.models.hf_config import read_hf_config
from trainshed.models.hf_tensors import HfTensor, hf_tensors
from trainshed.recipe import ModelConfig

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The safetensors dtypes that are read, and torch's names for them."""
# What older versions of transformers saved although it can be computed: rotary frequencies, GPT-2's causal masks.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(bias|masked_bias))$")
_NAMED = 5  # how many tensors an error names before it only counts


def read_config(folder: Path) -> ModelConfig:
    """Return the architecture that a folder's config.json describes."""
    return read_hf_config(_json_object(folder / CONFIG), str(folder / CONFIG))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder; as transformers, the single file first, then the index."""
    if (folder / WEIGHTS).exists():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        raise NoSuchName(
            f"there is neither {WEIGHTS} nor {INDEX}",
            where=str(folder),
            hint="pickled weights (.bin, .pth) are never opened: save them as safetensors with save_pretrained",
        )
    index = _json_object(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) and name for name in index.values()):
        raise CorruptData("has no `weight_map`", where=str(folder / INDEX), hint="fetch the folder again")
    for name in sorted(set(index.values())):
        if Path(name).name != name:
            raise CorruptData(f"names `{name}`, which is no file beside it", where=str(folder / INDEX))
    files = {name: read_header(folder / name) for name in sorted(set(index.values()))}
    lost = sorted(tensor for tensor, name in index.items() if tensor not in files[name])
    if lost:
        raise CorruptData(
            f"does not fit its files: {_listed(lost)} not where it says",
            where=str(folder / INDEX),
            hint="fetch the folder again",
        )
    found = {name: tensor for header in files.values() for name, tensor in header.items()}
    return found | {tensor: files[name][tensor] for tensor, name in index.items()}


def matched(config: ModelConfig, stored: dict[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """Find every tensor of an architecture by its full name, or say what is missing, left over or of another kind."""
    wanted = {tensor.name: tensor for tensor in hf_tensors(config)}
    base = HF_FAMILIES[config.family].names.base
    if not any(name.startswith(base) for name in stored):
        # Saved without the language model around it, as OpenAI's GPT-2s are.
        stored = {name if name in wanted else base + name: tensor for name, tensor in stored.items()}
    missing = [name for name in wanted if name not in stored]
    extra = sorted(name for name in stored if name not in wanted and not _BUFFERS.search(name))
    if missing or extra:
        parts = [f"{_listed(names)} {how}" for names, how in ((missing, "missing"), (extra, "left over")) if names]
        raise InputError(
            f"the tensors are not those of its config: {'; '.join(parts)}",
            where=str(folder),
            hint=f"compare them with {CONFIG}; one that is left over would have been lost in silence",
        )
    wrong = [_misfit(tensor, stored[tensor.name]) for tensor in wanted.values()]
    if any(wrong):
        raise InputError(
            f"the tensors are not those of its config: {_listed([each for each in wrong if each])}",
            where=str(folder),
            hint=f"read are {', '.join(DTYPES.values())}, in the shapes that {CONFIG} gives",
        )
    return {name: stored[name] for name in wanted}


def _misfit(wanted: HfTensor, stored: StoredTensor) -> str | None:
    if stored.shape != wanted.shape:
        return f"`{stored.name}` is {list(stored.shape)}, not {list(wanted.shape)}"
    return None if stored.dtype in DTYPES else f"`{stored.name}` is {stored.dtype}"


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NoSuchName(
            f"there is no {path.name}", where=str(path.parent), hint="name a folder with a model"
        ) from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CorruptData("is not a JSON object", where=str(path), hint="fetch the file again")
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
