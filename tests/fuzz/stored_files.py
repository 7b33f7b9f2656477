"""All files of a run that are read again, and the loaders that training, evaluation and export use."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from echelon.ground.checksums import MANIFEST, describe_files
from echelon.ground.errors import EchelonError
from echelon.learn.checkpoint.export import export_run
from echelon.learn.checkpoint.folder import find_checkpoints
from echelon.learn.data.prepared import open_prepared
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.weights import PretrainedWeights
from echelon.learn.opened import OpenedModel, one_process
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import Accelerator, Cluster
from echelon.planner.shape import build_shape
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.assemble import build_trainer
from echelon.run.lifecycle.model_checks import check_weights, find_model_fields
from echelon.run.lifecycle.saved_state import load_newest
from echelon.run.lifecycle.setup import prepare_run
from tests.dist.command import write_recipe
from tests.fuzz.damage import ODD_FILES, damage_bytes, damage_header, damage_json, foreign_files, put_odd_file
from tests.log_lines import LogLines

MACHINE = Cluster(Accelerator("test machine", 2**33, None, None, None, "-"), 1, 1, "cpu")
Parts = dict[str, str]
SAMPLE = "One plus 1 is 2, and \t so on: äß€.\n"


def digest(*values: Any) -> str:
    """A hash of nested tensors, arrays, strings and JSON values."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().view(torch.uint8).numpy() if value.ndim else value.item()
        if isinstance(value, np.ndarray):
            found.update(repr((value.shape, value.dtype)).encode() + np.ascontiguousarray(value).tobytes())
        else:
            found.update((value if isinstance(value, str) else json.dumps(value, default=repr)).encode())
    return found.hexdigest()


