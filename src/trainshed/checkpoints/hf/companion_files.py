"""The files that accompany weights: tokenizer, chat template, generation settings, and the original config.json.

A folder for transformers has these beside its weights. Every other format that we write has them in `tokenizer/`, so
that a later export has what the first download had.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from trainshed.data.tokenize.tokenizer import TOKENIZER_FILES, tokenizer_from_files
from trainshed.errors import NotFound, TokenizerError, TrainshedError
from trainshed.storage import Store, StoreOptions, join, open_folder

COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_FILES,
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
COMPANIONS_FOLDER = "tokenizer"
"""The folder of these files in formats other than Hugging Face's."""
_SPECIAL_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_companions(
    address: str, format: str, *, tokenizer: str | None = None, options: StoreOptions | None = None
) -> dict[str, bytes]:
    """Return the companion files of weights by name; with `tokenizer` all but config.json come from that folder."""
    companions = _read_files(open_folder(address, options), "" if format == "hf" else f"{COMPANIONS_FOLDER}/")
    if tokenizer is None:
        return companions
    given = _read_files(open_folder(tokenizer, options), "")
    if not any(name in given for name in _TOKENIZERS):
        raise TokenizerError(
            "there is no tokenizer here", where=tokenizer, hint=f"name a folder with one of {', '.join(_TOKENIZERS)}"
        )
    kept = {name: data for name, data in companions.items() if name == "config.json"}
    ids = special_token_ids(given)
    if kept and ids:
        # Another tokenizer has other ids: these come from the tokenizer, the rest of config.json from the weights.
        kept["config.json"] = json.dumps(json.loads(kept["config.json"]) | ids).encode()
    return {name: data for name, data in given.items() if name != "config.json"} | kept


def with_chat_template(
    companions: Mapping[str, bytes], template: str | None, end_tokens: Collection[int] = ()
) -> dict[str, bytes]:
    """Return the files with the text of another chat template, and with the tokens that end its answers.

    No second template stays beside it: older programs would read that one. Tokens that ended a text before still do.
    """
    files = dict(companions)
    if template is not None:
        files.pop("chat_template.json", None)
        files["chat_template.jinja"] = template.encode()
        if "chat_template" in (settings := json.loads(files.get("tokenizer_config.json", b"{}"))):
            settings.pop("chat_template")
            files["tokenizer_config.json"] = json.dumps(settings, indent=2).encode() + b"\n"
    ids = special_token_ids(files)
    ends = ids.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    if further := sorted(set(end_tokens) - set(ends)):
        settings = ids | json.loads(files.get("generation_config.json", b"{}")) | {"eos_token_id": [*ends, *further]}
        files["generation_config.json"] = json.dumps(settings, indent=2).encode() + b"\n"
    return files


def has_tokenizer(companions: Mapping[str, bytes]) -> bool:
    """Whether a tokenizer is among them."""
    return any(name in companions for name in _TOKENIZERS)


def special_token_ids(companions: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the ids that start, end and pad a text, by their names in config.json; only those that are known."""
    for name in ("generation_config.json", "config.json"):
        try:
            body = json.loads(companions.get(name, b"{}"))
        except ValueError:
            continue
        if not isinstance(body, dict):
            continue
        ids = {key: body[key] for key in _SPECIAL_TOKEN_IDS if body.get(key) is not None}
        for key, value in ids.items():
            _check_token_ids(key, value, name)
        if ids:
            return ids
    files = {name: data for name, data in companions.items() if name in TOKENIZER_FILES}
    if "tokenizer.json" not in files:
        return {}
    tokenizer = tokenizer_from_files("tokenizer.json", files)
    ids = {}
    for role in ("bos_token", "eos_token", "pad_token"):
        named = tokenizer.config.get(role)
        text = named.get("content") if isinstance(named, dict) else named
        token = tokenizer.token(text) if isinstance(text, str) else None
        if token is not None:
            ids[f"{role}_id"] = token.id
    return ids


def _check_token_ids(key: str, value: Any, name: str) -> None:
    """Refuse ids that no token has: with them an answer would never end."""
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(type(id) is int for id in ids):
        raise TokenizerError(
            f"`{key}: {json.dumps(value)}` is not the id of a token",
            where=name,
            hint="write a whole number or a list of some, or null where there is no such token",
        )


def _read_files(store: Store, folder: str) -> dict[str, bytes]:
    files = {}
    for name in COMPANION_FILES:
        try:
            if store.head(folder + name) is not None:
                files[name] = store.read(folder + name)
        except NotFound as error:
            raise TrainshedError(
                f"{name} went away while it was read", where=join(store.url, folder), hint="run it again"
            ) from error
    return files
