"""Our own checkpoints: PyTorch's DCP format on any store, committed by a manifest, fenced by attempt.

`folder.py` (what is there), `resuming.py`, `retention.py` and `pieces_file.py` need no torch; `writer.py` and
`loading.py` do.
"""
