# echelon in AWS's deep learning container, which has the libraries of EFA: libfabric and aws-ofi-nccl. For EKS and EC2;
# for SageMaker: make image NAME=aws OPTIONS='--build-arg BASE=...-sagemaker'. The registry's region is that of the cluster.
ARG BASE=763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cu133-amzn2023
FROM ${BASE}

ARG BASE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="echelon" \
      org.opencontainers.image.description="Trains language models across processes and machines, on AWS with EFA" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"

# torch stays that of the base, with which its NCCL and aws-ofi-nccl were built. EXTRAS: of pyproject.toml.
ARG EXTRAS=qlora,data,tensorboard,s3,float8,liger
WORKDIR /opt/echelon
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
RUN python3 -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > versions.txt \
    && grep -v '^torch==' constraints.txt >> versions.txt \
    && python3 -m pip install --no-cache-dir -c versions.txt ".[${EXTRAS}]" \
    && rm -r build src

# No USER: SageMaker needs root, which owns /opt/ml there. No ENTRYPOINT: SageMaker's jobs and Kubernetes' pods name
# their own command.
