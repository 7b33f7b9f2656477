"""Hangs planted in runs of each strategy: the message names the rank that caused it, the group and the collective.

torch's own analyser gets the same dumps, and finds the same where its dumps suffice.
"""

import re

import pytest

from tests.dist.command import finish, start, write_recipe
from tests.flight_analyser import ADDITION, analyse

pytestmark = [pytest.mark.dist, pytest.mark.slow]

PARTS = '''
"""An objective that makes its rank hang in its sixth step."""

import os
import signal
import time

import torch

from echelon.learn.data.loader import BatchLoader
from echelon.learn.objectives.causal_lm import CausalLM

AT = 6
keep_dumps(Path(__file__).parent)


class Hang(CausalLM):
    def __init__(self, config, rank=1, how="sleep"):
        self.calls, self.how = 0, how if dist.get_rank() == rank else None
        if self.how == "data":
            read = BatchLoader.batch

            def stuck_disk(loader, step):
                if step == AT:
                    time.sleep(600)
                return read(loader, step)

            BatchLoader.batch = stuck_disk

    def count(self, batch):
        self.calls += 1
        if self.calls == AT and self.how not in (None, "data"):
            getattr(self, self.how)()
        return super().count(batch)

    def sleep(self):
        time.sleep(600)

    def leave(self):
        os._exit(0)

    def other(self):
        dist.all_gather([torch.ones(1)] * dist.get_world_size(), torch.ones(1))

    def shape(self):
        dist.all_reduce(torch.ones(3, dtype=torch.int64))

    def suspend(self):
        os.kill(os.getpid(), signal.SIGSTOP)
'''.replace("import torch\n", "import torch\n" + ADDITION, 1)


def hang(folder, how, parallel):
    """Run two ranks, the second of which hangs; return the error."""
    (folder / "hanging_parts.py").write_text(PARTS)
    write_recipe(
        folder, objective={"name": "hanging_parts:Hang", "options": {"how": how}}, parallel=parallel,
        train={"steps": 20}, fault={"hang_seconds": 4, "max_restarts": 0}, checkpoint={"every": 1000},
    )  # fmt: skip
    ended = finish(start("train", "recipe.json", "--nproc", "2", cwd=folder, PYTHONPATH=str(folder)), 120)
    assert ended.code == 1
    return ended.err


PLANS = {"ddp": "ddp", "fsdp": "fsdp", "pp": {"pp": 2}}
IN_GROUP = r"all_reduce \d+ of group everyone \(ranks 0, 1\)"
PIPELINE = r"rank 0 waits for a message at echelon/learn/parallel/pipeline.py:\d+"
EXPECTED = {
    "sleep": rf"rank 1 never entered {IN_GROUP}; it is at \S*hanging_parts.py:\d+ \(sleep\)",
    "leave": rf"rank 1 exited with code 0 before the run had ended; .*; rank 0 waits for it in {IN_GROUP}, at ",
    "other": r"collective \d+ of group everyone is all_reduce of sizes \[\[\]\] on rank 0, but all_gather of sizes "
    r"\[\[1\]\] on rank 1",
    "shape": r"collective \d+ of group everyone is all_reduce of sizes \[\[\]\] on rank 0, but all_reduce of sizes "
    r"\[\[3\]\] on rank 1",
    "suspend": rf"and rank 1 does not answer; rank 0 waits for it in {IN_GROUP}, at ",
    "data": rf"rank 1 never entered {IN_GROUP}; it is at echelon/learn/data/feed.py:\d+ \(batch\)",
}
# Stages exchange messages, which gloo does not record: the code of each rank tells who waits for whom.
OF_STAGES = {
    "sleep": rf"rank 1 does not wait for others: it is at \S*hanging_parts.py:\d+ \(sleep\); {PIPELINE}",
    "leave": rf"rank 1 exited with code 0 before the run had ended; .*; {PIPELINE}",
    "other": r"rank 0 never entered all_gather \d+ of group everyone \(ranks 0, 1\); it waits for a message at "
    r"echelon/learn/parallel/pipeline.py:\d+ \(\w+\); rank 1 is at \S*hanging_parts.py:\d+ \(other\)",
    "shape": r"rank 0 never entered all_reduce \d+ of group everyone \(ranks 0, 1\); it waits for a message at "
    r"echelon/learn/parallel/pipeline.py:\d+ \(\w+\); rank 1 is at \S*hanging_parts.py:\d+ \(shape\)",
    "suspend": rf"and rank 1 does not answer; {PIPELINE}",
    "data": rf"rank 1 does not wait for others: it is at echelon/learn/data/feed.py:\d+ \(batch\); {PIPELINE}",
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("how", EXPECTED)
def test_the_message_names_the_rank(tmp_path, how, plan):
    error = hang(tmp_path, how, PLANS[plan])
    assert re.search((OF_STAGES if plan == "pp" else EXPECTED)[how], error), error
    found = analyse(tmp_path)
    if how in ("leave", "suspend"):
        assert found == {}, "torch's analyser needs the dump of every rank"
    elif missing := re.search(r"rank (\d) never entered \w+ (\d+) of group (\w+)", error):
        assert min(found.items(), key=lambda each: each[0][1]) == ((missing[3], int(missing[2])), {int(missing[1])})
    elif differing := re.search(r"collective (\d+) of group (\w+) is .* on rank 0, but .* on rank 1", error):
        assert found[differing[2], int(differing[1])] == {1}
    else:
        assert plan == "pp" and found == {}, "the dumps have no messages between stages"
