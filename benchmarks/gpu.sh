#!/bin/sh
# One numbered call of what waits for a GPU: benchmarks/gpu.sh CALL OUT_FOLDER [OPTION ...]; --help lists them.
# $PYTHON: a Python with torch for that GPU (default python3). echelon itself is taken from this checkout.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_calls.py" "$@"
