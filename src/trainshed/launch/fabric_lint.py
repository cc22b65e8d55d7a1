"""Variables of a job's environment that do not belong to its fabric, each with the reason.

They come along when a manifest is copied from one cloud to the next, and most of them fail in silence: NCCL falls back
to sockets, or to one algorithm for every message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

from trainshed.catalog.fabric_setups import Refusal, refused_variables
from trainshed.errors import InputError
from trainshed.launch.fabric import SINGLE_NODE, UNKNOWN, FabricSetup


def lint_environment(
    setup: FabricSetup, environment: Mapping[str, str], where: Callable[[str], str] | None = None
) -> list[str]:
    """Return what is odd in an environment; raise `InputError` for what never belongs there.

    `where` tells the place of a key of the cluster file (`cluster.where`); without it a variable is its own place.
    """
    found = misplaced(setup, environment)
    refused = [(name, rule) for name, rule in found if rule.severity == "refuse"]
    if refused:
        place = where or (lambda key: key.removeprefix("environment."))
        name, rule = refused[0]
        others = list(dict.fromkeys(f"{other}: {why.because}" for other, why in refused[1:] if other != name))
        hint = rule.instead or "leave it out"
        raise InputError(
            f"{name} does not belong here: {rule.because}",
            where=place(f"environment.{name}"),
            hint="\n".join([hint, *(f"nor does {other}" for other in others)]),
        )
    return [f"{name} is not needed: {rule.because}" for name, rule in found]


def misplaced(setup: FabricSetup, environment: Mapping[str, str]) -> list[tuple[str, Refusal]]:
    """Return every variable that does not belong, with the rule that says so."""
    return [
        (name, rule)
        for name, value in environment.items()
        for rule in _rules(setup, name)
        if rule.value is None or re.match(rule.value, value)
    ]


def _rules(setup: FabricSetup, name: str) -> Iterator[Refusal]:
    """Every rule about a variable, the fabric's own first."""
    tables = refused_variables()
    own = [rule for pattern, rule in setup.refused.items() if fnmatchcase(name, pattern)]
    yield from own
    if any(fnmatchcase(name, pattern) for pattern in setup.profile_sets):
        yield Refusal(because=f"{setup.profile_script} sets it, as the plugin's version needs it")
    yield from (rule for pattern, rule in tables.everywhere.items() if fnmatchcase(name, pattern))
    if own or setup.name in (SINGLE_NODE, UNKNOWN):
        return
    for pattern, owners in tables.families.items():
        if fnmatchcase(name, pattern) and setup.name not in owners:
            yield Refusal(because=f"it is a variable of {' and '.join(owners)}, and this fabric is {setup.fabric}")
