"""What every test runs under, so that a busy machine fails none of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st


def test_no_example_has_a_deadline() -> None:
    @settings(max_examples=1)
    @given(st.none())
    def example(nothing: None) -> None:
        pass

    assert example._hypothesis_internal_use_settings.deadline is None  # type: ignore[attr-defined]
