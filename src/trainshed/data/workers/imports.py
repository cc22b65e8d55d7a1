"""What the fork server imports once, so that every worker starts with it: the fast encoder and what it pulls in."""

from contextlib import suppress

import trainshed.data.workers.pool  # noqa: F401

with suppress(ImportError):
    import awkward  # noqa: F401 - gigatoken's result type, by far its slowest import
    import gigatoken  # noqa: F401
with suppress(ImportError):
    import tokenizers  # noqa: F401
