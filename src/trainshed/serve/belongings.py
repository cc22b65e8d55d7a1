"""What belongs to weights: their words and their name, beside them or with the run that trained them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import orjson

from trainshed.checkpoints.converting.companions import has_tokenizer, read_companions
from trainshed.checkpoints.formats import Format
from trainshed.data.run_orders import PreparedData
from trainshed.data.tokens.manifest import read_token_manifest
from trainshed.recipe import Recipe, load_recipe
from trainshed.serve.words import Words
from trainshed.storage import StoreOptions, parse

_RECIPE, _PREPARED = "recipe.yaml", "prepared.json"


def words_of(
    address: str, format: Format, *, tokenizer: str | None = None, options: StoreOptions | None = None
) -> Words | None:
    """Return the words of weights: of the tokenizer that is named, else the one beside them, else their run's."""
    if tokenizer is not None:
        return _words(tokenizer, "hf", options, must=True)
    for home in _homes(address):
        found = _words(home, format, options)
        if found is not None:
            return found
    run = _run_of(address)
    tokenizer = None if run is None else _tokenizer_of_run(run)
    return None if tokenizer is None else _words(tokenizer, "hf", options)


def name_of(address: str) -> str:
    """Return what weights are called: as the run that trained them, else as the folder they lie in."""
    run = _run_of(address)
    if run is not None:
        return load_recipe(str(run / _RECIPE)).name
    return parse(address).path.rstrip("/").rpartition("/")[2] or address


def _words(address: str, format: str, options: StoreOptions | None, *, must: bool = False) -> Words | None:
    """The words in a folder; a lone tokenizer.json is in one, too."""
    if address.endswith("tokenizer.json"):
        address = address.removesuffix("tokenizer.json").rstrip("/") or "."
    files = read_companions(address, format, tokenizer=address if must else None, options=options)
    return Words(address, files) if has_tokenizer(files) else None


def _homes(address: str) -> Iterator[str]:
    """Where what goes with weights may lie: one step of a checkpoint shares it with the others."""
    yield address
    if parse(address).scheme == "file":
        folder = Path(os.path.abspath(str(parse(address))))
        if folder.name.startswith("step-"):
            yield from (str(each) for each in folder.parents[1:2])
        elif folder.name == "release" or folder.name.startswith("iter_"):
            yield str(folder.parent)


def _run_of(address: str) -> Path | None:
    """The folder of the run that weights belong to: its own, or one that they (an export, a checkpoint) lie in."""
    if parse(address).scheme != "file":
        return None
    folder = Path(os.path.abspath(str(parse(address))))
    return next((each for each in (folder, *folder.parents[:2]) if (each / _RECIPE).is_file()), None)


def _tokenizer_of_run(run: Path) -> str | None:
    """Where the tokenizer of a run is: where its recipe says, or where its tokens say that it was learned."""
    recipe: Recipe = load_recipe(str(run / _RECIPE))
    if isinstance(recipe.tokenizer, str):
        return recipe.tokenizer
    if not (run / _PREPARED).is_file():
        return None
    data = PreparedData.from_plain(orjson.loads((run / _PREPARED).read_bytes())["data"])
    for prefix in (prefix for source in data.sources for prefix in source.prefixes):
        manifest = read_token_manifest(_here(prefix, run))
        if manifest is not None:
            return _here(manifest.tokenizer, run)
    return None


def _here(path: str, run: Path) -> str:
    """A path of an artefact, which a run may have written as seen from where it was started."""
    if parse(path).scheme != "file" or Path(path).is_absolute() or "artefacts" not in Path(path).parts:
        return path
    parts = Path(path).parts
    return str(run.parents[2].joinpath(*parts[len(parts) - 1 - parts[::-1].index("artefacts") :]))
