"""The hot loops: one folder an operation, arrays in, arrays out.

    from pallas_kernels.decode_attention import decode_attention
    from pallas_kernels.prefill_attention import cache_attention, causal_attention
    from pallas_kernels.common import merge

Each folder holds `reference.py` (the definition), `xla.py` (memory-bounded, runs everywhere), the
platforms' own implementations, and `api.py`, which picks one. What XLA alone does (`page_scores`)
stands in `api.py`. Operations are imported from their
folders: a function of a folder's name here would hide the folder.
"""
