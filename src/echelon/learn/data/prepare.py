"""The cached step from text to shards: `echelon data --prepare`, which `train` runs if the data is not prepared.

A prepared folder is named by a hash of everything that determines its content. It is written under a temporary name
and renamed, under a file lock: it exists completely or not at all, and processes that need the same data wait for the
one that writes it. An interrupted preparation resumes. There is no process group at this point, so no collective can
time out.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.ground.checksums import write_manifest
from echelon.ground.errors import ConfigError, DataError, EchelonError
from echelon.ground.file_lock import FileLock, describe_mark
from echelon.ground.progress import Progress
from echelon.ground.stored import sync_path
from echelon.learn.data.catalog import FORMAT_VERSION, SampleRule, save_manifest
from echelon.learn.data.corpus import (
    CorpusEntry,
    TextSample,
    corpus_bytes,
    describe_examples,
    describe_left_out,
    describe_limits,
    list_corpus,
)
from echelon.learn.data.corpus_writer import CorpusWriter, WritingOptions
from echelon.learn.data.instruction import InstructionEncoding
from echelon.learn.data.limits import helper_ended
from echelon.learn.data.preflight import build_instruction_encoding, check_stops_learned
from echelon.learn.data.prepare_spec import PrepareSpec, prepare_spec
from echelon.learn.data.prepared import PreparedData, check_mask, open_prepared
from echelon.learn.data.shared_folders import SharedFolders, is_given, open_given, save_settings
from echelon.learn.data.sinks import has_progress
from echelon.learn.data.split import describe_split, warn_of_small_sets
from echelon.learn.data.stream.addresses import fetch, is_address, slowness_told
from echelon.learn.data.stream.chunks import StreamPlan, cut_chunks, save_plan
from echelon.learn.data.templates import load_template
from echelon.learn.data.tokenize import Encoding
from echelon.learn.data.tokenizer import (
    add_new_tokens,
    build_bytes_tokenizer,
    build_tokenizer,
    describe_known_tokens,
    load_tokenizer,
    padding_id,
    panics_told,
    separator_id,
    tokenizer_fingerprint,
    train_tokenizer,
    vocabulary_size,
)
from echelon.recipe.data_formats import PROMPT_FORMAT, masks_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from echelon.recipe.document import Recipe

logger = logging.getLogger(__name__)

TOKENIZER_SAMPLE_BYTES = 2**26
"""The approximate maximum amount of text to train a tokenizer on, sampled evenly."""

BYTES_PER_WORKER = 2**22
"""`prepare_workers: auto` starts at most one process per core, and at most one per this much text."""

_WAITING_LINE_SECONDS = 10.0
_FETCHED = "fetched"


def prepare_data(recipe: "Recipe", *, verify: bool = False) -> PreparedData:
    """Read, tokenize and write the recipe's text, or open it if it is already prepared. See `prepare`."""
    return prepare(prepare_spec(recipe), verify=verify, find_obstacle=lambda: find_mask_obstacle(recipe))


def find_mask_obstacle(recipe: "Recipe") -> str | None:
    """Why the recipe's model cannot keep the documents of a sequence apart, as a clause; None if it can.

    Raises:
        ConfigError: the model cannot be built.
    """
    from echelon.learn.model.build import build_on_meta, load_config
    from echelon.learn.model.config import check_full_sequences, scale_positions
    from echelon.learn.model.traits import describe_obstacle, find_traits

    model, trusted = recipe.model, recipe.model.trust_remote_code
    check_full_sequences(recipe, are_apart=True)
    config = load_config(model.checkpoint or model.config or {}, trusted)
    scale_positions(config, recipe)
    built = build_on_meta(config, model.attn_implementation, trusted)
    return describe_obstacle(find_traits(built, recipe.data.sequence_len), config)


