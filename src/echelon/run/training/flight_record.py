"""Records what this rank did when a hang was noticed: the collectives of torch's flight recorder, and its Python code.

torch's recorder is on for every backend if TORCH_FR_BUFFER_SIZE is set.
"""

import json
import os
import sys
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from echelon.ground.stored import write_json
from echelon.learn.distributed.traffic import name_group
from echelon.run.supervise.hang_verdict import Collective, Group, HangRecord, find_record_path

_TORCH = Path(torch.__file__).parent
# Backward passes wait for collectives in C++.
_WAITING = (f"{_TORCH / 'distributed'}{os.sep}", str(_TORCH / "autograd" / "graph.py"))
_LIBRARIES = (str(_TORCH), sysconfig.get_paths()["stdlib"])


def write_record(outcomes_dir: Path, rank: int, frame: FrameType | None = None) -> None:
    """Write this rank's record for `hang_verdict.explain_hang`. Raises OSError. Not collective; from any thread.

    `frame`: where the rank's code stood as it lost a peer; by default, the rank waits, where its main thread is.
    """
    names: dict[str, str] = {}
    groups: dict[str, Group] = {}
    for group, name in dist.distributed_c10d._world.pg_names.items():
        ranks = dist.get_process_group_ranks(group)
        names[name] = f"{name}: {ranks}"  # groups of different ranks can have the same name
        groups[names[name]] = Group(name_group(group), ranks)
    collectives = _list_collectives(names)
    if collectives and frame is not None and _find_wait(frame) is None:
        # The rank waited for a collective itself. It failed with the peer, and torch counts it as over.
        collectives[-1] = replace(collectives[-1], is_over=False)
    frame = frame or sys._current_frames().get(threading.main_thread().ident or 0)
    record = HangRecord(rank, _find_place(frame), _find_wait(frame), groups, collectives)
    path = find_record_path(outcomes_dir, rank)
    path.parent.mkdir(exist_ok=True)
    write_json(path, asdict(record))


def _list_collectives(keys: Mapping[str, str]) -> list[Collective]:
    """Return the recorded collectives; `keys` maps torch's name of a group to its key."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
    return [
        Collective(
            keys[each["process_group"][0]],
            each["collective_seq_id"],
            each["profiling_name"].rpartition(":")[2],
            each["input_sizes"],
            each["retired"],
        )
        for each in entries
        if not each["is_p2p"]
    ]


def _find_wait(frame: FrameType | None) -> str | None:
    """Return the innermost function of a thread if it is one of torch.distributed, or the backward pass; else None."""
    waits = frame is not None and frame.f_code.co_filename.startswith(_WAITING)
    return frame.f_code.co_name if frame is not None and waits else None


def _find_place(frame: FrameType | None) -> str:
    """Return where a thread is: its innermost call outside torch and the standard library."""
    while frame is not None:
        path = frame.f_code.co_filename
        if (path.startswith(_LIBRARIES) and "echelon" not in Path(path).parts) or path.startswith("<"):
            frame = frame.f_back
            continue
        return f"{'/'.join(Path(path).parts[-4:])}:{frame.f_lineno} ({frame.f_code.co_name})"
    return "an unknown place"
