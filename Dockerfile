# Tekoa in a container. For CPUs:
#   docker build -t tekoa .
#   mkdir -p runs
#   docker run --user "$(id -u):$(id -g)" -v "$PWD/runs:/data/runs" tekoa train mnist
# For NVIDIA GPUs, with CUDA from JAX's own wheels (the host needs the driver only):
#   docker build -t tekoa:cuda --build-arg EXTRAS=cuda12 .
#   docker run --gpus=all --user ...  as above
FROM python:3.12-slim

# Extras of Tekoa to install, comma-separated: cuda12, tpu, wandb, mlflow, equinox, ...
ARG EXTRAS=tensorboard

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/tekoa
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN python -m pip install ".[${EXTRAS}]"

# Runs are written to the current directory; mount it to keep them. Everyone may write here, so that
# `--user` can be the owner of what is mounted.
RUN useradd --create-home user && chmod 777 /home/user && mkdir -m 777 /data /data/runs
ENV HOME=/home/user \
    USER=user
USER user
WORKDIR /data
ENTRYPOINT ["tekoa"]
CMD ["--help"]
