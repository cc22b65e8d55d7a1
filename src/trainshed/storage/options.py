"""What a person may say about a store beyond its address; a cluster file's `stores:` section is read into this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from trainshed.errors import InputError
from trainshed.storage.address import Address
from trainshed.storage.retry import Retry


@dataclass(frozen=True)
class Endpoint:
    """How to reach one kind of store or one bucket. Never holds a credential: those come from the environment."""

    endpoint: str | None = None
    region: str | None = None
    anonymous: bool = False
    addressing: str | None = None  # path | virtual; path where an endpoint is named, else the store's own habit

    def __post_init__(self) -> None:
        if self.addressing not in (None, "path", "virtual"):
            raise InputError(f"addressing '{self.addressing}'", hint="write addressing: path or addressing: virtual")
        if self.endpoint is not None and "@" in self.endpoint:
            raise InputError(
                "an endpoint with a user or password in it",
                hint="leave them out: credentials come from the environment",
            )
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise InputError(
                f"endpoint '{self.endpoint}' has no scheme",
                hint=f"write https://{self.endpoint} or http://{self.endpoint}",
            )


@dataclass(frozen=True)
class StoreOptions:
    """Endpoints by scheme (`s3`) or by root (`s3://bucket`), and how patient to be."""

    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    retry: Retry = field(default_factory=Retry)

    @classmethod
    def from_mapping(cls, stores: Mapping[str, Mapping[str, object]], *, where: str | None = None) -> StoreOptions:
        """Read `{s3: {endpoint: …}, "s3://bucket": {anonymous: true}}`."""
        known = {each.name for each in fields(Endpoint)}
        endpoints = {}
        for key, values in stores.items():
            unknown = sorted(set(values) - known)
            if unknown:
                raise InputError(
                    f"stores.{key} has an unknown key '{unknown[0]}'",
                    where=where,
                    hint="write one of " + ", ".join(sorted(known)),
                )
            endpoints[key.rstrip("/")] = Endpoint(**values)  # type: ignore[arg-type]
        return cls(endpoints)

    def endpoint_for(self, address: Address) -> Endpoint:
        """The entry for a bucket, else the one for its scheme, else an empty one."""
        return self.endpoints.get(address.url) or self.endpoints.get(address.scheme) or Endpoint()
