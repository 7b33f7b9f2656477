"""Checks of a model by running a small copy of it on the CPU: is its attention causal, can its sequences be divided?

For the first the copy runs twice, on two sequences that differ from some token on. If the logits before that token
differ, the model sees later tokens, and next-token training would leak the labels.

For the second two threads take the place of two ranks: they run the parts of the same sequences, and exchange what
ranks would. The logits must be those of whole sequences, with and without documents. State-space and recurrent layers,
convolutions, attention that adds biases by position on its own and rotary embeddings that depend on the longest
position fail this.
"""

import copy
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.distributed.peers import Peers
from echelon.learn.model.attention import document_inputs, stand_in
from echelon.learn.model.build import build_on_meta
from echelon.learn.model.context_attention import BY_MASK, Context, divided_inputs, use_context
from echelon.learn.model.flex_attention import get_softcap
from echelon.learn.model.small_copy import (
    MAX_PARAMETERS,
    SMALL_PARAMETERS,
    ConfigKey,
    count_parameters,
    other_tokens,
    random_tokens,
    randomize,
    smaller_copies,
    transformers_silenced,
)
from echelon.learn.model.traits import (
    Traits,
    build_copies,
    describe_error,
    is_close,
    pack_documents,
    run_copy,
    undisturbed,
)
from echelon.recipe.training import CpMethod

_LENGTH = 12
# Rounding changes earlier logits by up to 1e-6 of the largest one (experts group tokens differently); a leak changes
# them by 0.1 or more.
_TOLERANCE = 1e-4
# The config fields, with their values, that make a model causal in families where that is configurable.
_SWITCHES = (("is_decoder", True), ("causal", True), ("is_causal", True), ("use_bidirectional_attention", False))


def check_is_causal(config: PretrainedConfig, trust_remote_code: bool = False) -> None:
    """Refuse a model whose attention is not causal, and a small model whose forward pass fails.

    Takes tenths of a second, once per config and process. A model passes unchecked if no copy with at most 100 M
    parameters can be built, or if the copy does not run: a handful of architectures in `transformers` 5.

    Raises:
        ConfigError: the message names the field that would make the model causal, if there is one.
    """
    if not sees_what_follows(ConfigKey(config, trust_remote_code)):
        return
    fix = "use a causal family, for example llama"
    for name, value in _SWITCHES:
        if getattr(config, name, value) != value:
            changed = copy.deepcopy(config)
            setattr(changed, name, value)
            if not sees_what_follows(ConfigKey(changed, trust_remote_code)):
                written = json.dumps(value)
                fix = f"set {name}: {written} in model.config (for a checkpoint, in its config.json), or {fix}"
                break
    raise ConfigError(
        f"model: in this {config.model_type} model positions attend to later tokens, and next-token prediction "
        f"requires causal attention; {fix}."
    )


@lru_cache(maxsize=64)
def sees_what_follows(key: ConfigKey) -> bool:
    """Return whether a later token changes an earlier logit; False if no copy could be run.

    Raises:
        ConfigError: the model is small enough to run unreduced, and its forward pass fails.
    """
    with transformers_silenced():
        # Building a model sets the dtype of its config, which is the caller's.
        if count_parameters(build_on_meta(copy.deepcopy(key.config), None, *key.others)) <= SMALL_PARAMETERS:
            return _try_as_is(key)
        for small in smaller_copies(key.config):
            try:
                if count_parameters(build_on_meta(small, None, *key.others)) <= MAX_PARAMETERS:
                    return _try(small, *key.others)
            except Exception:  # a reduced config may break a family's own assumptions in any way
                continue
        return False


def _try_as_is(key: ConfigKey) -> bool:
    try:
        return _try(key.config, *key.others)
    except Exception as error:  # transformers raises many types of exception
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model: a forward pass of this {key.config.model_type} model fails ({type(error).__name__}: {reason}); "
            "correct model.config."
        ) from error


def _try(config: PretrainedConfig, trust_remote_code: bool) -> bool:
    """Return whether a later token changes an earlier logit of a model with this config.

    In a mixture of experts a rounding error can change the choice of experts, but not in both precisions.
    """
    if measure_leak(config, trust_remote_code, torch.float32) <= _TOLERANCE:
        return False
    try:
        return measure_leak(config, trust_remote_code, torch.float64) > _TOLERANCE
    except RuntimeError:  # a kernel without fp64
        return True


