"""What the stages on CPUs leave for an engine that is not ours, under fixed names in the run's folder.

`engines/foreign.py` says which names (`Wanted`); nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson

from trainshed.checkpoints.base import BaseWeights
from trainshed.checkpoints.formats import Target, detect
from trainshed.data.artefacts import PreparedSource
from trainshed.data.encode.tokenizer import TOKENIZER_FILES, Tokenizer
from trainshed.errors import NotFound, TrainshedError
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore, StoreOptions, copy_tree, open_folder, parse
from trainshed.workflow.prepare import PreparedRun

ENGINE = "engine"
# What engines look for beside a tokenizer's own files: sentencepiece's, Meta's, chat templates.
_COMPANIONS = (*TOKENIZER_FILES, "tokenizer.model", "original/tokenizer.model", "chat_template.jinja")


def leave_base(base: BaseWeights, run: Path, wanted: Sequence[str], reporter: Reporter = SILENT) -> None:
    """Leave the base weights in the format that is wanted, proven; those that have it already are linked."""
    target = run / ENGINE / "base"
    if "base-hf" in wanted and detect(str(base.files)) == "hf":
        _link(target, base.files)
        return
    from trainshed.checkpoints.converting.convert import convert

    to = Target("megatron", "torch_dist") if "base-megatron" in wanted else Target("hf")
    made = convert(str(base.files), str(target), to, reporter=reporter)
    refuse_unproven(made.verdict.passed, made.target)


def leave_data(run: PreparedRun, options: StoreOptions | None = None, reporter: Reporter = SILENT) -> None:
    """Leave where the tokens of each split lie: for Megatron as JSON, for NeMo as one value of Hydra's."""
    folder = run.folder / ENGINE
    train = [word for source in run.sources for word in _weighted(source, folder, options, reporter)]
    own = run.data.validation
    store = LocalStore(folder)
    if own is None:
        # One corpus that the engine itself shares out, or training alone.
        store.put("data.json", _json({"train": train, "valid": train, "test": train}))
        store.put("data_prefix.txt", f"[{_words(train)}]".encode())
        return
    validation = _weighted(own, folder, options, reporter)
    store.put("data.json", _json({"train": train, "valid": validation, "test": validation}))
    named = {"train": train, "validation": validation, "test": validation}
    store.put(
        "data_prefix.txt", ("{" + ",".join(f"{key}:[{_words(words)}]" for key, words in named.items()) + "}").encode()
    )


def leave_tokenizer(tokenizer: Tokenizer, run: Path, options: StoreOptions | None = None) -> None:
    """Leave the tokenizer's files, with those beside them that other engines read."""
    store = LocalStore(run / ENGINE / "tokenizer")
    place = parse(tokenizer.address)
    if place.scheme not in ("http", "https") and not tokenizer.address.endswith(".json"):
        there = open_folder(tokenizer.address, options)
        for name in _COMPANIONS:
            try:
                store.put(name, there.read(name))
            except NotFound:
                continue
    # Without a class transformers would look for a model's config beside it.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokenizer.config
    store.put("tokenizer.json", tokenizer.json)
    store.put("tokenizer_config.json", _json(config))


def refuse_unproven(passed: bool, target: str) -> None:
    """Raise where converted weights are not those they were made from."""
    if not passed:
        raise TrainshedError(
            "the converted weights are not those they were made from",
            where=target,
            hint="verdict.json beside them says which tensors differ",
        )


def _weighted(source: PreparedSource, folder: Path, options: StoreOptions | None, reporter: Reporter) -> list[str]:
    """A source's token files, each with its share before it; files in a bucket are fetched: other engines map them."""
    share = (source.weight or 1.0) / len(source.prefixes)
    words = []
    for number, prefix in enumerate(source.prefixes):
        if parse(prefix).scheme != "file":
            prefix = _fetched(prefix, folder / "tokens" / f"{source.label}-{number:05d}", options, reporter)
        words += [repr(share), prefix]
    return words


def _fetched(prefix: str, target: Path, options: StoreOptions | None, reporter: Reporter) -> str:
    parent, _, name = prefix.rpartition("/")
    include = (f"{name}.bin", f"{name}.idx")
    copy_tree(parent, str(target), include=include, options=options, reporter=reporter)
    return str(target / name)


def _link(link: Path, target: Path) -> None:
    """A link that is there or not, whenever somebody looks."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target.absolute())
    new.replace(link)


def _json(body: object) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n"


def _words(words: Sequence[str]) -> str:
    """Words of a list in Hydra's grammar: quoted, so that no path can end it."""

    def quoted(word: str) -> str:
        escaped = word.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    return ",".join(map(quoted, words))
