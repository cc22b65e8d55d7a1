"""How a bucket's client is configured: endpoint, region, credentials and retries.

Endpoints of S3 are looked for in this order: the options (a cluster file's `stores:`), AWS_ENDPOINT_URL_S3,
AWS_ENDPOINT_URL, BUCKET_STORAGE_HOST (with BUCKET_STORAGE_ACCESS_KEY and BUCKET_STORAGE_SECRET_KEY), the profile
of the AWS configuration, and at last AWS itself. obstore reads the environment and instance roles only, so
profiles in `~/.aws` are read here. Google and Azure follow obstore's own chain.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainshed.errors import AccessDenied
from trainshed.storage.address import Address
from trainshed.storage.store import Endpoint, Retry

_POD_IDENTITY_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
# Ways to get keys that need a conversation with AWS or another program.
_INDIRECT_KEYS = (
    "role_arn",
    "sso_session",
    "sso_account_id",
    "credential_process",
    "source_profile",
    "login_session",
)


@dataclass(frozen=True)
class AwsProfile:
    """What one profile says; `repr` shows no key."""

    region: str | None = None
    endpoint: str | None = None
    keys: dict[str, str] | None = field(default=None, repr=False)
    provider: Any = field(default=None, repr=False)


def read_aws_profile(environ: Mapping[str, str]) -> AwsProfile | None:
    """The profile that AWS_PROFILE names, else the default one where there is any."""
    named = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE")
    if not named and any(environ.get(name) for name in _POD_IDENTITY_VARIABLES):
        return None  # a pod's own identity comes before a file that happens to lie in the image
    name = named or "default"
    home = Path(environ.get("HOME", "~")).expanduser()
    credentials = _read_config_file(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials")
    config = _read_config_file(environ.get("AWS_CONFIG_FILE") or home / ".aws" / "config")
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
    if keys is None and any(values.get(key) for key in _INDIRECT_KEYS):
        provider = _boto_provider(name, required=bool(named))
    return AwsProfile(values.get("region"), values.get("endpoint_url"), keys, provider)


def _read_config_file(path: str | Path) -> configparser.ConfigParser:
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


# A slow answer may take as long as it takes; one that has stopped is noticed by the time between two bytes.
_REQUEST_TIMEOUT = timedelta(hours=2)
_INSTANCE_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def connect_bucket(address: Address, options: Endpoint, retry: Retry) -> Any:
    """Return the obstore client of a bucket; nothing is sent yet."""
    from obstore import store

    if address.scheme == "s3":
        config, provider = s3_config(address.root, options, os.environ)
        client = client_options(config.get("endpoint"), retry)
        return store.S3Store(
            address.root,
            config=config,
            client_options=client,
            retry_config=retry_config(retry),
            credential_provider=provider,
        )
    if address.scheme == "gs":
        config = gs_config(options, os.environ)
        client = client_options(config.get("base_url"), retry)
        return store.GCSStore(address.root, config=config, client_options=client, retry_config=retry_config(retry))
    account, container = address.root.split("/")
    config = az_config(account, options)
    client = client_options(config.get("endpoint"), retry)
    return store.AzureStore(container, config=config, client_options=client, retry_config=retry_config(retry))


def s3_config(bucket: str, options: Endpoint, environ: Mapping[str, str]) -> tuple[Any, Any]:
    """The S3 configuration and, for profiles that need one, a credential provider."""
    endpoint, keys = _s3_endpoint(options, environ)
    profile = read_aws_profile(environ) if keys is None and not options.anonymous else None
    endpoint = endpoint or (profile.endpoint if profile else None)
    config: dict[str, Any] = {"disable_bulk_delete": True}  # one path at a time is all we ask for
    region = options.region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    config["region"] = region or (profile.region if profile else None) or "us-east-1"
    if endpoint:
        virtual = options.addressing == "virtual"
        if virtual:
            parts = urlsplit(endpoint)
            endpoint = f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path}"
        # Both: obstore reads the variables itself, and AWS_ENDPOINT_URL_S3 would win over `endpoint`.
        config |= {
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,
            "virtual_hosted_style_request": virtual,
        }
    elif options.addressing is not None:
        config["virtual_hosted_style_request"] = options.addressing == "virtual"
    if options.anonymous:
        config["skip_signature"] = True
        return config, None
    keys = keys or (profile.keys if profile else None)
    if keys:
        config |= keys
    provider = profile.provider if profile and not keys else None
    if endpoint and not keys and provider is None and not _has_instance_credentials(environ):
        raise AccessDenied(
            "no credentials for this endpoint",
            where=endpoint,
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write stores: {s3: {anonymous: true}}",
        )
    return config, provider


def _s3_endpoint(options: Endpoint, environ: Mapping[str, str]) -> tuple[str | None, dict[str, str] | None]:
    """The endpoint and, when they belong to it, its keys."""
    host = environ.get("BUCKET_STORAGE_HOST")
    if host and "://" not in host:
        host = f"http://{host}"  # as MinIO's own client reads it inside a cluster
    chosen = options.endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or host
    keys = None
    access, secret = environ.get("BUCKET_STORAGE_ACCESS_KEY"), environ.get("BUCKET_STORAGE_SECRET_KEY")
    if host and chosen and access and secret and chosen.rstrip("/") == host.rstrip("/"):
        keys = {"access_key_id": access, "secret_access_key": secret}
    elif environ.get("AWS_ACCESS_KEY_ID") and environ.get("AWS_SECRET_ACCESS_KEY"):
        keys = {
            "access_key_id": environ["AWS_ACCESS_KEY_ID"],
            "secret_access_key": environ["AWS_SECRET_ACCESS_KEY"],
        }
        if environ.get("AWS_SESSION_TOKEN"):
            keys["session_token"] = environ["AWS_SESSION_TOKEN"]
    return (chosen.rstrip("/") if chosen else None), keys


def _has_instance_credentials(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in _INSTANCE_VARIABLES)


def gs_config(options: Endpoint, environ: Mapping[str, str]) -> Any:
    """The Google configuration; credentials are obstore's own chain (application default, workload identity)."""
    config: dict[str, Any] = {}
    endpoint = options.endpoint or environ.get("STORAGE_EMULATOR_HOST")
    if endpoint:
        config["base_url"] = endpoint.rstrip("/") if "://" in endpoint else f"http://{endpoint}"
    if options.anonymous:
        config["skip_signature"] = True
    return config


def az_config(account: str, options: Endpoint) -> Any:
    """The Azure configuration; credentials are obstore's own chain (key, SAS, workload or managed identity)."""
    config: dict[str, Any] = {"account_name": account}
    if options.endpoint:
        config["endpoint"] = options.endpoint.rstrip("/")
    if options.anonymous:
        config["skip_signature"] = True
    return config


def client_options(endpoint: str | None, retry: Retry) -> Any:
    """Timeouts; plain HTTP only where the endpoint itself says http."""
    return {
        "allow_http": bool(endpoint and endpoint.startswith("http://")),
        "timeout": _REQUEST_TIMEOUT,
        "read_timeout": timedelta(seconds=retry.answer_seconds),
        "connect_timeout": timedelta(seconds=retry.connect_seconds),
    }


def retry_config(retry: Retry) -> Any:
    """Our retry settings as obstore takes them."""
    return {
        "max_retries": retry.attempts - 1,
        # Signatures are not renewed while it retries, and are good for some minutes.
        "retry_timeout": timedelta(seconds=retry.silent_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=retry.first_seconds),
            "max_backoff": timedelta(seconds=retry.max_seconds),
            "base": 2,
        },
    }