@torch.no_grad()
def measure_leak(config: PretrainedConfig, trust_remote_code: bool, dtype: torch.dtype) -> float:
    """Return the change of the earlier logits, as a fraction of the largest one. Keeps the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
        ).eval()
        randomize(model)
        tokens = random_tokens(model, 1, _LENGTH)
    half = _LENGTH // 2
    others = torch.cat([tokens[:, :half], other_tokens(model, tokens[:, half:])], dim=1)
    first, second = (model(input_ids=ids, use_cache=False).logits[:, :half] for ids in (tokens, others))
    return float((first - second).abs().max() / first.abs().max())


_SIZE = 2


def check_divides(model: PreTrainedModel, method: CpMethod, traits: Traits, sequence_len: int | None) -> None:
    """Refuse a model, on meta or not, whose sequences cannot be divided by this method.

    Args:
        traits: of the model, with the attention that its config names.

    Raises:
        ConfigError: the message names the model's type, what is wrong, and what is possible.
    """
    attention = model.config._attn_implementation
    if method != "ulysses" and attention not in BY_MASK:
        raise ConfigError(
            f"parallel.cp with cp_method={method} does not work with model.attn_implementation={attention}, which "
            "takes no mask for a part of the queries; use cp_method: ulysses, or model.attn_implementation=sdpa."
        )
    softcap = get_softcap(model.config)
    if method == "ring" and softcap is not None:
        raise ConfigError(
            f"parallel.cp with cp_method=ring cannot cap attention scores, and the model's attn_logit_softcapping is "
            f"{softcap}; use cp_method: allgather."
        )
    name = stand_in(attention) or attention
    obstacle = _find_obstacle(ConfigKey(model.config, type(model), name, sequence_len, method), traits)
    if obstacle is not None:
        raise ConfigError(
            f"parallel.cp: this {model.config.model_type} model cannot have its sequences divided: {obstacle}; use "
            "cp: 1, and for sequences that do not fit train.activation_checkpointing=full or train.micro_batch_size=1."
        )


@lru_cache(maxsize=16)
def _find_obstacle(key: ConfigKey, traits: Traits) -> str | None:
    """Return why sequences cannot be divided, as a clause; None if they can."""
    model_class, attention, sequence_len, method = key.others
    if traits.mask is None:
        return f"it cannot keep documents apart by a mask ({traits.obstacle})"
    if traits.mask == "positions":
        return "it takes no mask but its own"
    with undisturbed():
        try:
            small = build_copies(model_class, key.config, attention, sequence_len)[0]
            return _compare(small, method, attention, traits)
        except Exception as error:  # a family may fail in any way
            return f"a small copy of it does not run so ({describe_error(error)})"


def _compare(small: PreTrainedModel, method: CpMethod, attention: str, traits: Traits) -> str | None:
    """Compare the logits of parts with those of whole sequences; return what differs, as a clause."""
    packed = pack_documents(small)
    assert traits.mask is not None
    masks = document_inputs(small, traits.mask, packed.documents, packed.positions)
    cases = {
        "whole sequences": ((None, None), run_copy(small, packed.tokens)),
        "documents": ((packed.documents, packed.positions), run_copy(small, packed.tokens, **masks)),
    }
    heads = getattr(small.config.get_text_config(decoder=True), "num_attention_heads", 1)
    is_possible = method != "ulysses" or heads % _SIZE == 0 or attention not in BY_MASK
    chosen: CpMethod = method if is_possible else "allgather"
    for name, (rows, expected) in cases.items():
        exchange = _ThreadExchange()
        contexts = [Context(_ThreadPeers(rank, exchange), chosen, attention) for rank in range(_SIZE)]
        with ThreadPoolExecutor(_SIZE) as threads:
            run = partial(_run_part, small, traits, packed.tokens, rows, exchange)
            outputs = list(threads.map(run, contexts))
        for context, logits in zip(contexts, outputs, strict=True):
            if not is_close(logits, context.part.take(expected, 1)):
                return f"its parts do not compute what {name} do, as with recurrent layers or convolutions"
    return None


@torch.no_grad()
def _run_part(
    small: PreTrainedModel,
    traits: Traits,
    tokens: Tensor,
    rows: tuple[Tensor | None, Tensor | None],
    exchange: "_ThreadExchange",
    context: Context,
) -> Tensor:
    """Return the logits of a part, in a thread of its own. `no_grad` holds for one thread."""
    model, part = copy.deepcopy(small), context.part
    use_context(model, context)
    part_tokens = part.take(tokens)
    try:
        return run_copy(model, part_tokens, **divided_inputs(model, context, traits, part_tokens, part, *rows))
    except Exception:
        exchange.leave()
        raise


class _ThreadExchange:
    """Where threads exchange tensors: each brings one, and takes those of all."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(_SIZE)
        self._brought: dict[int, Tensor] = {}

    def swap(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return what each thread brought, by rank."""
        self._brought[rank] = tensor
        self._barrier.wait()
        everything = [self._brought[index] for index in range(_SIZE)]
        self._barrier.wait()
        return everything

    def leave(self) -> None:
        """Let the other thread fail too, instead of waiting."""
        self._barrier.abort()


class _ThreadPeers(Peers):
    """Threads in place of ranks."""

    size = _SIZE

    def __init__(self, rank: int, exchange: _ThreadExchange) -> None:
        self.rank = rank
        self._exchange = exchange

    @override
    def gather(self, part: Tensor) -> Tensor:
        return torch.stack(self._exchange.swap(self.rank, part))

    @override
    def swap(self, parts: Tensor) -> Tensor:
        return torch.stack([parts_of_rank[self.rank] for parts_of_rank in self._exchange.swap(self.rank, parts)])

    @override
    def add_up(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange.swap(self.rank, tensor)).sum(0)

    @override
    def shift(self, tensor: Tensor, stream: int = 0) -> Callable[[], Tensor]:
        return partial(self._exchange.swap(self.rank, tensor).__getitem__, (self.rank - 1) % self.size)

    @override
    def isolated(self) -> AbstractContextManager[None]:
        """Threads send nothing in any case."""
        return nullcontext()
