# Keel on NVIDIA GPUs. torch brings CUDA's libraries itself, so the base needs none; the driver is the host's, handed in by NVIDIA's
# container toolkit. Triton compiles its kernels' launchers with gcc when they first run.
#   docker build -f docker/cuda.Dockerfile -t keel:cuda .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/workspace" --user "$(id -u):$(id -g)" keel:cuda train default
FROM python:3.11.13-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/keel
ENV PATH=/opt/keel/bin:$PATH
WORKDIR /src
# torch is most of the image and changes seldom: a layer of its own
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY src src
RUN pip install --no-cache-dir -c constraints.txt ".[tensorboard,wandb,data,math,plot]"

FROM python:3.11.13-slim-bookworm
# any user may run it (--user): its home is the mounted folder, and its name needs no entry in passwd
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home keel && mkdir /workspace && chown keel /workspace
COPY --from=build /opt/keel /opt/keel
ENV PATH=/opt/keel/bin:$PATH PYTHONUNBUFFERED=1 HOME=/workspace USER=keel HF_HOME=/workspace/.cache/huggingface \
    TRITON_CACHE_DIR=/workspace/.cache/triton \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /workspace
ENTRYPOINT ["keel"]
CMD ["--help"]
