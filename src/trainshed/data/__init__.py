"""Text to tokens, and tokens to batches.

prepare.py     text to token files: plans the shards, skips what is proven, tokenizes the rest
  text/        files of any store to blocks of whole documents
  tokenize/    tokenizers, encoders, and the workers that turn blocks into token ids
  tokens/      the .bin/.idx files: writing, reading, manifests, verifying, merging
order.py       which tokens each step sees, and how that order is built from a recipe
  sampling/    its parts: permutation, blend, batch schedule, source index, sample sources
artefacts.py   everything that a recipe's data section names, made once and found by its hash
"""
