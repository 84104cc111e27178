"""The operations that long-context attention spends its time in; one folder each.

    from pallas_kernels.decode_attention import decode_attention
    from pallas_kernels.prefill_attention import cache_attention, causal_attention
    from pallas_kernels.common import merge

Each folder holds `reference.py` (the definition), `xla.py` (bounded memory, every platform), the
platforms' own kernels, and `api.py`, the public function, which picks one. An operation that has
no kernel is one module (`page_scores.py`). Operations are imported from their folders: a function
with the folder's name here would hide the folder.
"""
