"""The lines of a log that grows while it is read."""

from __future__ import annotations

from trainshed.launch.attempt import growing_lines


def test_lines_are_whole_and_what_was_written_before_the_end_is_read() -> None:
    log, later = bytearray(b"first\nsec"), [b"ond\nthird\n", b"no line break"]

    def grows() -> bool:
        if not later:
            return False
        log.extend(later.pop(0))
        return bool(later)

    assert list(growing_lines(lambda offset: bytes(log[offset:]), grows, 0.0)) == [
        "first\n",
        "second\n",
        "third\n",
        "no line break",
    ]
