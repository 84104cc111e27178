"""Continued pretraining: whole-model training at long context on top of `jax_longctx`."""
