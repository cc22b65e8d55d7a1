"""Trainshed: one recipe carries a language model from raw text to a served model.

    import trainshed as ts

    recipe = ts.Recipe.load("quickstart").with_("train.optimizer.lr", 3e-4)
    run = ts.run(recipe)

What is exported here and by the packages `trainshed.recipe`, `trainshed.storage` and `trainshed.data` is public; a
test holds the list still. `docs/python.md` shows each name in use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainshed.errors import TrainshedError

if TYPE_CHECKING:
    from trainshed.api import Run, evaluate, load_model, open_run, plan, render, run, runs, submit, sweep, train, verify
    from trainshed.recipe import Cluster, Recipe

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Recipe",
    "Run",
    "TrainshedError",
    "__version__",
    "evaluate",
    "load_model",
    "open_run",
    "plan",
    "render",
    "run",
    "runs",
    "submit",
    "sweep",
    "train",
    "verify",
]

# Loaded when they are first used: `import trainshed` costs a few milliseconds.
_HOMES = {"Cluster": "trainshed.recipe", "Recipe": "trainshed.recipe"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trainshed' has no attribute '{name}'")
    if name == "plan":
        return import_module("trainshed.plan")  # the package can be called
    value = getattr(import_module(_HOMES.get(name, "trainshed.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
