"""Servers that tests talk to: S3, a Hub, and ones that misbehave."""
