"""The server behind `jax-longctx serve`: OpenAI's HTTP interface over contexts that stay read.

`schema` checks requests and builds answers, `app` holds the routes, `scheduler` the thread that
owns the engine, `executor` what that thread makes the engine do, `contexts` the texts that were
read, `metrics` the figures for Prometheus, `server` the process.
"""
