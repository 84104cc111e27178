# syntax=docker/dockerfile:1
# All commands of jax-longctx, for a CPU or for NVIDIA GPUs:
#
#   docker build -t jax-longctx .
#   docker build -t jax-longctx:cuda --build-arg EXTRAS=cuda,convert,documents,serve .
#   docker run --rm --gpus all -v "$PWD:/data" jax-longctx:cuda ask book.txt "Who?" -c model
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD:/data" jax-longctx serve -c model --host 0.0.0.0 --no-key
#
# It runs as user 1000; `--user "$(id -u)" -e HOME=/tmp` writes to a folder of yours.
FROM python:3.12-slim-bookworm

ARG EXTRAS=convert,documents,serve
# The build writes beside the sources; what it writes is dropped.
RUN --mount=type=bind,target=/source,rw \
    pip install --no-cache-dir --constraint /source/constraints.txt "/source[${EXTRAS}]" \
    && useradd --create-home --uid 1000 longctx

USER 1000
WORKDIR /data
ENTRYPOINT ["jax-longctx"]
CMD ["--help"]
