"""The router loss of a mixture of experts, which keeps the router from sending all tokens to the same experts.

The sequence-wise balance loss of DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20). For a sequence of T tokens, each
routed to K of E experts with scores s,

    L = sum_i f_i P_i,  f_i = E / (K T) * sum_t [expert i is among the K best of token t],
                        P_i = 1 / T * sum_t s_ti / sum_j s_tj

which is 1 if the experts are used evenly, and at most E / K. It is averaged over the routers, and sequences are
weighted by their number of targets. Like the token loss it is therefore a sum over targets divided by their number, and
does not depend on how sequences are distributed over microbatches and ranks. `load_balancing_loss_func` of
`transformers` is a product of means over a microbatch and all layers: its value depends on the plan.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from echelon.planner.experts import EXPERT_COUNTS, count_experts, find_recorded_routers

Scores = Callable[[Tensor], Tensor]
AddUp = Callable[[Tensor], Tensor]


# The functions by which routers turn logits into scores; `_find_scores` detects which one a router uses.
_SOFTMAX: Scores = partial(F.softmax, dim=-1)
_SCORES: tuple[Scores, ...] = (_SOFTMAX, torch.sigmoid, lambda logits: F.softplus(logits).sqrt())
_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Router:
    """A router of a model: its module, and how it routes a token.

    `index`: which of its outputs are the logits, if it has several. `num_chosen`: K. `scores`: from logits
    [tokens, experts] to the scores by which experts are chosen and weighted.
    """

    name: str
    index: int
    num_chosen: int
    scores: Scores


@dataclass(frozen=True)
class Sequences:
    """The sequences of a microbatch, for the router loss.

    Per position, [batch * seq]: `places` is the index of its sequence; `fed` is 1 for a token and 0 for padding. Per
    sequence, [sequences]: `weights` is the sum of its token weights, `lengths` its number of tokens. All fp32, except
    `places`. `add_up`: see number_sequences.
    """

    places: Tensor
    fed: Tensor
    weights: Tensor
    lengths: Tensor
    add_up: AddUp


def number_sequences(
    fed: Tensor, token_weights: Tensor, documents: Tensor | None, most: int = 0, add_up: AddUp = lambda own: own
) -> Sequences:
    """Number the sequences of a microbatch: each row is one, or each document of a row with a document mask.

    Args:
        fed: [batch, seq], boolean, False for padding.
        token_weights: [batch, seq], fp32.
        documents: [batch, seq], the index of each position's document in its row; None without a document mask.
        most: at least the number of documents of a row, if that may be more than seq.
        add_up: adds up values of sequences over the ranks that share them; collective if there are several.
    """
    num_rows, length = fed.shape
    width = 1 if documents is None else max(length, most)
    rows = torch.arange(num_rows, device=fed.device)[:, None] * width
    inside: Tensor | int = 0 if documents is None else documents.clamp(min=0)
    places = (rows + inside).expand(num_rows, length).flatten()
    tokens = fed.flatten().float()
    empty = tokens.new_zeros(num_rows * width)
    weights, lengths = (empty.index_add(0, places, values) for values in (token_weights.flatten(), tokens))
    return Sequences(places, tokens, add_up(weights), add_up(lengths), add_up)


def balance_sum(logits: Tensor, router: Router, sequences: Sequences) -> Tensor:
    """Return the weighted sum of one router's balance losses over the sequences, an fp32 scalar.

    It is the term of the positions that this rank holds. Collective where sequences are shared.

    Args:
        logits: [batch * seq, experts], optionally with further leading dims.
    """
    logits = logits.flatten(0, -2).float()
    num_experts = logits.shape[-1]
    scores = router.scores(logits)
    shares = scores / scores.sum(-1, keepdim=True)
    with torch.no_grad():
        chosen = logits.topk(router.num_chosen, dim=-1).indices
        counts = logits.new_zeros(len(sequences.weights) * num_experts)
        cells = (sequences.places * num_experts)[:, None] + chosen
        ones = sequences.fed[:, None].expand_as(chosen)
        counts.scatter_add_(0, cells.flatten(), ones.flatten())
        counts = sequences.add_up(counts)
        scale = num_experts / router.num_chosen * sequences.weights / sequences.lengths.clamp(min=1).square()
        factors = (counts.view(-1, num_experts) * scale[:, None])[sequences.places] * sequences.fed[:, None]
    return (shares * factors).sum()


class RouterTap:
    """Carries router logits out of decoder layers, through activation checkpointing and compilation.

    Checkpointing runs a layer twice and compilation runs it as a graph, so a hook that stores logits would not work.
    Instead, a layer returns the logits as an additional output. Call `open_inside` before wrapping, `open_outside`
    after.
    """

    def __init__(self, model: Any, routers: Sequence[Router]) -> None:
        """`model`: the whole model, or a pipeline stage with some of the routers."""
        modules = dict(model.named_modules())
        self._places = [index for index, router in enumerate(routers) if router.name in modules]
        self.routers = tuple(routers[index] for index in self._places)
        self.num_routers = len(routers)
        """Those of the whole model."""
        self._modules = {router.name: modules[router.name] for router in self.routers}
        self._collected: list[Tensor] | None = None
        self._num_experts = count_experts(model.config.get_text_config(decoder=True)) or 1
        self._expert_tokens: Tensor | None = None

    def open_inside(self, layers: Iterable[nn.Module]) -> None:
        """Make each layer's forward return (its output, its routers' logits)."""
        for layer in layers:
            inside = {id(module) for module in layer.modules()}
            held: list[Tensor] = []
            for router in self.routers:
                module = self._modules[router.name]
                if id(module) in inside:
                    module.tapped = (module.forward, router.index, held)
                    module.forward = MethodType(_record, module)  # a partial would be compiled for each layer
            layer.forward = partial(_deliver, layer.forward, held)

    def open_outside(self, layers: Iterable[nn.Module]) -> None:
        """Make each layer's forward return its own output again; logits are kept inside `collecting`."""
        for layer in layers:
            layer.forward = partial(self._receive, layer.forward)

    def _receive(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output, logits = forward(*args, **kwargs)
        if self._collected is not None:
            self._collected.extend(logits)
        return output

    @contextmanager
    def collecting(self) -> Iterator[list[Tensor]]:
        """Collect the logits of every router that runs in this scope, in the order of `routers`."""
        self._collected = []
        try:
            yield self._collected
        finally:
            self._collected = None

    def count_tokens(self, logits: Sequence[Tensor], sequences: Sequences) -> None:
        """Add the tokens that have each expert among their K best scores, without padding, for `take_expert_tokens`.

        Args:
            logits: of each router here, [batch * seq, experts], optionally with further leading dims.
        """
        counts = sequences.fed.new_zeros(self.num_routers, self._num_experts)
        for index, router, scores in zip(self._places, self.routers, logits, strict=True):
            chosen = scores.detach().flatten(0, -2).topk(router.num_chosen, dim=-1).indices
            ones = sequences.fed[:, None].expand_as(chosen)
            counts[index].scatter_add_(0, chosen.flatten(), ones.flatten())
        self._expert_tokens = counts if self._expert_tokens is None else self._expert_tokens + counts

    def take_expert_tokens(self, device: torch.device) -> Tensor:
        """Return the tokens of each router's experts since the last call, [routers of the whole model, experts], fp32.

        The counts of a router that is on another pipeline stage are 0.
        """
        counts, self._expert_tokens = self._expert_tokens, None
        return torch.zeros(self.num_routers, self._num_experts, device=device) if counts is None else counts


def _record(module: Any, *args: Any, **kwargs: Any) -> Any:
    forward, index, held = module.tapped
    output = forward(*args, **kwargs)
    held.append(output[index] if isinstance(output, tuple) else output)
    return output


def _deliver(forward: Callable[..., Any], held: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    held.clear()
    try:
        return forward(*args, **kwargs), tuple(held)
    finally:
        held.clear()  # logits left by a recomputation would keep the activations of the whole layer alive


def find_routers(model: PreTrainedModel) -> list[Router]:
    """Find the routers of a model on meta, by the modules that `transformers` records router logits from."""
    text = model.config.get_text_config(decoder=True)
    routers = []
    for name, (module, index) in find_recorded_routers(model).items():
        num_chosen = getattr(module, "top_k", None) or getattr(text, "num_experts_per_tok", None)
        if isinstance(num_chosen, int) and num_chosen > 0:
            routers.append(Router(name, index, num_chosen, _find_scores(module, index, text.hidden_size)))
    return routers


@torch.no_grad()
def _find_scores(router: nn.Module, index: int, hidden_size: int) -> Scores:
    """Detect the score function of a router by running a copy: its expert weights are proportional to the scores.

    Returns softmax if none of `_SCORES` fits.
    """
    module = copy.deepcopy(router).to_empty(device="cpu").float().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * hidden_size**-0.5)
    for buffer in module.buffers():
        buffer.zero_()
    try:
        outputs = module(torch.randn(_PROBE_TOKENS, hidden_size, generator=generator), *_list_biases(module))
        chosen = next(output for output in outputs if isinstance(output, Tensor) and not output.is_floating_point())
        weights = next(output for output in outputs if isinstance(output, Tensor) and output.shape == chosen.shape
                       and output.is_floating_point())  # fmt: skip
        for scores in _SCORES:
            ratios = weights.float() / scores(outputs[index].float()).gather(-1, chosen)
            if torch.allclose(ratios, ratios[:, :1].expand_as(ratios), rtol=1e-3):
                return scores
    except Exception:  # the router needs other inputs than hidden states
        return _SOFTMAX
    return _SOFTMAX


def _list_biases(router: nn.Module) -> list[Tensor]:
    """Return zeros for what a router is given besides hidden states: a bias of the experts, one number for each."""
    further = list(inspect.signature(router.forward).parameters.values())[1:]
    num_experts = next(parameter.shape[0] for parameter in router.parameters() if parameter.dim() == 2)
    return [torch.zeros(num_experts) for parameter in further if parameter.default is parameter.empty]


def find_coefficient(config: PretrainedConfig) -> tuple[str, float] | None:
    """Return the config field that requests a router loss, with its value; None if there is none."""
    fields = vars(config.get_text_config(decoder=True))
    for name in sorted(fields):
        value = fields[name]
        if "aux_loss" in name and isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
            return name, float(value)
    return None


@dataclass(frozen=True)
class RouterLoss:
    """The router loss of a run: its routers, and the coefficient as the config gives it."""

    field: str
    coefficient: float
    routers: tuple[Router, ...]

    @property
    def strength(self) -> float:
        """The factor on the mean over routers that gives the config's coefficient its original meaning.

        `aux_loss_alpha` is DeepSeek's, which sums over layers. Other fields follow `transformers`, whose sum over
        experts is K times DeepSeek's.
        """
        if self.field.endswith("alpha"):
            return self.coefficient * len(self.routers)
        return self.coefficient * sum(router.num_chosen for router in self.routers) / len(self.routers)


@dataclass(frozen=True)
class RouterChoice:
    """The router loss that a run trains with, or None, and a line for the user about it.

    `line` is None if the config requests no router loss, or the model has no experts.
    """

    loss: RouterLoss | None
    line: str | None


def choose_router_loss(skeleton: PreTrainedModel, model: nn.Module, is_wanted: bool = True) -> RouterChoice:
    """Choose the router loss that the model's config requests, if it can be trained.

    Args:
        skeleton: the unmodified model on meta.
        model: the model to be trained, with its adapter if it has one.
        is_wanted: `objective.router_loss` of the recipe.
    """
    asked = find_coefficient(skeleton.config)
    if asked is None or not has_experts(skeleton):
        return RouterChoice(None, None)
    why = f"router loss: none, although the model's {asked[0]} is {asked[1]:g}:"
    if not is_wanted:
        return RouterChoice(None, f"{why} objective.router_loss is false")
    routers = tuple(find_routers(skeleton))
    if not routers:
        return RouterChoice(None, f"{why} {type(skeleton).__name__} has no router that echelon can find")
    modules = (model.get_submodule(router.name) for router in routers)
    if not any(parameter.requires_grad for module in modules for parameter in module.parameters()):
        return RouterChoice(None, f"{why} the adapter does not train the routers")
    loss = RouterLoss(*asked, routers)
    return RouterChoice(
        loss,
        f"router loss: {loss.strength:g} ({asked[0]} {asked[1]:g}) times the sequence-wise balance loss of "
        f"{len(routers)} routers; router_loss in metrics.jsonl is the balance loss, 1 when experts are used evenly",
    )


def has_experts(model: PreTrainedModel) -> bool:
    """Whether a model is a mixture of experts: its config sets several, and some weights have "expert" in the name."""
    text = model.config.get_text_config(decoder=True)
    counts = [getattr(text, name, None) for name in EXPERT_COUNTS]
    return any(isinstance(count, int) and count > 1 for count in counts) and any(
        "expert" in name for name, _ in model.named_parameters()
    )
