"""Texts on which reimplementations of a tokenizer go wrong: they decide whether the fast encoder may be used."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import product
from typing import Any

from trainshed.data.encode.tokenizer import Tokenizer

ADDED_TOKENS = 64
"""How many added tokens are tried; a tokenizer with thousands has them in series that are all alike."""

YOUNG = "\u1c89\u0897\u1acf\u20c1\U0001fac8\U00011b60\U0001cc00\U0001e6ff\U000323b0"
"""Letters, marks, numbers and signs added in Unicode 15 to 17: tables of different years class them differently."""

TEXTS = (
    "",
    " ",
    "  leading and trailing  ",
    "a\nb\r\nc\td\u00a0e\u3000f\u2028g\u200bh\x0bi\x0cj\x85k\x1cl",
    "it's THEY'LL we've I'D you're O'Neil's 'tis it’s 'ſ",
    "1234567 3.14159 1e-10 0x1F 12,345,678 ½ ² Ⅻ ٣٤٥",
    "Straße naïve café cafe\u0301 Ångström A\u030angstro\u0308m ﬁne ﬃ İ K Å Ω 豈 각 \u1112\u1161\u11ab",
    "日本語のテキスト 한국어 텍스트 中文文本 ไทย العربية עברית हिन्दी",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \u0000\u0001\u001b[0m \ufffd \ufeff \ue000 \U0010ffff",
    "def f(x):\n    return  x**2\n\n\n\t\tif x:\n\t\t\tpass\n" + " " * 97 + "end",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\Temp\\file.txt",
    "=" * 300 + "\n" * 70 + "ab" * 500,
    "▁ ▁▁word Ġ Ċ Ã© <0x0A> </w> ## [UNK] <unk> <pad>",
    *(f"{c}'s x{c}.s 1{c}2 {c}{c}" for c in YOUNG),
)
"""Odd spaces, scripts, contractions, numbers, unnormalised letters, controls, long runs, other tokenizers' marks."""

AROUND = ("{}", "before {} after", "word{}word", "{}{}x", " \n {} \n x", "1{}2", "日{}本", "_{}_", ".{},")
"""What an added token may stand in: its flags decide whether it is one there, and what it swallows."""


def awkward_texts(tokenizer: Tokenizer) -> list[str]:
    """The texts above, and the tokenizer's own added tokens in every company."""
    texts = list(TEXTS)
    tokens = _telling(list(tokenizer.backend.get_added_tokens_decoder().values()))
    for token in tokens:
        spellings = dict.fromkeys((token, token[:-1], token[1:], token.upper(), token.lower(), *_normal_forms(token)))
        texts += [around.format(*[spelling] * 2) for spelling, around in product(spellings, AROUND)]
    texts += [overlap for one, other in product(tokens, tokens) for overlap in _overlaps(one, other)]
    return texts


def _telling(added: list[Any]) -> list[str]:
    """The added tokens to try: those with special flags first, then special ones, then some of the others."""

    def plainness(token: Any) -> tuple[bool, bool]:
        return (not (token.single_word or token.lstrip or token.rstrip or token.normalized), not token.special)

    ranked = sorted(added, key=plainness)
    kept, rest = ranked[: ADDED_TOKENS // 2], ranked[ADDED_TOKENS // 2 :]
    step = max(1, -(-len(rest) * 2 // ADDED_TOKENS))
    return [token.content for token in kept + rest[::step]]


def _normal_forms(text: str) -> Iterator[str]:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        yield unicodedata.normalize(form, text)


def _overlaps(one: str, other: str) -> Iterator[str]:
    """Texts in which two tokens claim the same characters, and those just short of it."""
    if one != other and one in other:
        yield from (other, other[:-1], other[1:], f"{other[:-1]}x", f"x{other[1:]}")
    for size in range(1, min(len(one), len(other))):
        if one.endswith(other[:size]):
            yield one + other[size:]
