# Tekoa in a container. For CPUs:
#   docker build -t tekoa .
# For NVIDIA GPUs, with CUDA from JAX's own wheels (the host needs the driver only):
#   docker build -t tekoa:cuda --build-arg EXTRAS=cuda12 .
#   docker run --gpus=all -v "$PWD/runs:/data/runs" tekoa:cuda train mnist
FROM python:3.12-slim

# Extras of Tekoa to install, comma-separated: cuda12, tpu, wandb, mlflow, equinox, ...
ARG EXTRAS=tensorboard

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/tekoa
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN python -m pip install ".[${EXTRAS}]"

# Runs are written to the current directory; mount it to keep them.
RUN useradd --create-home user && mkdir /data && chown user /data
USER user
WORKDIR /data
ENTRYPOINT ["tekoa"]
CMD ["--help"]