class StoredFiles:
    """A small run with two checkpoints, its export, and the loader of each of their files."""

    def __init__(self, root: Path, marker: Path) -> None:
        """Train four steps in this process, whose process group must exist."""
        self.marker = marker
        self._foreign = foreign_files(marker)
        recipe_path = write_recipe(
            root,
            run={"name": "fuzz", "dir": str(root / "run")},
            tokenizer={"train": {"vocab_size": 300}},
            data={"prepare_workers": 1, "prepared_dir": str(root / "prepared")},
            train={"steps": 4, "eval_every": 100},
            checkpoint={"every": 2},
        )
        text = (root / "text.txt").absolute()
        recipe, _ = load_recipe(recipe_path, [f"data.train={text}"])
        prepared = prepare_run(recipe, False, lambda: MACHINE, {})
        assert prepared is not None
        self.run = prepared.folder
        self.runtime = Runtime(0, 1, 0, 1, torch.device("cpu"), "gloo")
        trainer = build_trainer(recipe, prepared.plan, self.run, self.runtime)
        trainer.fit()
        trainer.train_step.loader.close()
        trainer.accounting.journal.close()
        self._store, self._snapshots, self._contents = (
            trainer.saver.store,
            trainer.saver.snapshots,
            trainer.saver.contents,
        )
        self._sequence_len = recipe.data.sequence_len
        self.run.unlock()
        self.single = export_run(self.run.path, root / "single")
        self._sharded = shutil.copytree(self.single, root / "sharded")
        (self._sharded / "model.safetensors").unlink()
        AutoModelForCausalLM.from_pretrained(self.single).save_pretrained(self._sharded, max_shard_size="60KB")
        self._older, self._newest = (checkpoint.path for checkpoint in find_checkpoints(self.run.checkpoints_dir))
        self._prepared = self.run.text.read_prepared_path()
        self.kinds = self._make_kinds()
        for kind in self.kinds:
            kind.expected = kind.load()
        self._earlier = self._load_earlier()

    def close(self) -> None:
        """Stop the thread of the checkpoint store."""
        self._store.close()

    def _make_kinds(self) -> "list[Kind]":
        prepared, model, newest = self._prepared, self.run.model_dir, self._newest
        resume, load, data = self._resume, self._load_run, self._read_data
        single, sharded = self.single, self._sharded
        pretrained, evaluated = self._pretrained(single), self._evaluated(single)
        text, config = (damage_bytes, damage_json), ("config", "buffers")
        hf = single / "model.safetensors"
        shards, index = sorted(sharded.glob("*.safetensors")), [sharded / "model.safetensors.index.json"]
        parts = sorted(newest.glob("*.distcp"))
        return [
            Kind("prepared text: manifest", [prepared / "manifest.json"], data, text),
            Kind("prepared text: shards", sorted(prepared.glob("*.bin")), data, weight=2),
            Kind("prepared text: tokenizer", sorted((prepared / "tokenizer").iterdir()), data, text),
            Kind("checkpoint: manifest, resuming", [newest / MANIFEST], resume, text),
            Kind("checkpoint: manifest, evaluating", [newest / MANIFEST], load, text),
            Kind("checkpoint: state.json, resuming", [newest / "state.json"], resume, text),
            Kind("checkpoint: .metadata, resuming", [newest / ".metadata"], resume),
            Kind("checkpoint: .metadata, evaluating", [newest / ".metadata"], load),
            Kind("checkpoint: .distcp, resuming", parts, resume, weight=2),
            Kind("checkpoint: .distcp, evaluating", parts, load),
            Kind("checkpoint: .metadata, signed anew", [newest / ".metadata"], resume, signs=newest, weight=2),
            Kind("checkpoint: .distcp, signed anew", parts, resume, signs=newest),
            Kind("checkpoint: state.json, signed anew", [newest / "state.json"], resume, (damage_json,), signs=newest),
            Kind("run: config and tokenizer", sorted(model.iterdir()), load, text, weight=2),
            Kind("HF folder: safetensors, training", [hf], pretrained, (damage_header,), weight=2),
            Kind("HF folder: safetensors, evaluating", [hf], evaluated, (damage_header,)),
            Kind("HF folder: shards, training", shards, self._pretrained(sharded), (damage_header,)),
            Kind("HF folder: shards, evaluating", shards, self._evaluated(sharded), (damage_header,)),
            Kind("HF folder: index, training", index, self._pretrained(sharded), text),
            Kind("HF folder: index, evaluating", index, self._evaluated(sharded), text),
            Kind("HF folder: config.json, training", [single / "config.json"], pretrained, text, says=config),
            Kind("HF folder: config.json, evaluating", [single / "config.json"], evaluated, text, says=config),
            Kind("HF folder: tokenizer", sorted(single.glob("tok*.json")), evaluated, text, says=("tokenizer",)),
        ]

    def _read_data(self) -> Parts:
        """Read all prepared data as training does: every sample of every set, and the tokenizer."""
        data = open_prepared(self.run.text.read_prepared_path(), self._sequence_len)
        sets = [
            ("train", data.train, None),
            *((each.name, each.dataset, each.bytes_per_token) for each in data.validation),
        ]
        parts: list[Any] = [data.vocab_size, data.fingerprint, data.manifest.separator]
        for name, dataset, bytes_per_token in sets:
            samples = dataset.read_samples(np.arange(dataset.num_samples))
            parts += [name, bytes_per_token, samples.inputs, samples.labels]
        return {"data": digest(*parts), "tokenizer": digest(*describe_tokenizer(data.tokenizer))}

    def _resume(self) -> Parts:
        """Load the state that a run resumes from; raise PassedOver for an earlier checkpoint with a message."""
        tensors = self._contents.tensors()
        for tensor in tensors.values():
            tensor.fill_(7)
        with closing(LogLines()) as told:
            saved = load_newest(self._store, self._snapshots, self._contents, self.runtime)
        assert saved is not None
        found = {"state": digest(asdict(saved))} | {name: digest(tensors[name]) for name in tensors}
        if "Skipping" in (line := "\n".join(told.lines)):
            assert found == self._earlier, "an earlier checkpoint, and not as it was"
            raise PassedOver(line)
        return found

    def _load_earlier(self) -> Parts:
        """Load the state that a run resumes from without its newest checkpoint."""
        aside = self._newest.rename(self._newest.with_name("aside"))
        try:
            return self._resume()
        finally:
            aside.rename(self._newest)

    def _load_run(self) -> Parts:
        """Load a run as `echelon eval`, `generate` and `export` do."""
        return describe_target(self.run.path)

    def _pretrained(self, folder: Path) -> Callable[[], Parts]:
        """Load `model.checkpoint` as training does."""
        recipe, _ = load_recipe(self.run.recipe_path, [f"model.checkpoint={folder}"])

        def load() -> Parts:
            check_weights(str(folder))
            fields, _ = find_model_fields(recipe, 300)
            resolve_plan(recipe, build_shape(fields), MACHINE)
            config = load_config(str(folder))
            skeleton = build_on_meta(config)
            model = build_on_meta(config).to_empty(device="cpu")
            model.tie_weights()
            PretrainedWeights(skeleton, folder).fill(model)
            return {"fields": digest(fields), **describe_model(model)}

        return load

    def _evaluated(self, folder: Path) -> Callable[[], Parts]:
        return lambda: describe_target(folder)

    def damage(self, rng: random.Random, kind: "Kind") -> "tuple[Path, bytes | str | None]":
        """Choose a file of this kind and its replacement. None: the file is missing; a text: one of ODD_FILES."""
        path = rng.choice(kind.files)
        choice = rng.random()
        if choice < 0.02:
            return path, None
        if choice < 0.06:
            odd = rng.choice(ODD_FILES)
            return path, "a pipe" if odd == "a huge file" and kind.signs else odd  # whose checksum takes for ever
        if choice < 0.14:
            return path, self._foreign[rng.choice(sorted(self._foreign))]
        if choice < 0.18:
            others = [other for each in self.kinds for other in each.files if other != path]
            if (content := rng.choice(others).read_bytes()) != path.read_bytes():
                return path, content
        damage = rng.choice(kind.damages)
        if damage is damage_json and path.suffix not in (".json", ".jinja"):
            damage = damage_bytes
        return path, damage(rng, path.read_bytes())


