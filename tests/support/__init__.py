"""What tests share: clusters, runs, models, recipes and servers, all small. `tests/README.md` says which is which."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
"""The folder of the tests; processes that they start find `support` in it."""
