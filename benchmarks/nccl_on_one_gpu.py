"""Whether each strategy computes the same with NCCL between ranks that share one GPU.

    python benchmarks/nccl_on_one_gpu.py [ROW ...] [--perturb SEED] [--size tiny]

NCCL tells GPUs apart by the machine and the place on the bus. With another NCCL_HOSTID for each rank it takes those of
one GPU for GPUs of several machines, and sends over sockets of this one. That is slow, and the arithmetic, the order of
messages and the streams are those of several GPUs. Each row trains a small model for four steps in fp32; its losses
must be those of one rank up to rounding. `--size tiny` does the same over gloo, on a CPU.

With `--perturb`, each row trains once more with every bit the same, although collectives begin late by chance on each
rank and stream, and NaN is written over memory that they have left: a missing wait, which luck hides, changes the loss.
"""

import argparse
import json
import os
import random
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
LATE_SECONDS, KEPT_SIZES = 2e-3, 8
# Where collectives begin: what torch's own code and echelon's call, by the names of torch 2.11 and of 2.13.
BEGINNINGS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all_single", "broadcast", "batch_isend_irecv",
)  # fmt: skip


def perturb(seed):
    """Let the collectives of this process begin late by chance, and write NaN over what earlier ones have freed.

    NaN goes into new tensors, which the allocator puts where freed ones of the same size were.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives  # which looks for overloads of what is replaced below

    chance, sizes = random.Random(seed), []

    class Late:
        def __init__(self, begin):
            self._begin = begin

        def __getattr__(self, name):
            return getattr(self._begin, name)

        def __call__(self, *arguments, **options):
            for size, dtype, device in sizes[-KEPT_SIZES:]:
                torch.full((size,), torch.nan, dtype=dtype, device=device)
            messages = arguments[0] if isinstance(arguments[0], list) else []
            tensors = [*arguments, *(getattr(each, "tensor", each) for each in messages)]
            sizes.extend(
                (each.numel(), each.dtype, each.device)
                for each in tensors
                if isinstance(each, torch.Tensor) and each.is_floating_point()
            )
            if torch.cuda.is_available():
                torch.cuda._sleep(chance.randrange(int(LATE_SECONDS * 1e9)))  # cycles of about 2 GHz
            else:
                time.sleep(chance.random() * LATE_SECONDS)
            return self._begin(*arguments, **options)

    for owner in (dist, torch.ops._c10d_functional):
        for name in BEGINNINGS:
            if hasattr(owner, name):
                setattr(owner, name, Late(getattr(owner, name)))


def train(ranks, parallel, overrides, seed=None):
    """The losses of a run whose ranks share the first GPU, started as Slurm starts the ranks of one machine.

    `seed`: of its perturbations; None: there are none.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.dir={folder}/run", f"data.prepared_dir={ROOT}/runs/prepared-nccl", f"parallel={parallel}",
            f"train.steps={STEPS}", "train.precision=fp32", "train.compile=false", "train.global_batch_size=8",
            "train.eval_every=null", "train.log_every=1", "tokenizer=bytes", "data.sequence_len=64",
            "model.config.hidden_size=64", "model.config.intermediate_size=128", "checkpoint.every=1000",
            "optim.warmup=0", "fault.hang_seconds=120", *overrides,
        ]  # fmt: skip
        program = ["-m", "echelon"] if seed is None else [__file__, "--late", str(seed)]
        command = [sys.executable, *program, "train", str(ROOT / "benchmarks/stdlib.yaml"), *settings]
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


def compare(name, seed):
    """Print a row of the table. Raises AssertionError if a loss differs. `seed`: of perturbations; None: without."""
    ranks, parallel, overrides = ROWS[name]
    overrides = overrides if seed is None else [*overrides, "train.deterministic=true"]
    if str(overrides) not in ALONE:
        ALONE[str(overrides)] = train(1, "ddp", overrides)
    started = time.monotonic()
    losses, expected = train(ranks, parallel, overrides), ALONE[str(overrides)]
    assert len(losses) == len(expected) == STEPS
    largest = max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))
    seconds, repeated = time.monotonic() - started, "" if seed is None else train(ranks, parallel, overrides, seed)
    same = "not tried" if seed is None else "equal" if repeated == losses else f"not equal: {repeated}, but {losses}"
    print(f"| {name} | {ranks} | {seconds:.0f} | {largest:.1e} | {same} |", flush=True)
    assert largest <= TOLERANCE, f"{name}: a loss differs by {largest:.1e} of it, and may by {TOLERANCE:g}"
    assert not same.startswith("not equal"), f"{name}: perturbed, its losses differ"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", default=list(ROWS))
    parser.add_argument("--perturb", type=int, metavar="SEED", help="train each row again, perturbed")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    given = parser.parse_args()
    if given.size == "tiny":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    (ROOT / "runs").mkdir(exist_ok=True)
    print(f"{describe_machine('torch', 'transformers')}\n")
    print("| row | ranks | seconds | largest difference of a loss | perturbed |\n|---|---|---|---|---|", flush=True)
    sys.exit(not measure_rows(given.rows, given.seconds, lambda name: compare(name, given.perturb)))


def train_late(seed, *arguments):
    """Be a rank, perturbed, with the arguments of the command."""
    from echelon.cli.main import main as echelon

    perturb(f"{seed} {os.environ.get('RANK')}")
    sys.argv = ["echelon", *arguments]
    echelon()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--late"]:
        train_late(*sys.argv[2:])
    else:
        main()
