"""ModelShape: widths and parameter counts of an architecture, and the only formulas for FLOPs and MFU."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from echelon.ground.errors import ConfigError

LOGITS_CHUNK_BYTES = 256 * 2**20  # size limit of one copy of the loss's fp32 logits
# The same on GPUs with a trained head: each chunk costs a pass over its fp32 gradient, of 8 bytes per weight.
LARGE_CHUNK_BYTES = 2**30
FUNCTION_LOGITS, TEACHER_LOGITS = 2, 4  # times the logits of cross-entropy, without and with those of a teacher
# Kernels for matrix products compute tiles of up to this many rows; a part of a tile costs a whole one.
_TILE_ROWS = 256

SCORE_HEAD = "score"
"""The name of the head of a model that scores texts, in all models of transformers."""

PACKED_MATRICES = {"gate_up_proj": 2, "qkv_proj": 3}
"""How many matrices are one, by the last part of its name. Ranks that divide one exchange its outputs."""

_SCORES_TEXTS = "ForSequenceClassification"

NormKind = Literal["rms", "rms_fp32", "layer"]


@dataclass(frozen=True)
class LayerParts:
    """Properties of a decoder layer, beyond its widths, that its saved activations depend on.

    norm: "rms" multiplies by its weight in the input's dtype (Llama), "rms_fp32" in fp32 (Gemma), "layer" is LayerNorm.
    mlp_saved: tensors of the intermediate width that backward needs. attention_matrix: the scores are kept on CPUs,
    because soft-capping rules out fused attention there. separate_projections: q, k and v (gate and up) are separate
    modules. logits_softcap: the head's logits go through a tanh, whose result is kept. windowed: the share of layers
    whose tokens attend to the last `window` tokens alone, which saves time and no memory.
    """

    norm: NormKind = "rms"
    num_norms: int = 2
    head_norms: bool = False
    num_mlp_matrices: int = 3
    mlp_saved: int = 4
    separate_projections: bool = True
    attention_matrix: bool = False
    logits_softcap: bool = False
    window: int = 0
    windowed: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0


SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers of one module that get the same input: adapters without dropout read it in one product."""


