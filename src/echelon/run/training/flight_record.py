"""Records what this rank did when a hang was noticed: the collectives of torch's flight recorder, and its Python code.

torch's recorder is on for every backend if TORCH_FR_BUFFER_SIZE is set.
"""

import json
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from echelon.ground.stored import write_json
from echelon.learn.distributed.torch_internals import name_groups
from echelon.learn.distributed.traffic import name_group
from echelon.run.supervise.hangs import Collective, HangRecord, WatchedGroup, find_record_path

_TORCH = Path(torch.__file__).parent
# Backward passes wait for collectives in C++, and the host for a GPU in its events and streams.
_WAITING = (
    f"{_TORCH / 'distributed'}{os.sep}",
    str(_TORCH / "autograd" / "graph.py"),
    str(_TORCH / "cuda" / "streams.py"),
)
_SYNCHRONIZING = (str(_TORCH / "cuda" / "__init__.py"), str(_TORCH / "accelerator" / "__init__.py"))
_LIBRARIES = (str(_TORCH), sysconfig.get_paths()["stdlib"])


def write_record(outcomes_dir: Path, rank: int, frame: FrameType | None = None) -> None:
    """Write this rank's record for `hang_verdict.explain_hang`. Raises OSError. Not collective; from any thread.

    `frame`: where the rank's code stood as it lost a peer; by default, the rank waits, where its main thread is.
    """
    names: dict[str, str] = {}
    groups: dict[str, WatchedGroup] = {}
    for group, name in name_groups().items():
        ranks = dist.get_process_group_ranks(group)
        names[name] = f"{name}: {ranks}"  # groups of different ranks can have the same name
        groups[names[name]] = WatchedGroup(name_group(group), ranks)
    collectives, unfinished = _list_collectives(names)
    if collectives and frame is not None and _find_wait(frame) is None:
        # The rank waited for a collective itself. It failed with the peer, and torch counts it as over.
        collectives[-1] = replace(collectives[-1], is_over=False)
    frame = frame or sys._current_frames().get(threading.main_thread().ident or 0)
    record = HangRecord(rank, _find_place(frame), _find_wait(frame) or unfinished, groups, collectives)
    path = find_record_path(outcomes_dir, rank)
    path.parent.mkdir(exist_ok=True)
    write_json(path, asdict(record))


def _list_collectives(keys: Mapping[str, str]) -> tuple[list[Collective], str | None]:
    """Return the recorded collectives, oldest first, and the name of the first that this rank's GPU has not finished.

    `keys` maps torch's name of a group to its key. A GPU that has finished all of them waits for nobody, wherever the
    code reads a value of it.
    """
    collectives: dict[tuple[str, int], Collective] = {}
    unfinished: dict[tuple[str, int], str] = {}
    messages: dict[str, bool] = {}
    for entry in sorted(_dump_entries(), key=lambda entry: int(entry["time_created_ns"])):
        key = keys.get(entry["process_group"][0])
        backend, _, name = entry["profiling_name"].rpartition(":")
        if key is None:  # its group has been destroyed
            continue
        # NCCL ends a batch of messages, or of collectives, with an entry of its own. Of messages it can have the number
        # of the collective before them; of collectives it alone says whether they are over.
        is_message = entry["is_p2p"] or (name.endswith("coalesced") and messages.get(key, False))
        messages[key] = entry["is_p2p"]
        if is_message:
            continue
        entry_id = (key, entry["collective_seq_id"])
        collectives.pop(entry_id, None)
        unfinished.pop(entry_id, None)
        is_over = entry["retired"] or entry["state"] == "completed"
        collectives[entry_id] = Collective(*entry_id, name, entry["input_sizes"], is_over)
        if backend == "nccl" and not is_over:
            unfinished[entry_id] = name
    return list(collectives.values()), next(iter(unfinished.values()), None)


def _dump_entries() -> Iterator[dict[str, Any]]:
    """Yield what torch has recorded: NCCL's collectives are in a recorder of their own."""
    from torch._C import _distributed_c10d

    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            yield from json.loads(dump(True, False)).get("entries", [])


def _find_wait(frame: FrameType | None) -> str | None:
    """Return the innermost function of a thread if it waits for other ranks or for the GPU, which does; else None."""
    if frame is None:
        return None
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    waits = path.startswith(_WAITING) or (path in _SYNCHRONIZING and name == "synchronize")
    return name if waits else None


def _find_place(frame: FrameType | None) -> str:
    """Return where a thread is: its innermost call outside torch and the standard library."""
    while frame is not None:
        path = frame.f_code.co_filename
        if (path.startswith(_LIBRARIES) and "echelon" not in Path(path).parts) or path.startswith("<"):
            frame = frame.f_back
            continue
        return f"{'/'.join(Path(path).parts[-4:])}:{frame.f_lineno} ({frame.f_code.co_name})"
    return "an unknown place"
