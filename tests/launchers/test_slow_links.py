"""DiLoCo between two data centres: two network namespaces, whose link is slow."""

import subprocess
from statistics import median

import pytest

from command import write_recipe
from echelon.runs.run_folder import RunFolder
from namespaces import machines, namespaces_allowed
from test_lost_machines import finish, rows, start_agent

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(namespaces_allowed() is not None, reason=str(namespaces_allowed())),
]

STEPS, EVERY = 60, 30
WIDE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


def count_sent(machine):
    """The bytes that a machine has sent to the others."""
    read = machine.start(["cat", "/sys/class/net/eth0/statistics/tx_bytes"], stdout=subprocess.PIPE, text=True)
    return int(read.communicate(timeout=30)[0])


def train(folder, sync):
    """The rows of a run on two machines whose link has 100 Mbit/s, and the bytes that one of them sent."""
    folder.mkdir()
    write_recipe(
        folder, model={"config": WIDE}, train={"steps": STEPS, "log_every": 500, "eval_every": STEPS},
        checkpoint={"every_steps": STEPS}, sync=sync,
    )  # fmt: skip
    with machines(2, folder) as network:
        for machine in network:
            machine.slow(100)
        codes, outputs = finish(*(start_agent(machine, "2") for machine in network), seconds=170)
        sent = count_sent(network[1])
    assert codes == [0, 0], outputs
    return rows(RunFolder(folder / "runs" / "tiny")), sent


def test_replicas_in_two_data_centres_send_little(tmp_path):
    every_step, all_bytes = train(tmp_path / "every_step", {"name": "every_step"})
    diloco, few_bytes = train(tmp_path / "diloco", {"name": "diloco", "every": EVERY})
    seconds = [median(row["step_seconds"] for row in found[1:]) for found in (every_step, diloco)]
    print(f"{all_bytes:,} and {few_bytes:,} bytes; median step {seconds[0]:.3f} s and {seconds[1]:.3f} s")
    assert all_bytes > 20 * few_bytes
    assert [row["batch_hash"] for row in every_step] == [row["batch_hash"] for row in diloco]
    assert every_step[0]["loss"] == pytest.approx(diloco[0]["loss"], rel=1e-5)
    assert diloco[-1]["loss"] < diloco[0]["loss"]