@helper_ended()
def prepare(
    spec: PrepareSpec,
    *,
    verify: bool = False,
    find_obstacle: Callable[[], str | None] = lambda: None,
    tokenizer: "PreTrainedTokenizerFast | None" = None,
) -> PreparedData:
    """Read, tokenize and write text into `prepared_dir/<key>`, or open it if it is already prepared.

    If `prepared_dir` is itself a prepared folder, opens that (see `open_given`). With `verify`, existing data is
    checked by checksum, not only by size. Raises DataError for unusable text, tokenizer or shards, ConfigError if no
    tokenizer is given, EchelonError if the disk is full.

    Args:
        find_obstacle: returns why the model cannot keep the documents of a sequence apart, as a clause, or None if it
            can; called only if sequences would hold several documents that must not attend to each other.
        tokenizer: that of `spec` if it is loaded already, without its new tokens, which are added to it.
    """
    if not 0 <= spec.validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction={spec.validation_fraction} is not a fraction; use 0 to 0.5.")
    if is_given(spec):
        complete = None if isinstance(spec.tokenizer, int) else _complete_tokenizer(spec, spec.tokenizer, tokenizer)
        return _described(open_given(spec, complete, find_obstacle, verify=verify), spec)
    corpus = list_corpus(spec.train, spec.validation)
    for line in (*describe_left_out(corpus), *describe_examples(corpus), *describe_limits(corpus)):
        logger.info(line)
    _check_places(spec, corpus)
    spec = _settle_packing(spec, _has_examples(corpus), find_obstacle)
    tokenizer = None if isinstance(spec.tokenizer, int) else _complete_tokenizer(spec, spec.tokenizer, tokenizer)
    if _sample_rule(spec, corpus, tokenizer) is None:
        separator = spec.separator if tokenizer is None else separator_id(tokenizer, spec.separator)
        check_mask(spec.document_mask, separator)
    folder = spec.prepared_dir / _cache_key(spec, corpus, tokenizer)
    shared = None if spec.prepared_remote is None else SharedFolders(spec.prepared_remote)
    if not folder.is_dir():
        _make_folder(folder, spec, corpus, tokenizer, shared)
    if shared is not None:
        shared.send(folder)
    prepared = open_prepared(folder, spec.sequence_len, spec.document_mask, verify=verify, stream=spec.stream)
    return _described(replace(prepared, loaded=tokenizer), spec)


def _described(prepared: PreparedData, spec: PrepareSpec) -> PreparedData:
    """Log the split, the packing and the size of the data, and return it."""
    kept = "attends only to itself" if prepared.apart else "attends to earlier ones in its sequence"
    documents = "documents: each is alone in its sequence"
    if prepared.shares_sequences:
        documents = f"documents: each {kept} (data.document_mask={str(spec.document_mask).lower()})"
    held_out = sum(part.dataset.num_tokens for part in prepared.validation)
    trained = f"{prepared.train.num_tokens:,} training tokens"
    if prepared.streamed is not None:
        trained = prepared.streamed.describe()
    size = f"data: {trained}, {held_out:,} held out, in {prepared.path}"
    for line in (*prepared.manifest.remarks, *describe_split(prepared.manifest), documents, size):
        logger.info(line)
    for line in warn_of_small_sets(prepared.manifest):
        logger.warning(line)
    return prepared


def _check_places(spec: PrepareSpec, corpus: Sequence[CorpusEntry]) -> None:
    """Raise ConfigError for addresses without `data.stream`, and for prompts with it."""
    for entry in corpus:
        if spec.stream is not None and any(file.fields.format == PROMPT_FORMAT for file in entry.files):
            raise ConfigError(
                f"{entry.source}: data.stream does not go with prompts, whose records a reward reads at any time; "
                "remove data.stream, and copy them to this machine if they are at an address."
            )
        if spec.stream is None and is_address(entry.source.path):
            raise ConfigError(
                f"{entry.source}: data at an address is read while the run trains; set data.stream, for example "
                "data.stream={window: 8192}, or copy it to this machine and give the folder."
            )


