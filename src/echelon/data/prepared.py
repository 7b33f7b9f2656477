@dataclass(frozen=True)
class ValidationSet:
    """Text to evaluate on, under a name. `bytes_per_token` is None where the text was given as tokens."""

    name: str
    dataset: Dataset
    bytes_per_token: float | None


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder, opened.

    `train` is a MixtureDataset where `manifest.train` has several splits, its parts in their order. `validation` is
    empty when nothing was held out.
    """

    path: Path
    manifest: Manifest
    train: Dataset
    validation: tuple[ValidationSet, ...]

    @property
    def tokenizer_dir(self) -> Path:
        """The folder of the tokenizer, as `save_pretrained` wrote it."""
        return self.path / "tokenizer"

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer, loaded when first asked for."""
        return load_tokenizer(str(self.tokenizer_dir))

    @property
    def vocab_size(self) -> int:
        """How many ids a model needs: one more than the largest the tokenizer can emit."""
        return self.manifest.vocab_size

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer that made the tokens."""
        return self.manifest.tokenizer_fingerprint

    @property
    def content_digest(self) -> str:
        """A hash of the tokens and of what is trained and validated on, wherever the folder lies."""
        manifest = self.manifest
        shards = {stream: [shard.sha256 for shard in manifest.shards(stream)] for stream in manifest.streams}
        parts = (manifest.train, manifest.validation)
        splits = [[[split.stream, split.start, split.stop] for split in part] for part in parts]
        return hashlib.sha256(json.dumps([self.fingerprint, shards, splits], sort_keys=True).encode()).hexdigest()[:32]


def open_prepared(
    path: Path,
    sequence_len: int,
    *,
    tokenizer: "PreTrainedTokenizerFast | None" = None,
    verify: bool = False,
) -> PreparedData:
    """Open a prepared folder, cutting its tokens into samples of `sequence_len`.

    Raises DataError for a damaged or foreign manifest, a shard of the wrong size (with `verify`, also of the wrong
    sha256), and for a tokenizer, the saved one or the one given, that did not make these tokens.
    """
    manifest = load_manifest(path)
    check_shards(path, manifest, verify=verify)
    try:
        check_files(path / "tokenizer", checksums=True)
        saved = fingerprint_json((path / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    except (CheckpointError, OSError, ValueError) as error:
        raise DataError(f"the tokenizer in {path} cannot be read: {error} Delete {path} and prepare again.") from error
    found = {f"the tokenizer in {path}": saved}
    if tokenizer is not None:
        found["the tokenizer given"] = tokenizer_fingerprint(tokenizer)
    for what, fingerprint in found.items():
        if fingerprint != manifest.tokenizer_fingerprint:
            raise DataError(
                f"{what} did not make the tokens in {path}: its fingerprint is {fingerprint}, theirs "
                f"{manifest.tokenizer_fingerprint}; use the tokenizer they were made with, or prepare again."
            )
    stores = {name: TokenStore(path, manifest.shards(name), manifest.dtype) for name in manifest.streams}

    def cut(split: Split) -> TokenDataset:
        return TokenDataset([stores[split.stream]], sequence_len, start=split.start, stop=split.stop)

    validation = tuple(ValidationSet(each.name, cut(each), each.bytes_per_token) for each in manifest.validation)
    parts = [cut(split) for split in manifest.train]
    return PreparedData(path, manifest, parts[0] if len(parts) == 1 else MixtureDataset(parts), validation)


