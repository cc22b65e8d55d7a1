"""Text to tokens, and tokens to batches.

corpus -> reading -> documents -> encoders      files to blocks to texts to ids (formats, parquet)
prepare -> workers, shard_writer                the whole of it, in parallel and safe to kill
indexed, index_file, shards, merge              the .bin/.idx format
token_manifest, verify, inspect                 proofs, and a look inside
permutation, blend, schedule, index, source     the order of samples, part by part
order, build_order                              which tokens a step sees
tokenizer, tokenizer_training, script,          what else a recipe's data section names
synthetic, artefacts
"""