def _settle_packing(spec: PrepareSpec, has_examples: bool, find_obstacle: Callable[[], str | None]) -> PrepareSpec:
    """Replace `packing: auto` by the choice for this data and this model. Logs the reason if nothing is packed.

    Raises:
        ConfigError: the recipe asks for documents that share sequences and do not attend to each other, and the model
            cannot keep them apart.
    """
    is_masked = masks_documents(spec.document_mask, has_examples)
    obstacle = find_obstacle() if is_masked and spec.packing is not False else None
    if obstacle is None:
        return replace(spec, packing=spec.packing is not False)
    if spec.packing == "auto" and has_examples:
        logger.info(f"packing: none, each sample has a sequence of its own, because {obstacle}")
        return replace(spec, packing=False)
    if has_examples:
        raise ConfigError(
            f"data.packing=true: {obstacle}; set data.packing=auto, with which each sample has a sequence of its own."
        )
    raise ConfigError(
        f"data.document_mask=true: {obstacle}; set data.packing=false for one document per sequence, or "
        "data.document_mask=false, with which a document attends to earlier ones."
    )


def _complete_tokenizer(
    spec: PrepareSpec, name: str | None, built: "PreTrainedTokenizerFast | None"
) -> "PreTrainedTokenizerFast":
    """Return the tokenizer with the recipe's new tokens. Logs the new tokens that it already has."""
    if built is None:
        built = build_tokenizer(name, spec.checkpoint, spec.trust_remote_code)
    for line in describe_known_tokens(built, spec.new_tokens):
        logger.info(line)
    add_new_tokens(built, spec.new_tokens)
    return built


def _make_folder(
    folder: Path,
    spec: PrepareSpec,
    corpus: Sequence[CorpusEntry],
    tokenizer: "PreTrainedTokenizerFast | None",
    shared: SharedFolders | None,
) -> None:
    """Write the folder or download it, unless another process does so first.

    Raises EchelonError if it cannot be written.
    """
    try:
        spec.prepared_dir.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if folder.is_dir() or (shared is not None and shared.bring(folder)):
                return
            write_folder(folder, spec, corpus, tokenizer)
    except OSError as error:
        kept = f" The progress so far is kept in {_partial(folder)}." if has_progress(_partial(folder)) else ""
        raise EchelonError(
            f"the prepared data cannot be written to {folder}: {error.strerror or error}; free disk space or set "
            f"data.prepared_dir to another folder.{kept}"
        ) from error


def _cache_key(spec: PrepareSpec, corpus: Sequence[CorpusEntry], tokenizer: "PreTrainedTokenizerFast | None") -> str:
    """Hash everything that determines the content of a prepared folder."""
    digest = hashlib.sha256()
    if tokenizer is None:
        template = spec.instruction.chat_template and load_template(spec.instruction.chat_template)
        identity: list[Any] = [spec.tokenizer, spec.new_tokens, asdict(spec.instruction), template]
    else:
        instruction = _instruction(spec, corpus, tokenizer)
        identity = [tokenizer_fingerprint(tokenizer), separator_id(tokenizer, spec.separator), tokenizer.chat_template]
        identity.append(instruction and asdict(instruction))
    fraction = 0.0 if spec.validation else spec.validation_fraction
    choices = [spec.separator, spec.mixture, spec.deduplicate, spec.max_broken_fraction, spec.max_shard_tokens]
    rule = _sample_rule(spec, corpus, tokenizer)
    samples = rule and asdict(rule)
    is_streamed = [] if spec.stream is None else ["stream"]
    digest.update(json.dumps([FORMAT_VERSION, identity, samples, fraction, *choices, *is_streamed]).encode())
    for entry in corpus:
        limit = [] if entry.source.max_samples is None else [entry.source.max_samples]
        digest.update(json.dumps([entry.stream, entry.source.key, entry.source.name, *limit]).encode())
        for file in entry.files:
            described = {**asdict(file), "fields": file.fields.to_stored()}
            if described["options"] == "{}":  # keeps the key of data prepared before `options` existed
                del described["options"]
            digest.update(json.dumps(described, default=os.fspath).encode())
    return digest.hexdigest()[:16]