class PassedOver(EchelonError):
    """Reports that a damaged checkpoint was skipped with a message, and that an intact earlier one was loaded."""


@dataclass
class Kind:
    """Files of one kind, and their loader.

    `signs`: the checkpoint whose manifest is written again after the damage, as an attacker would do. Its checksums are
    then valid, so any value may load, but without harm. `says`: the parts of the value that a file without a checksum
    determines, such as a text that the user edits; any value of these parts is accepted.
    """

    name: str
    files: list[Path]
    load: Callable[[], Parts]
    damages: tuple[Callable[[random.Random, bytes], bytes], ...] = (damage_bytes,)
    signs: Path | None = None
    says: tuple[str, ...] = ()
    weight: int = 1
    expected: Parts = field(default_factory=dict)

    def is_right(self, value: Parts) -> bool:
        """Whether the loaded value equals that of the undamaged files, except for the parts in `says`."""
        if self.signs is not None:
            return True
        if "config" in self.says:  # the config determines which parameters exist; each must be unchanged
            return value.items() - self.expected.items() <= {(key, value.get(key)) for key in (*self.says, "fields")}
        return value | dict.fromkeys(self.says, "") == self.expected | dict.fromkeys(self.says, "")


@contextmanager
def replaced(path: Path, content: bytes | str | None, signs: Path | None = None) -> Iterator[None]:
    """Replace a file by other content, nothing or one of ODD_FILES during the block; optionally update the manifest."""
    before = path.read_bytes()
    manifest = None if signs is None else (signs / MANIFEST).read_bytes()
    try:
        if content is None:
            path.unlink()
        elif isinstance(content, str):
            put_odd_file(path, content)
        else:
            path.write_bytes(content)
        if signs is not None:
            files = [each for each in signs.iterdir() if each.name != MANIFEST and each.is_file()]
            (signs / MANIFEST).write_text(json.dumps({"format": 1, "files": describe_files(files)}))
        yield
    finally:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(before)
        if signs is not None and manifest is not None:
            (signs / MANIFEST).write_bytes(manifest)


def describe_tokenizer(tokenizer: Any) -> list[Any]:
    """The behaviour of a tokenizer: its rules, its special tokens, and the encoding and decoding of a text."""
    ids = tokenizer.encode(SAMPLE)
    return [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, ids, tokenizer.decode(ids)]


def describe_model(model: Any) -> Parts:
    """The config, the buffers derived from it, and each parameter."""
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    buffers = dict(model.named_buffers())
    return {
        "config": digest(config),
        "buffers": digest(sorted(buffers), *(buffers[name] for name in sorted(buffers))),
        **{name: digest(parameter) for name, parameter in model.named_parameters()},
    }


def describe_target(folder: Path) -> Parts:
    """The parts of a folder that `echelon eval` and `echelon generate` use."""
    opened = OpenedModel(folder, None, one_process("cpu"), may_score=False)
    return {**describe_model(opened.model), "tokenizer": digest(*describe_tokenizer(opened.tokenizer))}
