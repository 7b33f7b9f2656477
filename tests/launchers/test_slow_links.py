"""Two network namespaces whose link is slow: DiLoCo sends little, and the advice of a report comes true."""

import re
import subprocess
import sys
from statistics import median

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import train_rows, write_recipe
from tests.launchers.test_lost_machines import finish, start_agent
from tests.namespaces import machines

pytestmark = needs_machines()

STEPS, EVERY = 60, 30
WIDE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


def count_sent(machine):
    """The bytes that a machine has sent to the others."""
    read = machine.start(["cat", "/sys/class/net/eth0/statistics/tx_bytes"], stdout=subprocess.PIPE, text=True)
    return int(read.communicate(timeout=30)[0])


def train(folder, **sections):
    """The rows of a run on two machines whose link has 100 Mbit/s, and the bytes that one of them sent."""
    folder.mkdir()
    given = {"steps": STEPS, "log_every": 500, "eval_every": STEPS} | sections.pop("train", {})
    write_recipe(folder, model={"config": WIDE}, train=given, checkpoint={"every": STEPS}, **sections)
    with machines(2, folder) as network:
        for machine in network:
            machine.slow(100)
        codes, outputs = finish(*(start_agent(machine, "2") for machine in network), seconds=170)
        sent = count_sent(network[1])
    assert codes == [0, 0], outputs
    return train_rows(RunFolder(folder / "runs" / "tiny")), sent


def test_replicas_in_two_data_centres_send_little(tmp_path):
    every_step, all_bytes = train(tmp_path / "every_step", sync={"name": "every_step"})
    diloco, few_bytes = train(tmp_path / "diloco", sync={"name": "diloco", "every": EVERY})
    seconds = [median(row["step_seconds"] for row in found[1:]) for found in (every_step, diloco)]
    print(f"{all_bytes:,} and {few_bytes:,} bytes; median step {seconds[0]:.3f} s and {seconds[1]:.3f} s")
    assert all_bytes > 20 * few_bytes
    assert [row["batch_hash"] for row in every_step] == [row["batch_hash"] for row in diloco]
    assert every_step[0]["loss"] == pytest.approx(diloco[0]["loss"], rel=1e-5)
    assert diloco[-1]["loss"] < diloco[0]["loss"]


def test_the_advice_about_a_slow_link_comes_true(tmp_path):
    """A report names the link, and predicts what a larger batch brings; the larger batch does, within 25 %."""
    speeds = []
    for size in (8, 16):
        folder = tmp_path / str(size)
        found, _ = train(folder, train={"steps": 30, "global_batch_size": size, "micro_batch_size": 4})
        speeds.append(median(row["tokens_per_second"] for row in found[1:]))
        if size == 8:
            command = [sys.executable, "-m", "echelon", "report", "tiny", "--text"]
            report = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    advice = " ".join(report.partition("Advice\n")[2].split("\n- ")[1].split())
    assert re.match(r"Even the busiest process waits for messages .*, through eth0 of node-\d\. ", advice), report
    assert "With train.global_batch_size=16 and the same train.micro_batch_size" in advice
    predicted = float(re.search(r"tokens would be ([\d.]+) times as fast", advice)[1])
    print(
        f"{speeds[0]:,.0f} and {speeds[1]:,.0f} tokens per second: {speeds[1] / speeds[0]:.2f}, predicted {predicted}"
    )
    assert speeds[1] / speeds[0] == pytest.approx(predicted, rel=0.25)
