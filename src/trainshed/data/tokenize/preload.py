"""Imported once by the fork server, so that every worker process starts with the encoders already loaded."""

from contextlib import suppress

import trainshed.data.tokenize.workers  # noqa: F401

with suppress(ImportError):
    import awkward  # noqa: F401 - gigatoken's result type, by far its slowest import
    import gigatoken  # noqa: F401
with suppress(ImportError):
    import tokenizers  # noqa: F401