def _sample_rule(
    spec: PrepareSpec, corpus: Sequence[CorpusEntry], tokenizer: "PreTrainedTokenizerFast | None"
) -> SampleRule | None:
    """Return the rule that turns documents into samples; None for plain text. Without a tokenizer yet, padding is 0."""
    assert spec.packing != "auto", "_settle_packing replaces it"
    if spec.packing and not _has_examples(corpus):
        return None
    padding = 0 if tokenizer is None else padding_id(tokenizer) or 0
    return SampleRule(spec.sequence_len, spec.on_overlong, spec.packing, padding)


def _has_examples(corpus: Sequence[CorpusEntry]) -> bool:
    return any(file.fields.format is not None for entry in corpus for file in entry.files)


def _sources_with_ends(corpus: Sequence[CorpusEntry]) -> Iterator[str]:
    """Yield the sources whose samples end with a token of the template or the separator: all except given ids."""
    for entry in corpus:
        if all(file.fields.format is not None and file.fields.format != "tokens" for file in entry.files):
            yield entry.source.key


def _instruction(
    spec: PrepareSpec, corpus: Sequence[CorpusEntry], tokenizer: "PreTrainedTokenizerFast"
) -> InstructionEncoding | None:
    """Build the encoding of examples; None for plain text. The template in use becomes the tokenizer's.

    Raises ConfigError.
    """
    files = (file for entry in corpus for file in entry.files)
    with panics_told(_tokenizer_name(tokenizer, spec), "a test of the chat template"):
        return build_instruction_encoding(spec.instruction, tokenizer, files)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting without limit. The file is kept: removing it would be a race."""
    lock, next_line = FileLock(path), time.monotonic()
    while not lock.take():
        if time.monotonic() >= next_line:
            who = f"another process is preparing the same data (lock {path}, pid {lock.read_holder()})."
            logger.info(f"waiting: {who}{describe_mark(lock)}")
            next_line = time.monotonic() + _WAITING_LINE_SECONDS
        time.sleep(0.1)
    try:
        yield
    finally:
        lock.release()


def write_folder(
    folder: Path, spec: PrepareSpec, corpus: Sequence[CorpusEntry], tokenizer: "PreTrainedTokenizerFast | None"
) -> None:
    """Write a prepared folder under a temporary name, or resume one, then rename it.

    Refused data leaves nothing behind. An interruption or a full disk leaves the progress so far.
    """
    partial = _partial(folder)
    try:
        partial.mkdir(exist_ok=True)
        tokenizer = _keep_tokenizer(partial / "tokenizer", tokenizer, spec, corpus)
        options = WritingOptions(
            validation_fraction=spec.validation_fraction,
            mixture=spec.mixture,
            max_shard_tokens=spec.max_shard_tokens,
            max_broken_fraction=spec.max_broken_fraction,
            deduplicate=spec.deduplicate,
            samples=_sample_rule(spec, corpus, tokenizer),
        )
        encoding = _encoding(tokenizer, spec, _instruction(spec, corpus, tokenizer))
        written = corpus if spec.stream is None else _fetch_held_out(partial / _FETCHED, corpus)
        writer = CorpusWriter(partial, written, encoding, options)
        manifest = writer.write(_num_workers(spec, written))
        if spec.stream is not None:
            training = (file for entry in corpus if entry.stream == "train" for file in entry.files)
            chunks = tuple(cut_chunks(training))
            save_plan(partial, StreamPlan(encoding, spec.max_broken_fraction, chunks, options.samples))
        settings = spec.instruction
        learns_stops = settings.answers != "prompts" and not settings.scores_texts and not settings.takes_prompts
        if encoding.instruction is not None and learns_stops:
            check_stops_learned(partial, manifest, encoding.instruction, _sources_with_ends(corpus))
        save_settings(partial, spec, None if isinstance(spec.tokenizer, int) else tokenizer)
        save_manifest(partial, manifest)
        writer.finish()
        shutil.rmtree(partial / _FETCHED, ignore_errors=True)
        os.rename(partial, folder)
        sync_path(folder.parent)
    except (ConfigError, DataError):
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if not has_progress(partial):
            shutil.rmtree(partial, ignore_errors=True)


def _fetch_held_out(folder: Path, corpus: Sequence[CorpusEntry]) -> list[CorpusEntry]:
    """Return the held-out text; what is at an address is fetched into the folder."""
    folder.mkdir(exist_ok=True)
    held_out = []
    for entry in (entry for entry in corpus if entry.stream != "train"):
        with slowness_told(f"fetching {entry.source.path}"):
            held_out.append(replace(entry, files=tuple(fetch(file, folder) for file in entry.files)))
    return held_out


def _partial(folder: Path) -> Path:
    return folder.with_suffix(".partial")


def _keep_tokenizer(
    place: Path, tokenizer: "PreTrainedTokenizerFast | None", spec: PrepareSpec, corpus: Sequence[CorpusEntry]
) -> "PreTrainedTokenizerFast":
    """Save the tokenizer in the folder and return it: the given one, the one already there, or a newly trained one."""
    if tokenizer is None and place.is_dir():
        return load_tokenizer(str(place))
    if tokenizer is None:
        assert isinstance(spec.tokenizer, int)
        tokenizer = add_new_tokens(_train_on_sample(spec, corpus, spec.tokenizer), spec.new_tokens)
        _instruction(spec, corpus, tokenizer)  # sets its template, which is saved with it
    unfinished = place.with_suffix(".new")
    for folder in (unfinished, place):
        shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(unfinished)
    write_manifest(unfinished)
    unfinished.rename(place)
    return tokenizer


def _encoding(
    tokenizer: "PreTrainedTokenizerFast", spec: PrepareSpec, instruction: InstructionEncoding | None
) -> Encoding:
    fingerprint = tokenizer_fingerprint(tokenizer)
    is_bytes = fingerprint == tokenizer_fingerprint(build_bytes_tokenizer())
    inner = tokenizer.backend_tokenizer
    return Encoding(
        name=_tokenizer_name(tokenizer, spec),
        fingerprint=fingerprint,
        tokenizer_json=None if is_bytes else inner.to_str(),
        separator=separator_id(tokenizer, spec.separator),
        vocab_size=vocabulary_size(inner),
        digests=spec.deduplicate,
        instruction=instruction,
    )


def _tokenizer_name(tokenizer: "PreTrainedTokenizerFast", spec: PrepareSpec) -> str:
    return spec.tokenizer_name or tokenizer.name_or_path or "of the recipe"


def _num_workers(spec: PrepareSpec, corpus: Sequence[CorpusEntry]) -> int:
    if spec.workers is not None:
        return spec.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_bytes = corpus_bytes(corpus)
    return max(1, min(cores, num_bytes // BYTES_PER_WORKER)) if num_bytes or not corpus else cores


def _train_on_sample(spec: PrepareSpec, corpus: Sequence[CorpusEntry], vocab_size: int) -> "PreTrainedTokenizerFast":
    training = [entry for entry in corpus if entry.stream == "train"]
    logger.info(f"tokenizer: training byte-level BPE with {vocab_size:,} ids")
    progress = Progress("tokenizer: read", min(corpus_bytes(corpus), TOKENIZER_SAMPLE_BYTES), logger)
    rules = (spec.max_broken_fraction, spec.instruction.train_on)
    sample = TextSample(training, TOKENIZER_SAMPLE_BYTES, progress, *rules)
    tokenizer = train_tokenizer(sample.read(), vocab_size)
    progress.finish()
    num_ids = vocabulary_size(tokenizer.backend_tokenizer)
    if num_ids < vocab_size:
        logger.warning(f"tokenizer: the text gives only {num_ids:,} ids")
    return tokenizer