@dataclass(frozen=True)
class LinearShape:
    """Linear layers with the same last part of their name and the same widths, and their number in the model.

    adaptable: whether they can have an adapter.
    """

    name: str
    in_features: int
    out_features: int
    count: int
    adaptable: bool = True

    @property
    def size(self) -> int:
        """The number of weights of one."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class ExpertShape:
    """Expert weights with the same name in their layer and the same shape, and their number in the model.

    One is a tensor of three dims, `[num_experts, rows, columns]`.
    """

    name: str
    num_experts: int
    rows: int
    columns: int
    count: int

    @property
    def size(self) -> int:
        """The number of weights of one."""
        return self.num_experts * self.rows * self.columns


@dataclass(frozen=True)
class ModelShape:
    """Widths and parameter counts of a decoder. A tied head is counted once, as the input embedding.

    linears: the linear layers inside its decoder layers, without the head. experts: the expert weights of a mixture; a
    token does not use num_idle_parameters of them. obeys_masks: whether a document mask keeps the documents of a
    sequence apart, true if that is not known. num_scores: those that a text gets from the head of a model that scores
    texts, which has no head for tokens; None for any other model.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    max_positions: int | None
    num_parameters: int
    num_embedding_parameters: int
    num_layer_parameters: int
    num_position_parameters: int = 0
    parts: LayerParts = field(default_factory=LayerParts)
    linears: tuple[LinearShape, ...] = ()
    experts: tuple[ExpertShape, ...] = ()
    num_idle_parameters: int = 0
    obeys_masks: bool = True
    num_scores: int | None = None

    def with_score_head(self, num_scores: int) -> "ModelShape":
        """Return the shape of the same layers with a head that scores texts."""
        head = 0 if self.tied_embeddings else self.num_embedding_parameters
        total = self.num_parameters - head + num_scores * self.hidden_size
        return replace(self, num_scores=num_scores, num_parameters=total, tied_embeddings=False)

    @property
    def num_tables(self) -> int:
        """The weights with a row per token: the embedding, and the head for tokens if it has one of its own."""
        return 1 if self.tied_embeddings or self.num_scores is not None else 2

    @property
    def head_size(self) -> int:
        """The outputs of the head."""
        return self.vocab_size if self.num_scores is None else self.num_scores

    @property
    def num_expert_parameters(self) -> int:
        """The parameters of all experts of a mixture."""
        return sum(expert.count * expert.size for expert in self.experts)

    @property
    def num_layer_experts(self) -> int:
        """The parameters of all experts of a decoder layer, on average."""
        return int(sum(expert.size * self._share(expert) for expert in self.experts))

    @property
    def num_chosen_experts(self) -> int:
        """The experts that a token uses; 0 without experts."""
        if not self.experts:
            return 0
        num_experts = self.experts[0].num_experts
        return num_experts - round(num_experts * self.num_idle_parameters / self.num_expert_parameters)

    @property
    def expert_widths(self) -> tuple[float, int]:
        """(the share of decoder layers that have experts, the width between the two products of a gated expert)."""
        if not self.experts:
            return 0.0, 0
        widths = sum(expert.rows + expert.columns for expert in self.experts)
        return self._share(self.experts[0]), (widths - 2 * self.hidden_size) // 3

    def _share(self, weight: ExpertShape) -> float:
        return min(1.0, weight.count / self.num_layers)

    @property
    def num_matmul_parameters(self) -> int:
        """N of the FLOP formula: all parameters except the input's look-up tables; a tied head counts."""
        look_up = self.num_position_parameters + (0 if self.tied_embeddings else self.num_embedding_parameters)
        return self.num_parameters - look_up

    def flops_per_token(self, sequence_len: int, num_trained: int | None = None) -> float:
        """FLOPs of one token's forward and backward: 6 N + 12 L h s, attention not halved, no recomputation.

        The formula of PaLM (Chowdhery et al. 2022, appendix B), N without the input embedding and the experts that a
        token does not use. With `num_trained`, the parameters of an adapter, the others have no weight gradient:
        4 N + 2 N_trained + 12 L h s.
        """
        attention = 12.0 * self.num_layers * self.hidden_size * sequence_len
        active = self.num_matmul_parameters - self.num_idle_parameters
        return 4.0 * active + 2.0 * (active if num_trained is None else num_trained) + attention

    def mfu(
        self,
        tokens_per_second: float,
        num_devices: int,
        peak_flops: float,
        sequence_len: int,
        num_trained: int | None = None,
    ) -> float:
        """Model FLOPs utilisation, a fraction: tokens/s of all ranks against `peak_flops` (FLOP/s) of each device."""
        return tokens_per_second * self.flops_per_token(sequence_len, num_trained) / (num_devices * peak_flops)


def count_idle(experts: Iterable[ExpertShape], num_chosen: int) -> int:
    """The expert parameters that a token does not use, if it uses `num_chosen` experts of a layer."""
    return sum(
        expert.count * expert.size * max(0, expert.num_experts - num_chosen) // expert.num_experts for expert in experts
    )


def with_scores(config: Mapping[str, Any], num_scores: int) -> dict[str, Any]:
    """Return the config of the model with the same layers that gives a text so many scores."""
    return {**config, "architectures": [_SCORES_TEXTS], "id2label": dict.fromkeys(range(num_scores), "")}


def count_scores(config: Mapping[str, Any]) -> int | None:
    """Return how many scores a text gets from the model of a config; None for a model that predicts tokens.

    Raises ConfigError for architectures that are no list, and labels that are no mapping.
    """
    names, labels = config.get("architectures") or [], config.get("id2label") or {0: "", 1: ""}  # transformers' default
    if not isinstance(names, list | tuple):
        raise ConfigError(f"model.config.architectures={names!r:.80} is not a list of names; correct it, or omit it.")
    if not any(str(name).endswith(_SCORES_TEXTS) for name in names):
        return None
    if not isinstance(labels, Mapping):
        raise ConfigError(f"model.config.id2label={labels!r:.80} is not a mapping of labels; correct it, or omit it.")
    return len(labels)


def logits_chunk_tokens(vocab_size: int, kind: str, trains_head: bool) -> int:
    """Tokens per chunk of the loss: a multiple of 256, at least one, whose fp32 logits fit in the limit.

    `kind`: of the device, as torch names it.
    """
    limit = LARGE_CHUNK_BYTES if kind == "cuda" and trains_head else LOGITS_CHUNK_BYTES
    return max(1, limit // (4 * vocab_size * _TILE_ROWS)) * _TILE_ROWS


def divisors(number: int) -> list[int]:
    """The divisors of a number, smallest first."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})
