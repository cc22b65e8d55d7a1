"""The rows of a batch: tokens, where their documents begin, and which tokens are learned.

`document_starts` is the one mechanism that keeps packed documents apart. With s = document_starts[r]: a query at column
q sees the keys k with s[q] <= k <= q, its position is q - s[q], and the label of column c, which is token c + 1, counts
only where s[c + 1] == s[c]. Padding at the end of a row is a document of its own.

Shapes: R rows, L sequence_length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IGNORED_LABEL = -100
"""The label of a column from which nothing is learned: PyTorch's `ignore_index`."""


@dataclass(frozen=True)
class SampleRows:
    """Rows of a batch.

    `tokens` is int32 [R, L + 1]. `document_starts` is int32 [R, L + 1]: the column at which the document of each column
    begins; None if documents are not kept apart. `learned` is bool [R, L + 1]: whether a token counts as a label; None
    if all do.
    """

    tokens: np.ndarray
    document_starts: np.ndarray | None = None
    learned: np.ndarray | None = None

    @classmethod
    def empty(cls, rows: int, sequence_length: int, *, document_starts: bool, learned: bool) -> SampleRows:
        """Make room for rows that are filled by `put`."""
        shape = (rows, sequence_length + 1)
        return cls(
            np.empty(shape, np.int32),
            np.empty(shape, np.int32) if document_starts else None,
            np.empty(shape, bool) if learned else None,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def put(self, places: np.ndarray, part: SampleRows) -> None:
        """Write the rows of `part` to these places."""
        for ours, theirs in zip(self.arrays(), part.arrays(), strict=True):
            ours[places] = theirs

    def arrays(self) -> list[np.ndarray]:
        """Return the arrays that there are, tokens first."""
        return [array for array in (self.tokens, self.document_starts, self.learned) if array is not None]

    def read_only(self) -> SampleRows:
        """Return these rows; from now on writing to them is an error."""
        for array in self.arrays():
            array.flags.writeable = False
        return self

    def labels(self) -> np.ndarray:
        """Return the label of each input column, `IGNORED_LABEL` where nothing is learned: int64 [R, L]."""
        labels = self.tokens[:, 1:].astype(np.int64)
        if self.document_starts is not None:
            labels[self.document_starts[:, 1:] != self.document_starts[:, :-1]] = IGNORED_LABEL
        if self.learned is not None:
            labels[~self.learned[:, 1:]] = IGNORED_LABEL
        return labels
