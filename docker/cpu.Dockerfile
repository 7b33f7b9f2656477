# echelon on CPUs. `make image NAME=cpu` builds it from the root of the repository, and fills the labels.
ARG BASE=docker.io/library/python:3.12-slim-bookworm
FROM ${BASE}

ARG BASE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="echelon" \
      org.opencontainers.image.description="Trains language models across processes and machines, on CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"

# torch.compile needs a C++ compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The wheel of torch on PyPI is for CUDA. EXTRAS: of pyproject.toml.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=peft,data,tensorboard,s3
WORKDIR /opt/echelon
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
RUN python3 -m pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt ".[${EXTRAS}]" \
    && rm -r build src

# A number, so that Kubernetes can verify runAsNonRoot. Group 0 may write where the user may, for clusters that start
# containers under a uid of their own (OpenShift); USER is set because no such uid has a name.
RUN useradd --no-log-init --uid 1000 --gid 0 --create-home echelon \
    && chmod g=u /home/echelon \
    && install -d -o 1000 -g 0 -m 2775 /workspace
ENV HOME=/home/echelon USER=echelon
WORKDIR /workspace
USER 1000
ENTRYPOINT ["echelon"]
CMD ["--help"]
