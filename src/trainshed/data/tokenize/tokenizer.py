"""A tokenizer as files: load one from a folder, a store or the Hub, or train a byte-level BPE on a corpus.

This module holds everything that must be known about a tokenizer before a document is read: its vocabulary size, its
special tokens and its hash. `encoders.py` encodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from trainshed.data.text.reader import InputReader, InputSlice, OnBadLine, extract_documents
from trainshed.errors import InputError, MissingExtra, TokenizerError
from trainshed.reporting import SILENT, ProgressTask, Reporter
from trainshed.storage import open_store

if TYPE_CHECKING:
    import tokenizers

    from trainshed.storage import StoreOptions


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
"""What is read of a tokenizer folder; the hash of a tokenizer covers those that exist."""

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
"""Where a chat template may be besides tokenizer_config.json. Text becomes the same tokens with any: not hashed."""

SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

COMMON_EOD = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot|>")
"""End-of-document names that GPT-2/Qwen, Llama 3, Llama 2/Mistral, Gemma and others use, for a bare tokenizer.json."""


@dataclass(frozen=True)
class SpecialToken:
    """A token by name and id."""

    text: str
    id: int


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as its files."""

    address: str
    json: bytes = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    sha256: str
    chat_templates: dict[str, str] = field(default_factory=dict, repr=False)
    """Its chat templates by name: `default`, and `tool_use` where it has one for conversations with tools."""

    @property
    def special_texts(self) -> dict[str, str]:
        """The special tokens that its configuration names, as chat templates get them."""
        named = {role: self.config.get(role) for role in SPECIAL_TOKEN_ROLES}
        texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in named.items()}
        return {role: text for role, text in texts.items() if isinstance(text, str)}

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object: the reference for every id."""
        return _backend_from_json(self.json, self.address)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included (what decides the dtype of token files)."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self.backend.decode(ids, skip_special_tokens=False)

    def token(self, text: str) -> SpecialToken | None:
        """Look a token up by its exact text."""
        token_id = self.backend.token_to_id(text)
        return None if token_id is None else SpecialToken(text, token_id)

    def end_of_document(self, requested: str | None = None) -> SpecialToken:
        """Find the token that ends a document: `requested`, the tokenizer's `eos_token`, or a well-known name."""
        return self._special(
            "eos_token", requested, COMMON_EOD, flag="--eod", without="--no-eod (documents then run together)"
        )

    def beginning_of_document(self) -> SpecialToken:
        """Find the token that starts a document (`bos_token`)."""
        return self._special("bos_token", None, ("<|begin_of_text|>", "<s>", "<bos>"), flag="--bos", without="no --bos")

    def _special(
        self, role: str, requested: str | None, common: tuple[str, ...], *, flag: str, without: str
    ) -> SpecialToken:
        if requested is not None:
            if token := self.token(requested):
                return token
            raise TokenizerError(
                f"{flag} asks for the token {requested!r}, which this tokenizer does not have",
                where=self.address,
                hint=f"its special tokens are: {', '.join(self.special_tokens) or 'none'}",
            )
        named = self.config.get(role)
        named = named.get("content") if isinstance(named, dict) else named
        if isinstance(named, str):
            if token := self.token(named):
                return token
            raise TokenizerError(
                f"its configuration names {named!r} as {role}, which is not in its vocabulary",
                where=self.address,
            )
        candidates = [token for text in common if (token := self.token(text))]
        if len(candidates) == 1:
            return candidates[0]
        usual = f"several could be it ({', '.join(t.text for t in candidates)})" if candidates else "none is there"
        raise TokenizerError(
            f"this tokenizer names no {role}, and of the usual tokens {usual}",
            where=self.address,
            hint=f"write {flag} TOKEN with one of its special tokens "
            f"({', '.join(self.special_tokens) or 'it has none'}), or {without}",
        )

    @cached_property
    def special_tokens(self) -> list[str]:
        """The texts of its special tokens, by id."""
        added = self.backend.get_added_tokens_decoder()
        return [added[i].content for i in sorted(added) if added[i].special]


