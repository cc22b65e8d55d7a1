"""Text to tokens, and tokens to batches.

prepare.py     text to token files: plans shards, skips what is proven, tokenises the rest
  text/        files to blocks of whole documents
  encode/      documents to ids
  workers/     the two above in parallel, in order
  tokens/      the .bin/.idx files: writing, reading, proving, merging
order.py       which tokens a step sees
  sampling/    its parts: permutation, blend, schedule, index, sources
artefacts.py   everything a recipe's data section names, made once and found by hash
"""
