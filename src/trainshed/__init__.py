"""Trainshed: one recipe carries a language model from raw text to a served model.

What is exported here and by the packages `trainshed.recipe`, `trainshed.storage` and `trainshed.data` is public; a
test holds the list still.
"""

from trainshed.errors import TrainshedError

__version__ = "0.1.0"

__all__ = ["TrainshedError", "__version__"]