def load_tokenizer(address: str, options: StoreOptions | None = None) -> Tokenizer:
    """Read a tokenizer from a folder, a `tokenizer.json`, any store, or the Hub (`org/name` or `hf://org/name`)."""
    address = _with_hub_scheme(address)
    files = _read_files(address, options)
    if not files:
        raise TokenizerError(
            "there is no tokenizer here",
            where=address,
            hint=f"a tokenizer is a tokenizer.json, or a folder with one of: {', '.join(TOKENIZER_FILES)}",
        )
    return tokenizer_from_files(address, files)


def _with_hub_scheme(address: str) -> str:
    """Take `org/name` for an address on the Hub, unless such a path exists here."""
    looks_like_hub = address.count("/") == 1 and "://" not in address and not address.startswith((".", "/", "~"))
    if looks_like_hub and not Path(address).exists() and not address.endswith(".json"):
        return f"hf://{address}"
    return address


def _read_files(address: str, options: StoreOptions | None) -> dict[str, bytes]:
    if address.endswith(".json"):
        store, path = open_store(address, options)
        return {"tokenizer.json": store.read(path)} if store.head(path) else {}
    store, path = open_store(address, options)
    folder = f"{path.rstrip('/')}/" if path else ""
    files: dict[str, bytes] = {}
    for name in (*TOKENIZER_FILES, *TEMPLATE_FILES):
        if store.head(folder + name):
            files[name] = store.read(folder + name)
    if "tokenizer.json" not in files and not {"vocab.json", "merges.txt"} <= files.keys():
        if store.head(f"{folder}tokenizer.model"):
            raise TokenizerError(
                "this is a sentencepiece model (tokenizer.model) without a tokenizer.json",
                where=address,
                hint="convert it once: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            )
        return {}
    return files


def tokenizer_from_files(address: str, files: dict[str, bytes]) -> Tokenizer:
    """Make a tokenizer from the contents of its files."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name in files:
            try:
                config |= {k: v for k, v in orjson.loads(files[name]).items() if v is not None}
            except (orjson.JSONDecodeError, AttributeError) as error:
                raise TokenizerError(f"{name} is not a JSON object: {error}", where=address) from None
    data = files.get("tokenizer.json")
    if data is None:
        _check_gpt2_files(config, address)
        data = _byte_level_bpe(files["vocab.json"], files["merges.txt"], address)
    digest = hashlib.sha256()
    for name in sorted(files.keys() & set(TOKENIZER_FILES)):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return Tokenizer(
        address=address,
        json=data,
        config=config,
        sha256=f"sha256:{digest.hexdigest()}",
        chat_templates=_chat_templates(address, files, config),
    )


def _chat_templates(address: str, files: dict[str, bytes], config: dict[str, Any]) -> dict[str, str]:
    """Find the chat templates: a file of its own, or in the configuration, where there may be several by name."""
    if "chat_template.jinja" in files:
        try:
            return {"default": files["chat_template.jinja"].decode()}
        except UnicodeDecodeError:
            raise TokenizerError("chat_template.jinja is not UTF-8", where=address) from None
    template = config.get("chat_template")
    if template is None and "chat_template.json" in files:
        try:
            template = orjson.loads(files["chat_template.json"]).get("chat_template")
        except (orjson.JSONDecodeError, AttributeError) as error:
            raise TokenizerError(f"chat_template.json is not a JSON object: {error}", where=address) from None
    if isinstance(template, str):
        return {"default": template}
    named = template if isinstance(template, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in named
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }


_GPT2_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")
_GPT2_END = "<|endoftext|>"


def _check_gpt2_files(config: dict[str, Any], address: str) -> None:
    """Refuse vocab.json and merges.txt of another tokenizer than GPT-2's: they do not say how it cuts text."""
    decoder = config.get("added_tokens_decoder")
    added = [entry.get("content") for entry in decoder.values()] if isinstance(decoder, dict) else []
    others = [text for text in added if text != _GPT2_END]
    what = None
    if config.get("tokenizer_class") not in _GPT2_CLASSES:
        what = f"is a {config['tokenizer_class']}"
    elif config.get("add_prefix_space"):
        what = "adds a space before a text"
    elif others:
        what = f"has added tokens ({', '.join(map(str, others[:3]))}{', …' if len(others) > 3 else ''})"
    if what is not None:
        raise TokenizerError(
            f"there is no tokenizer.json, and this tokenizer {what}, which vocab.json and merges.txt do not say",
            where=address,
            hint="convert it once: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )


def _byte_level_bpe(vocab: bytes, merges: bytes, address: str) -> bytes:
    """Return GPT-2's two files (vocab.json, merges.txt) as a tokenizer.json."""
    tokenizers = _import_tokenizers()
    try:
        pairs = [
            (left, right)
            for line in merges.decode().splitlines()
            if line and not line.startswith("#version")
            for left, _, right in [line.partition(" ")]
        ]
        model = tokenizers.models.BPE(vocab=orjson.loads(vocab), merges=pairs)
    except Exception as error:  # the Rust side raises a bare Exception
        raise TokenizerError(f"vocab.json and merges.txt do not fit together: {error}", where=address) from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if _GPT2_END in tokenizer.get_vocab():
        tokenizer.add_special_tokens([_GPT2_END])
    return tokenizer.to_str().encode()


def _backend_from_json(data: bytes, address: str) -> tokenizers.Tokenizer:
    tokenizers = _import_tokenizers()
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the Rust side raises a bare Exception
        raise TokenizerError(f"its tokenizer.json cannot be read: {error}", where=address) from None
    # A tokenizer.json may contain truncation and padding; documents are never cut or padded.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _import_tokenizers(purpose: str = "reading a tokenizer") -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise MissingExtra.named("data", purpose) from None
    return tokenizers


TRAINING_TEXT_BYTES = 512 * 1024 * 1024
"""Enough text to train any vocabulary on; more costs hours and changes the merges little."""


def train_tokenizer(
    inputs: Sequence[InputSlice],
    *,
    vocab_size: int,
    min_frequency: int = 2,
    eod: str = "<|endoftext|>",
    on_bad_line: OnBadLine = "skip",
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, bytes]:
    """Train a tokenizer on the first TRAINING_TEXT_BYTES of a corpus; return the files of its folder."""
    tokenizers = _import_tokenizers("training a tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[eod],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    total = min(TRAINING_TEXT_BYTES, sum(item.read_bytes for item in inputs))
    with reporter.task("tokenizer", total=total, unit="B") as task:
        sample = _TrainingText(inputs, on_bad_line, options, task)
        tokenizer.train_from_iterator(sample.texts(), trainer)
    trained_size = tokenizer.get_vocab_size()
    if not sample.characters:
        raise InputError(
            "the training sources hold no text to learn a tokenizer from",
            where=inputs[0].address if inputs else None,
            hint="give the recipe text, or the address of a tokenizer",
        )
    if trained_size < vocab_size:
        raise InputError(
            f"the corpus gives a vocabulary of {trained_size:,} tokens, {vocab_size:,} are asked for",
            where="tokenizer.train.vocab_size",
            hint=f"write {trained_size} or less, or give it more text",
        )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod, "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": orjson.dumps(config, option=orjson.OPT_INDENT_2) + b"\n",
    }


class _TrainingText:
    """The first text of a corpus, and how much of it there was."""

    def __init__(
        self, inputs: Sequence[InputSlice], on_bad_line: OnBadLine, options: StoreOptions | None, task: ProgressTask
    ) -> None:
        self._inputs, self._on_bad_line, self._options, self._task = inputs, on_bad_line, options, task
        self.characters = 0

    def texts(self) -> Iterator[list[str]]:
        """Yield the documents of each block, up to TRAINING_TEXT_BYTES."""
        for item in self._inputs:
            for block in InputReader(item, *open_store(item.address, self._options)).blocks():
                documents, bad_lines = extract_documents(block, item.key)
                if bad_lines and self._on_bad_line == "stop":
                    raise bad_lines[0].to_error(item, bad_lines[0].number)
                yield documents
                self._task.advance(block.bytes_read)
                self.characters += sum(map(len, documents))
                if self.characters >= TRAINING_TEXT_BYTES:
                    return
