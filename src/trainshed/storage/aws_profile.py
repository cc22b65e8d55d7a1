"""Credentials and region from `~/.aws`, because obstore reads the environment and instance roles only."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainshed.errors import AccessDenied

_INSTEAD = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
# Ways to get keys that need a conversation with AWS or another program.
_INDIRECT = (
    "role_arn",
    "sso_session",
    "sso_account_id",
    "credential_process",
    "source_profile",
    "login_session",
)


@dataclass(frozen=True)
class Profile:
    """What one profile says; `repr` shows no key."""

    region: str | None = None
    endpoint: str | None = None
    keys: dict[str, str] | None = field(default=None, repr=False)
    provider: Any = field(default=None, repr=False)


def read_profile(environ: Mapping[str, str]) -> Profile | None:
    """The profile that AWS_PROFILE names, else the default one where there is any."""
    named = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE")
    if not named and any(environ.get(name) for name in _INSTEAD):
        return None  # a pod's own identity comes before a file that happens to lie in the image
    name = named or "default"
    home = Path(environ.get("HOME", "~")).expanduser()
    credentials = _read(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials")
    config = _read(environ.get("AWS_CONFIG_FILE") or home / ".aws" / "config")
    section = "default" if name == "default" else f"profile {name}"
    values = {**(dict(config[section]) if section in config else {})}
    values |= dict(credentials[name]) if name in credentials else {}
    if not values:
        if named:
            raise AccessDenied(
                f"AWS_PROFILE names '{named}', which ~/.aws does not have",
                hint=f"run `aws configure --profile {named}`",
            )
        return None
    keys = None
    if values.get("aws_access_key_id") and values.get("aws_secret_access_key"):
        keys = {
            "access_key_id": values["aws_access_key_id"],
            "secret_access_key": values["aws_secret_access_key"],
        }
        if values.get("aws_session_token"):
            keys["session_token"] = values["aws_session_token"]
    provider = None
    if keys is None and any(values.get(key) for key in _INDIRECT):
        provider = _boto_provider(name, required=bool(named))
    return Profile(values.get("region"), values.get("endpoint_url"), keys, provider)


def _read(path: str | Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, default_section="", strict=False)
    try:
        parser.read(path)
    except configparser.Error:
        raise AccessDenied("not a readable AWS configuration", where=str(path), hint="run `aws configure`") from None
    return parser


def _boto_provider(name: str, *, required: bool) -> Any:
    try:
        import boto3  # type: ignore[import-not-found]
        from obstore.auth.boto3 import Boto3CredentialProvider  # type: ignore[import-not-found]
    except ImportError:
        if not required:
            return None
        raise AccessDenied(
            f"the AWS profile '{name}' takes its keys from a role, a single sign-on or a program",
            hint="pip install boto3, or run `aws configure export-credentials --format env`",
        ) from None
    return Boto3CredentialProvider(boto3.Session(profile_name=name))
