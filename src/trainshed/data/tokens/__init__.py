"""Token files: the .bin/.idx format, writing shards that survive being killed, manifests, merging, proofs."""
