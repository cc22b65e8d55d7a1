"""One thing that was looked at, and what was found: what `preflight` and `doctor` are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CheckVerdict = Literal["pass", "warn", "fail", "skipped"]
_BY_WEIGHT: tuple[CheckVerdict, ...] = ("skipped", "pass", "warn", "fail")


@dataclass(frozen=True)
class Check:
    """What was looked at (`name`) and what was found (`what`), in one sentence; `hint` says what to do about it."""

    name: str
    verdict: CheckVerdict
    what: str
    hint: str | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Figures, for programs."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it, without what is empty."""
        plain: dict[str, Any] = {"name": self.name, "verdict": self.verdict, "what": self.what}
        return (
            plain
            | ({"hint": self.hint} if self.hint else {})
            | ({"measured": dict(self.measured)} if self.measured else {})
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Check:
        """Read it back."""
        return cls(plain["name"], plain["verdict"], plain["what"], plain.get("hint"), plain.get("measured", {}))


def worst(checks: Iterable[Check]) -> CheckVerdict:
    """Return the gravest verdict; nothing looked at is skipped."""
    return max((check.verdict for check in checks), key=_BY_WEIGHT.index, default="skipped")


def failures(checks: Iterable[Check]) -> list[Check]:
    """Return the checks that failed."""
    return [check for check in checks if check.verdict == "fail"]
