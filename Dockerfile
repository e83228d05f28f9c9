# Builds and tests one cell of matrix.toml in the base image of its CUDA version. The arguments come from the matrix:
# `nox -s build-3.11-cu130` passes them (service/images.py), so do docker-compose.yml and `python -m service.matrix --bake`.
#
#   toolchain -> build-tools -> build -> export (only the wheel)
#            \-> test-tools  -> test <- export
#
# Each stage runs the nox session of the cell, the same that runs without Docker.

ARG BASE_IMAGE

FROM ${BASE_IMAGE} AS toolchain
# The official images delete downloaded packages at once, which would empty the cache mounts below.
RUN rm -f /etc/apt/apt.conf.d/docker-clean
# g++ is for the CPU-only bases; the CUDA images bring the one that their nvcc is made for.
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ccache g++ python3-venv >/dev/null
ARG UV
ARG NOX
ARG PYTHON
# Not the distribution's Python: it is another version, and without the headers that torch.compile wants. It only carries
# uv. nox runs on the cell's, since an environment for the version that it runs on itself is made from that very one.
ENV UV_PYTHON_PREFERENCE=only-managed UV_PYTHON_INSTALL_DIR=/opt/python UV_PYTHON_BIN_DIR=/usr/local/bin \
    UV_TOOL_DIR=/opt/tools UV_TOOL_BIN_DIR=/usr/local/bin
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=cache,target=/root/.cache/uv \
    python3 -m venv /opt/uv && /opt/uv/bin/pip install --quiet "${UV}" && \
    ln -s /opt/uv/bin/uv /usr/local/bin/ && \
    uv python install "${PYTHON}" && uv tool install --quiet --python "${PYTHON}" "${NOX}"
ARG CUDA_HOME
# The inner sessions shall not look for an engine.
ENV CUDA_HOME=${CUDA_HOME} EXTOPS_BACKEND=local PYTHONUNBUFFERED=1
WORKDIR /extops
ARG CELL
ENV CELL=${CELL}
# What the sessions read in order to install, and no kernel: the environments below outlive an edit of csrc/.
COPY noxfile.py matrix.toml ./
COPY service service
COPY package/extops/_libraries.py package/extops/

FROM toolchain AS build-tools
# Of torch only the headers are used: without its libraries this layer has a tenth of the size. `settings` holds what
# changes how the session runs and not what it makes; as a mount it does not count for the layer cache.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=settings \
    set -a && if [ -f /run/secrets/settings ]; then . /run/secrets/settings; fi && \
    nox -s "build-${CELL}" --install-only && \
    rm -rf .nox/*/lib/python*/site-packages/torch/lib

FROM build-tools AS build
COPY pyproject.toml setup.py README.md LICENSE ./
COPY package package
COPY csrc csrc
# Without git here, these are told what git would say: the commit for the wheel's record, and the time for its files.
# EXTOPS_ARCHITECTURES overrides the GPUs of the matrix; CCACHE_RECACHE is there to time a build as if the cache were
# empty, and EXTOPS_FRESH, which is another one each time, to time one at all.
ARG EXTOPS_COMMIT
ARG SOURCE_DATE_EPOCH
ARG EXTOPS_ARCHITECTURES
ARG CCACHE_RECACHE
ARG EXTOPS_FRESH
# The compiler cache is shared by all cells: kernels include neither torch nor Python. It is apart from pip's, which holds
# torch: an engine short of room drops whole caches.
RUN --mount=type=cache,id=extops-ccache,target=/root/.cache/ccache --mount=type=secret,id=settings \
    set -a && if [ -f /run/secrets/settings ]; then . /run/secrets/settings; fi && \
    nox -R -s "build-${CELL}"

FROM scratch AS export
COPY --from=build /extops/dist/ /

# The wheel under test: the one of the stage above, unless the build is given another (`--build-context wheel=FOLDER`),
# which the nox session does with the one in dist/.
FROM export AS wheel

FROM toolchain AS test-tools
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=settings \
    set -a && if [ -f /run/secrets/settings ]; then . /run/secrets/settings; fi && \
    nox -s "test-${CELL}" --install-only

FROM test-tools AS test
COPY pyproject.toml ./
COPY tests tests
COPY examples examples
COPY --from=wheel / dist/
CMD ["sh", "-c", "exec nox -r -s \"test-${CELL}\""]

# Makes the package index of the source tree that is mounted at /host, with what is installed here.
FROM toolchain AS index
RUN --mount=type=cache,target=/root/.cache/pip nox --envdir /opt/nox -s index --install-only && chmod -R a+rX /opt/nox
