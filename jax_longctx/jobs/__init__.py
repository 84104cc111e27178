"""Runs that go on after an interruption or a kill at any moment, in one process or in many.

A run yields pieces of work and gets their results; each result is in a journal on the disk before
the next piece begins. `batch`, `eval run`, `eval perplexity` and `eval agreement` are such runs.
"""
