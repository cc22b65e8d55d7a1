"""Our own checkpoints: PyTorch's DCP format on any store, committed by a manifest, fenced by attempt.

`folder.py` (which checkpoints there are) and `index.py` (what is in one) need no torch; the others do.
"""
