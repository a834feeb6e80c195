# Keel without a GPU. On x86-64 give pip a place with torch's builds for the CPU, or it takes the one with CUDA:
#   docker build -f docker/cpu.Dockerfile --build-arg PIP_EXTRA_INDEX_URL=… -t keel:cpu .
#   docker run --rm -v "$PWD:/workspace" --user "$(id -u):$(id -g)" keel:cpu train default
FROM python:3.11.13-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL=""
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
RUN pip install --no-cache-dir -c constraints.txt ".[tensorboard]"

FROM python:3.11.13-slim-bookworm
# any user may run it (--user): its home is the mounted folder, and its name needs no entry in passwd
RUN useradd --uid 1000 --create-home keel && mkdir /workspace && chown keel /workspace
COPY --from=build /opt/keel /opt/keel
ENV PATH=/opt/keel/bin:$PATH PYTHONUNBUFFERED=1 HOME=/workspace USER=keel HF_HOME=/workspace/.cache/huggingface
USER 1000
WORKDIR /workspace
ENTRYPOINT ["keel"]
CMD ["--help"]
