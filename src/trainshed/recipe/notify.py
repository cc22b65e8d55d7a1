"""`notify`: who is told what happens to a run, in the recipe or in the cluster file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, Tag

from trainshed.recipe.secret_detection import secret_shape
from trainshed.recipe.section import (
    URL_PATTERN,
    VARIABLE_PATTERN,
    Fraction,
    PositiveFloat,
    Problem,
    Section,
    Text,
    as_list,
    by_shape,
)
from trainshed.redaction import credentials_in

NotificationKind = Literal["start", "first_step", "stall", "alarm", "failure", "restart", "low_goodput", "end"]
NOTIFICATION_KINDS: tuple[NotificationKind, ...] = get_args(NotificationKind)
DEFAULT_KINDS = tuple(kind for kind in NOTIFICATION_KINDS if kind != "first_step")


class WebhookSecret(Section):
    """A webhook whose address is a secret."""

    secret: Annotated[str, Field(pattern=VARIABLE_PATTERN)] = Field(
        description="Name of the secret that holds the address: below the cluster's `secrets`, on `local` a variable "
        "of the environment",
        examples=["SLACK_WEBHOOK"],
    )


class Notification(Section):
    """One who is told: a command, which reads the message as JSON from its input, or a webhook, which is sent it."""

    command: Annotated[tuple[Text, ...], Field(strict=False, min_length=1), BeforeValidator(as_list)] | None = Field(
        None,
        description="Program and arguments, started where the run is led; the message is JSON on its standard input",
        examples=[["/shared/bin/page-me", "--team", "training"]],
    )
    webhook: (
        Annotated[
            Annotated[Annotated[str, Field(pattern=URL_PATTERN)], Tag("(text)")]
            | Annotated[WebhookSecret, Tag("(a mapping)")],
            by_shape,
        ]
        | None
    ) = Field(
        None,
        description="Address that takes Slack's JSON: `{secret: NAME}`, or a URL that anybody may know",
        examples=["{secret: SLACK_WEBHOOK}"],
    )
    on: Annotated[tuple[NotificationKind, ...], Field(strict=False, min_length=1), BeforeValidator(as_list)] | None = (
        Field(
            None,
            description="What it is told of: start, first_step, stall, alarm, failure, restart, low_goodput, end; "
            "left out: all but first_step",
            examples=[["failure", "end"]],
        )
    )
    every_minutes: PositiveFloat = Field(
        10.0, description="It is told the same kind at most so often; what is left out is counted in the next message"
    )
    low_goodput: Fraction = Field(
        0.5, description="low_goodput: the share of the last hour spent in steps that count is below this"
    )

    @property
    def kinds(self) -> tuple[NotificationKind, ...]:
        """What it is told of."""
        return self.on if self.on is not None else DEFAULT_KINDS

    def problems(self) -> Iterator[Problem]:
        """One way to tell; no secret in an address."""
        if (self.command is None) == (self.webhook is None):
            yield Problem((), "needs exactly one of command and webhook", "write {webhook: {secret: SLACK_WEBHOOK}}")
        if self.low_goodput != type(self).model_fields["low_goodput"].default and "low_goodput" not in self.kinds:
            yield Problem(("low_goodput",), "is not told of (`on`)", "write low_goodput in `on`, or delete it")
        if isinstance(self.webhook, str):
            what = credentials_in(self.webhook) or secret_shape(self.webhook)
            if what is not None:
                yield Problem(
                    ("webhook",),
                    f"holds {what}, and a recipe is kept with every run",
                    "write {secret: NAME}, and NAME below the cluster's `secrets`",
                )


Notifications = Annotated[tuple[Notification, ...], Field(strict=False)]
