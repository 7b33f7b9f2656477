"""benchmarks/agents_at_scale.py: many agents cost the store and the shared folder little, and agree fast."""

import time

import numpy as np
import pytest

from agents_at_scale import measure
from echelon.run.supervise.hangs import WaitingPeers
from echelon.run.training.straggler import StragglerWatch


@pytest.mark.slow
def test_many_agents_are_quiet_and_learn_of_a_loss():
    row = measure(64, seconds=10)
    assert row["requests_per_agent_second"] <= 1 and row["shared_file_calls_per_second"] == 0, row
    assert row["loss_known_seconds"] < 16, row  # 12 without a heartbeat, and the looks


@pytest.mark.slow
def test_a_rank_of_thousands_needs_little_time_for_the_others(tmp_path):
    """Processor seconds of a window of steps on rank 0, and of a look of a rank that waits: 5 ms are allowed."""
    watch = StragglerWatch(["host"] * 8192, [0] * 8192)
    times = list(np.random.default_rng(1).random(8192))
    for step in range(49):
        watch.saw_step(step, times, 1.0)
    began = time.thread_time()
    watch.saw_step(49, times, 1.0)
    window = time.thread_time() - began
    peers = WaitingPeers(tmp_path, 8, range(8, 16), has_distant=True)
    began = time.thread_time()
    peers.is_one_resting(3)
    peers.find_late()
    look = time.thread_time() - began
    print(f"window {1e3 * window:.1f} ms, look {1e3 * look:.2f} ms")
    assert window < 0.1 and look < 0.05  # on a busy machine
