"""Whether each strategy computes the same with NCCL between ranks that share one GPU.

    python benchmarks/nccl_on_one_gpu.py [ROW ...] [--size tiny]

NCCL tells GPUs apart by the machine and the place on the bus. With another NCCL_HOSTID for each rank it takes those of
one GPU for GPUs of several machines, and sends over sockets of this one. That is slow, and the arithmetic, the order of
messages and the streams are those of several GPUs. Each row trains a small model for four steps in fp32; its losses
must be those of one rank up to rounding. `--size tiny` does the same over gloo, on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from echelon.ground.sockets import find_free_port
from measuring import describe_machine, measure_rows

ROOT = Path(__file__).parents[1]
STEPS, TOLERANCE = 4, 1e-4
# As NCCL's documentation has them: sockets over loopback, no memory that ranks share.
NCCL = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
MIXTURE = ["model.config.model_type=mixtral", "model.config.num_local_experts=4", "model.config.num_experts_per_tok=2"]
ROWS = {
    "ddp": (2, "ddp", []),
    "fsdp": (2, "fsdp", []),
    "tp": (2, "{dp_shard: 1, tp: 2, sequence_parallel: true}", []),
    "pp": (2, "{pp: 2}", []),
    "cp, ring": (2, "{dp_shard: 1, cp: 2, cp_method: ring}", []),
    "cp, ulysses": (2, "{dp_shard: 1, cp: 2, cp_method: ulysses}", []),
    "ep": (2, "{dp_shard: 2, ep: 2}", MIXTURE),
    "zero1": (2, "zero1", []),
    "hsdp": (4, "hsdp", []),
    "fsdp x tp": (4, "{dp_shard: 2, tp: 2}", []),
}
ALONE = {}


def train(ranks, parallel, overrides):
    """The losses of a run whose ranks share the first GPU, started as Slurm starts the ranks of one machine."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.dir={folder}/run", f"data.prepared_dir={ROOT}/runs/prepared-nccl", f"parallel={parallel}",
            f"train.steps={STEPS}", "train.precision=fp32", "train.compile=false", "train.global_batch_size=8",
            "train.eval_every=null", "train.log_every=1", "tokenizer=bytes", "data.sequence_len=64",
            "model.config.hidden_size=64", "model.config.intermediate_size=128", "checkpoint.every=1000",
            "optim.warmup=0", "fault.hang_seconds=120", *overrides,
        ]  # fmt: skip
        command = [sys.executable, "-m", "echelon", "train", str(ROOT / "benchmarks/stdlib.yaml"), *settings]
        common = os.environ | NCCL | {"OMP_NUM_THREADS": "1"}
        if ranks > 1:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port("127.0.0.1"))}
            common |= address | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        common["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        place = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "SLURM_PROCID": str(rank), "NCCL_HOSTID": f"rank-{rank}"}
            for rank in range(ranks)
        ]
        started = [
            subprocess.Popen(command, env=common | (place[rank] if ranks > 1 else {}), stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)
            for rank in range(ranks)
        ]  # fmt: skip
        outputs = [process.communicate()[0] for process in started]
        assert all(process.returncode == 0 for process in started), "\n".join(outputs)[-2000:]
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        return [row["loss"] for row in map(json.loads, lines) if row["kind"] == "train"]


def compare(name):
    """Print a row of the table. Raises AssertionError if a loss differs."""
    ranks, parallel, overrides = ROWS[name]
    if str(overrides) not in ALONE:
        ALONE[str(overrides)] = train(1, "ddp", overrides)
    started = time.monotonic()
    losses, expected = train(ranks, parallel, overrides), ALONE[str(overrides)]
    assert len(losses) == len(expected) == STEPS
    largest = max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))
    print(f"| {name} | {ranks} | {time.monotonic() - started:.0f} | {largest:.1e} |", flush=True)
    assert largest <= TOLERANCE, f"{name}: a loss differs by {largest:.1e} of it, and may by {TOLERANCE:g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    given = parser.parse_args()
    if given.size == "tiny":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    (ROOT / "runs").mkdir(exist_ok=True)
    print(f"{describe_machine('torch', 'transformers')}\n")
    print("| row | ranks | seconds | largest difference of a loss |\n|---|---|---|---|", flush=True)
    sys.exit(not measure_rows(given.rows, given.seconds, compare))


if __name__ == "__main__":
    main()
