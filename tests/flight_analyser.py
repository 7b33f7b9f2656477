"""torch's own analyser of flight records, `torch.distributed.flight_recorder`, on the JSON that torch's recorder dumps.

The analyser reads pickles from a folder; here its inner functions get the same values from JSON. It knows nothing of
Python code, and needs the dump of every rank.
"""

import json

ADDITION = '''
import json
from pathlib import Path

import torch._C._distributed_c10d as c10d
import torch.distributed as dist


def keep_dumps(folder):
    """From now on, also write each dump that this process makes to torch-RANK.json, with its groups."""
    dump_record = c10d._dump_fr_trace_json

    def dump(*arguments):
        text = dump_record(*arguments)
        groups = {
            name: {"desc": name, "ranks": str(dist.get_process_group_ranks(group))}
            for group, name in dist.distributed_c10d._world.pg_names.items()
        }
        path = Path(folder) / f"torch-{dist.get_rank()}.json"
        path.write_text(json.dumps(json.loads(text) | {"groups": groups}))
        return text

    c10d._dump_fr_trace_json = dump
'''
"""What a program under test has to contain, so that its dumps are kept."""


def analyse(folder):
    """The ranks that are missing in a collective, or differ from the first one, by group and number of the collective.

    `folder`: that of torch-RANK.json.
    """
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    details = {}
    for path in sorted(folder.glob("torch-*.json")):
        dump = json.loads(path.read_text())
        rank = int(path.stem.removeprefix("torch-"))
        entries = [{**each, "frames": []} for each in dump["entries"]]
        details[path.name] = {
            "rank": rank, "host_name": "", "entries": entries, "version": dump["version"], "pg_config": dump["groups"],
        }  # fmt: skip
    database = build_db(details, JobConfig().parse_args([str(folder), "--allow-incomplete-ranks"]), dump["version"])
    return {
        (each.pg_desc.partition("mesh_")[2] or "everyone", each.collective_seq_id): found
        for each in database.collectives
        if (found := each.missing_ranks or set(each.mismatch_collectives or ()))
    }
