"""A tokenizer with further tokens (`model.added_tokens`): the same files, and one entry more for each token.

An added token is found in a text before anything else is, wherever it stands, and is never cut; of several at one place
the longest wins. It is not a special token: decoding keeps it, so that markers such as `<tool>` are part of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from trainshed.data.tokenize.tokenizer import TEMPLATE_FILES, TOKENIZER_FILES, Tokenizer, tokenizer_from_files
from trainshed.errors import NotFound, TokenizerError
from trainshed.recipe.section import Problem
from trainshed.storage import StoreOptions, open_folder

_GENERATION, _MODEL = "generation_config.json", "config.json"
REPLACED_FILES = (*TOKENIZER_FILES, *TEMPLATE_FILES, "tokenizer.model", "added_tokens.json")
"""The files of a tokenizer that are left out where there are those with added tokens: they do not know them."""
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def added_token_problems(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with texts as further tokens of a tokenizer, at the keys of a recipe."""
    for number, text in enumerate(texts):
        if (token := tokenizer.token(text)) is not None:
            yield Problem(
                ("model", "added_tokens", number),
                f"{text!r} is a token already (number {token.id} of {tokenizer.address})",
                "delete it: the tokenizer and the weights know it",
            )


def with_added_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with further tokens, in memory; they get the numbers after the last."""
    return tokenizer_from_files(tokenizer.address, added_token_files(tokenizer, texts))


def added_token_files(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, bytes]:
    """Return the files of a tokenizer with further tokens, by name."""
    first = tokenizer.vocab_size
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    entries = {first + number: {"content": text, **flags} for number, text in enumerate(texts)}
    body: dict[str, Any] = orjson.loads(tokenizer.json)
    body["added_tokens"] = [
        *(body.get("added_tokens") or ()),
        *({"id": id, **entry} for id, entry in entries.items()),
    ]
    # How a special token is matched is in tokenizer.json; here its text suffices.
    settings = tokenizer.config | tokenizer.special_texts
    if isinstance(known := settings.get("added_tokens_decoder"), dict):
        settings["added_tokens_decoder"] = {**known, **{str(id): entry for id, entry in entries.items()}}
    files = {"tokenizer.json": orjson.dumps(body)}
    template = tokenizer.chat_templates.get("default")
    if template is not None and not isinstance(settings.get("chat_template"), list):
        settings.pop("chat_template", None)
        files["chat_template.jinja"] = template.encode()
    files["tokenizer_config.json"] = orjson.dumps(settings, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"
    added = {text: first + number for number, text in enumerate(texts)}
    _check_ids(tokenizer, tokenizer_from_files(tokenizer.address, files), added)
    return files


def _check_ids(before: Tokenizer, after: Tokenizer, added: Mapping[str, int]) -> None:
    """Refuse tokens that do not become one number each, or that cut another token's text."""
    known = {text: token.id for text in before.special_tokens if (token := before.token(text)) is not None}
    kept = {text: id for text, id in known.items() if _ids(before, text) == [id]}
    for text, id in {**kept, **added}.items():
        if (ids := _ids(after, text)) != [id]:
            raise TokenizerError(
                f"with the added tokens {text!r} becomes {ids} and not [{id}]",
                where=before.address,
                hint="leave out the token that is a part of it; where there is none, this tokenizer takes no further "
                "tokens: add them with transformers (add_tokens, save_pretrained) and name that tokenizer",
            )


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def read_generation_config(address: str, options: StoreOptions | None = None) -> dict[str, bytes]:
    """Return the generation settings beside a tokenizer, with the numbers that start and end a text; none may be there.

    Where they are in the config of the model alone, they are taken from there: what is exported has another one.
    """
    if address.endswith(".json"):
        return {}
    folder = open_folder(address, options)
    settings, model = _read_json(folder.read, _GENERATION), _read_json(folder.read, _MODEL)
    if not any(settings.get(key) is not None for key in _TOKEN_IDS):
        settings |= {key: model[key] for key in _TOKEN_IDS if model.get(key) is not None}
    return {_GENERATION: orjson.dumps(settings, option=orjson.OPT_INDENT_2) + b"\n"} if settings else {}


def _read_json(read: Callable[[str], bytes], name: str) -> dict[str, Any]:
    try:
        body = orjson.loads(read(name))
    except (NotFound, orjson.JSONDecodeError):
        return {}
    return body if isinstance(body, dict) else {}
