"""Files of records that a line of dashes ends, as `format: records` of a source."""

from trainshed.data.text.document_reader import TEXT_FORMATS, DocumentReader


@TEXT_FORMATS.register("records")
class RecordReader(DocumentReader):
    """Each record is one document."""

    def documents(self, file):
        """Yield the text of each record."""
        lines = []
        for line in file:
            if line.rstrip() == b"---":
                yield b"".join(lines).decode()
                lines = []
            else:
                lines.append(line)
        if lines:
            yield b"".join(lines).decode()
