"""What the artefacts of a recipe are found by: a change here makes everything again that people have prepared."""

from __future__ import annotations

from trainshed.data.artefacts import _input_identity
from trainshed.data.text.formats import TextFileFormat
from trainshed.data.text.reader import InputSlice


def test_the_identity_of_an_input_is_frozen() -> None:
    whole = InputSlice("s3://bucket/a.jsonl.gz", 10, "v1", TextFileFormat("jsonl", "gz"))
    assert _input_identity(whole) == {
        "address": "s3://bucket/a.jsonl.gz",
        "size": 10,
        "version": "v1",
        "format": {"kind": "jsonl", "compression": "gz"},
        "key": "text",
        "documents": "file",
        "start": 0,
        "end": None,
    }
    signed = InputSlice("https://host/a.txt?file=a", 1, "", TextFileFormat("text"), "body", "line", 5, 9)
    assert _input_identity(signed) == {
        "address": "https://host/a.txt?…",
        "size": 1,
        "version": "",
        "format": {"kind": "text", "compression": None},
        "key": "body",
        "documents": "line",
        "start": 5,
        "end": 9,
        "query": "35610df7c4ccc7ec",
    }
