# echelon on NVIDIA GPUs. `make image NAME=cuda` builds it from the root of the repository, and fills the labels.
# torch brings its own CUDA libraries; of the base are the check of the driver and /usr/local/cuda/compat.
ARG BASE=docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${BASE}

ARG BASE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="echelon" \
      org.opencontainers.image.description="Trains language models across processes and machines, on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"

# Triton and torch.compile need a compiler and Python's headers, NCCL the drivers of InfiniBand.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ibverbs-providers python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}

# EXTRAS: of pyproject.toml.
ARG EXTRAS=qlora,data,tensorboard,s3,float8,liger
WORKDIR /opt/echelon
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
RUN python3 -m pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" \
    && rm -r build src

# A number, so that Kubernetes can verify runAsNonRoot. Group 0 may write where the user may, for clusters that start
# containers under a uid of their own (OpenShift); USER is set because no such uid has a name. Ubuntu's own user has 1000.
RUN userdel --remove ubuntu \
    && useradd --no-log-init --uid 1000 --gid 0 --create-home echelon \
    && chmod g=u /home/echelon \
    && install -d -o 1000 -g 0 -m 2775 /workspace
ENV HOME=/home/echelon USER=echelon
WORKDIR /workspace
USER 1000
ENTRYPOINT ["echelon"]
CMD ["--help"]
