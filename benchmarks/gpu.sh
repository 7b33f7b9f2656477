#!/usr/bin/env bash
# The tests that need a GPU, and every benchmark, on this machine's GPUs; all that was printed is kept.
#   benchmarks/gpu.sh [all|tests|bench] [LOG_FOLDER]
# Needs torch with CUDA and echelon's dependencies in the Python named by $PYTHON (default python3); echelon itself is
# taken from this checkout. Takes about 15 minutes (tests 5, bench 10), and no part of it more than its limit below.
set -uo pipefail
cd "$(dirname "$0")/.."
what=${1:-all}
logs=${2:-runs/gpu-$(date -u +%Y%m%dT%H%M%SZ)}
python=${PYTHON:-python3}
mkdir -p "$logs"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
failed=0

part() { # part NAME SECONDS COMMAND...: run it, keep its output, go on whatever happens
    local name=$1 seconds=$2 started=$SECONDS
    shift 2
    echo "== $name (at most $seconds s)"
    timeout "$seconds" "$@" >"$logs/$name.log" 2>&1
    local code=$?
    if [ "$code" -ne 0 ]; then failed=1; fi
    tail -n 14 "$logs/$name.log"
    echo "$name: exit $code after $((SECONDS - started)) s" | tee -a "$logs/summary.txt"
}

part machine 60 bash -c "nvidia-smi; nproc; free -g; git log -1 --oneline; $python -c '
import platform, torch, transformers
print(platform.python_version(), torch.__version__, transformers.__version__, torch.cuda.nccl.version())
print(torch.cuda.get_device_properties(0))'"
if [ "$what" != bench ]; then
    part tests 420 "$python" -m pytest tests/gpu -m gpu -rA --durations=15
fi
if [ "$what" != tests ]; then
    part overhead-tiny 90 "$python" benchmarks/overhead.py --rounds 6
    part overhead-small-bf16 90 "$python" benchmarks/overhead.py --size small --precision bf16 --rounds 5 --steps 20
    part overhead-small-compiled 120 "$python" benchmarks/overhead.py --size small --precision bf16 --compile \
        --rounds 5 --steps 20
    part memory 120 "$python" benchmarks/memory.py "vocabulary of 256k, bf16" "sequences of 32k, bf16" "both, bf16"
    part finetuning 420 "$python" benchmarks/finetuning.py --pairs 1 --blocks 5 --steps 8
    part compile-order 300 "$python" benchmarks/compile_order.py --out "$logs/compile-order-cuda.md"
fi
echo "== $logs"
cat "$logs/summary.txt"
exit "$failed"
