"""Find the adapter at an address and the base that it belongs to: PEFT's folder, a LoRA run, one of its checkpoints."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from trainshed.checkpoints.added_rows import GrownWeights
from trainshed.checkpoints.hf.companion_files import COMPANION_FILES
from trainshed.checkpoints.lora.adapter import LoraAdapter
from trainshed.checkpoints.lora.checkpoint_spec import AdapterSpec, find_adapter_checkpoint, prepared_base
from trainshed.checkpoints.lora.native_adapter import NativeAdapter
from trainshed.checkpoints.lora.peft_adapter import PeftAdapter
from trainshed.checkpoints.lora.peft_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraAdapterConfig
from trainshed.checkpoints.native.folder import read_checkpoint_config
from trainshed.checkpoints.weights import Weights
from trainshed.errors import InputError, NoSuchName
from trainshed.models.parameters import AddedRows
from trainshed.recipe import ModelConfig
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import StoreOptions, copy_tree, join, open_folder, open_store, parse


def is_adapter(address: str, options: StoreOptions | None = None) -> bool:
    """Whether there is an adapter at an address, in PEFT's format or in ours."""
    if open_folder(address, options).head(ADAPTER_CONFIG) is not None:
        return True
    return find_adapter_checkpoint(address, options) is not None


def open_adapter(
    address: str,
    config: ModelConfig,
    *,
    downloads: Path | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> LoraAdapter:
    """Open the adapter at an address, for a base of this architecture; PEFT's are fetched below `downloads` first."""
    checkpoint = None
    if open_folder(address, options).head(ADAPTER_CONFIG) is None:
        checkpoint = find_adapter_checkpoint(address, options)
        if checkpoint is None:
            raise NoSuchName(
                f"there is no adapter: neither {ADAPTER_CONFIG} nor a checkpoint of a LoRA run",
                where=address,
                hint="name a folder that PEFT saved, or a run with `train.lora`",
            )
        return NativeAdapter(open_store(address, options)[0], checkpoint)
    return PeftAdapter(local_adapter(address, downloads, options, reporter), config)


def with_rows_of(
    address: str,
    base: Weights,
    *,
    downloads: Path | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> Weights:
    """Return a base with rows for the tokens that an adapter adds to it; the base itself where it has them."""
    rows = base.config.vocab_size
    if open_folder(address, options).head(ADAPTER_CONFIG) is None:
        checkpoint = find_adapter_checkpoint(address, options)
        if checkpoint is None:
            return base  # no adapter at all: `open_adapter` says so
        added = AdapterSpec.read(checkpoint.manifest.spec, address).added
        return base if added is None or added.stop <= rows else GrownWeights(base, added)
    tokens = LoraAdapterConfig.read(local_adapter(address, downloads, options, reporter)).trained_tokens
    beyond = [id for ids in tokens.values() for id in ids if id >= rows]
    # All of these rows are the adapter's own: with what they begin does not matter.
    return GrownWeights(base, AddedRows(rows, max(beyond) + 1 - rows, rows)) if beyond else base


def local_adapter(
    address: str, downloads: Path | None, options: StoreOptions | None = None, reporter: Reporter = SILENT
) -> Path:
    """Return PEFT's folder on this disk; one in another store is fetched below `downloads`, with its tokenizer."""
    parsed = parse(address)
    if parsed.scheme == "file":
        return Path(str(parsed))
    store, path = open_store(address, options)
    pinned = join(store.url, path)
    root = downloads or Path(tempfile.gettempdir()) / "trainshed-adapters"
    folder = root / hashlib.sha256(pinned.encode()).hexdigest()[:16]
    include = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *(name for name in COMPANION_FILES if name != "config.json"))
    copy_tree(pinned, str(folder), include=include, options=options, reporter=reporter)
    return folder


def adapter_base(
    address: str, *, downloads: Path | None = None, options: StoreOptions | None = None, reporter: Reporter = SILENT
) -> str:
    """Return the address of an adapter's base, and report it.

    It is the artefact that its run was prepared with, as far as it is here; otherwise what the adapter says: our
    checkpoints hold an address, PEFT's folders a path or a name on the Hub.
    """
    checkpoint = None
    if open_folder(address, options).head(ADAPTER_CONFIG) is None:
        checkpoint = find_adapter_checkpoint(address, options)
    if checkpoint is not None:
        store, _ = open_store(address, options)
        where = join(store.url, checkpoint.path)
        spec = AdapterSpec.read(checkpoint.manifest.spec, where)
        prepared, named = prepared_base(where, spec.base_sha256), spec.base_address
    else:
        folder, prepared = local_adapter(address, downloads, options, reporter), prepared_base(address)
        if prepared is not None and LoraAdapterConfig.read(folder).base is None:  # torchtune's do not say it
            reporter.note(f"the base of the adapter is that of its run, {prepared}")
            return str(prepared)
        named = _named_base(LoraAdapterConfig.read(folder), folder)
    base = named if prepared is None else str(prepared)
    reporter.note(f"the adapter says that its base is {named}" + (f", found at {base}" if base != named else ""))
    return base


def trained_config(address: str, options: StoreOptions | None = None) -> ModelConfig | None:
    """Return the architecture that an adapter of ours was trained on; PEFT's folders do not hold it.

    It has the rows of the base: those of added tokens are not among them.
    """
    checkpoint = find_adapter_checkpoint(address, options)
    if checkpoint is None:
        return None
    config = read_checkpoint_config(open_store(address, options)[0], checkpoint)
    added = AdapterSpec.read(checkpoint.manifest.spec, address).added
    return config if added is None else added.of_base(config)


def _named_base(config: LoraAdapterConfig, folder: Path) -> str:
    if not config.base:
        raise InputError("the adapter does not say what it was trained on", where=str(folder), hint="write --base")
    if "://" in config.base or Path(config.base).expanduser().is_dir():
        return config.base
    if config.base.startswith(("/", ".", "~")):
        raise NoSuchName(
            f"the adapter says that its base is {config.base}, and there is no such folder",
            where=str(folder),
            hint="write --base",
        )
    return f"hf://{config.base}" + (f"@{config.revision}" if config.revision else "")
