"""Token files: the .bin/.idx format, shards that survive a kill, manifests, verifying, merging."""
