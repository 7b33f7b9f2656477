"""Two machines that share nothing, with separate hub caches, fine-tune a model of a hub that both can reach.

Slow: each start of two machines takes about a minute.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests import hub_server
from tests.cases import needs_machines
from tests.dist.command import train_rows, write_recipe
from tests.namespaces import machines
from tests.parity.training import LOSS

pytestmark = needs_machines()

NAME = "team/tiny"
STEPS = 20
PORT = 18080
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models, as the first and the second commit of a repository."""
    hub, folders = hub_server.HubServer(), [tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")]
    for seed, folder in enumerate(folders):
        hub_server.push_model(hub, NAME, folder, seed=seed)
    hub.stop()
    return folders


def fine_tuning(folder, checkpoint, parallel):
    folder.mkdir(exist_ok=True)
    return write_recipe(
        folder,
        model={"config": None, "checkpoint": str(checkpoint)},
        tokenizer=None,
        adapter={"method": "lora", "r": 4},
        train={"steps": STEPS},
        checkpoint={"every": STEPS},
        parallel=parallel,
    )


def start(network, parallel, models, folder, **tokens):
    """Start a hub on the third machine, and agents on the first two, with one rank each and nothing shared."""
    coordinator, guest, shop = network
    log = folder / "requests.json"
    serve = [sys.executable, hub_server.__file__, shop.address, str(PORT), NAME, *map(str, models), str(log)]
    hub = shop.start(serve, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, **PIPES)
    url = hub.stdout.readline().strip()
    assert url.startswith("http"), hub.communicate()
    agents = []
    for machine in (coordinator, guest):
        fine_tuning(folder / machine.name, NAME, parallel)
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")} | {
            "OMP_NUM_THREADS": "1", "HF_ENDPOINT": url, "HF_HOME": str(folder / machine.name / "hf"),
            "SM_HOSTS": json.dumps([coordinator.name, guest.name]), "SM_CURRENT_HOST": machine.name,
            "SM_NETWORK_INTERFACE_NAME": "eth0", "HF_TOKEN": tokens.get(machine.name.replace("-", ""), "let-me-in"),
        }  # fmt: skip
        command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "1"]
        agents.append(machine.start(command, env=environment, cwd=folder / machine.name, **PIPES))
    outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    time.sleep(0.5)  # the hub writes its log of requests five times a second
    return [agent.returncode for agent in agents], outputs, json.loads(log.read_text())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_each_machine_downloads_each_file_once_from_one_commit(parallel, models, tmp_path):
    """The repository gets a new commit as soon as the first machine has resolved the name."""
    with machines(3, tmp_path) as network:
        codes, outputs, requests = start(network, parallel, models, tmp_path)
    assert codes == [0, 0], "\n".join(outputs)
    weights = set(json.loads((models[0] / "model.safetensors.index.json").read_text())["weight_map"].values())
    expected = dict.fromkeys([*SMALL, "model.safetensors.index.json", *weights], 1)
    found = [(client, path) for method, path, client in requests if method == "GET" and "/resolve/" in path]
    commit = json.loads((tmp_path / "node-1" / "runs" / "tiny" / "hub.json").read_text())[NAME]
    for machine in network[:2]:
        mine = [path.split(f"/{NAME}/resolve/{commit}/")[1] for client, path in found if client == machine.address]
        assert Counter(mine) == expected, machine.name
    assert (tmp_path / "node-1" / "runs" / "tiny" / "hub.json").read_text() == (
        tmp_path / "node-2" / "runs" / "tiny" / "hub.json"
    ).read_text()
    for output in outputs:
        assert f"hub: fetching {NAME} at commit {commit[:12]}: {len(weights)} files" in output

    fine_tuning(tmp_path / "alone", models[0], parallel)
    command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "1"]
    alone = subprocess.run(command, cwd=tmp_path / "alone", check=False, **PIPES)
    assert alone.returncode == 0, alone.stdout
    together, single = (train_rows(RunFolder(tmp_path / place / "runs" / "tiny")) for place in ("node-1", "alone"))
    assert len(single) == STEPS and [row["batch_hash"] for row in together] == [row["batch_hash"] for row in single]
    difference = max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in zip(together, single, strict=True))
    print(f"largest difference of a loss, {parallel} on two machines and one process: {difference:.2g}")
    assert difference <= LOSS


def test_a_machine_that_cannot_download_ends_the_job_on_all(models, tmp_path):
    with machines(3, tmp_path) as network:
        codes, outputs, _ = start(network, "ddp", models, tmp_path, node2="a-bad-one")
    assert codes == [2, 2], "\n".join(outputs)
    for output in outputs:
        said = [line for line in output.splitlines() if line.startswith("echelon: ")]
        assert len(said) == 1 and f"model.checkpoint={NAME}: the hub rejects the token on node-2" in said[0]
