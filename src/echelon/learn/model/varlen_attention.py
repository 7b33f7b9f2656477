"""Causal attention over documents of varying length, by the flash kernels of torch, without a mask.

A mask of [seq, seq] rules out flash attention and its skipping of hidden blocks. `torch.nn.attention.varlen` takes the
start of each document instead. It needs a GPU; elsewhere, and for what the kernels lack, the same is computed with a
mask made from the starts. `transformers` knows this implementation as `VARLEN`, and builds no mask for it.
"""

import inspect
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from echelon.learn.model.parts import autocast_dtype

VARLEN = "echelon_varlen"
# The widest heads of torch's flash kernels.
_WIDEST = 256
# Releases differ in whether fewer heads of keys than of queries are to be announced.
_ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
_HALVES = (torch.bfloat16, torch.float16)
# Outputs and gradients of the kernels may differ from those in fp32 by this fraction of their norm. Rounding to bf16 is
# 20 times smaller; a wrong argument makes a difference of the order of 1.
TOLERANCE = 0.1


def count_starts(num_documents: int) -> int:
    """Return for how many documents of a sequence to make room: the next power of two, so that sizes seldom change."""
    return 1 << max(0, num_documents - 1).bit_length()


def find_starts(position_ids: Tensor, room: int | None = None) -> dict[str, Any]:
    """Return where documents start, over all sequences end to end, in the words of `transformers`' flash attention.

    The host does not wait for the device: there is room for a given number of documents, and the last ones are empty.

    Args:
        position_ids: [batch, seq], int64, from 0 in each document.
        room: at least the number of documents; None makes room for a document per token.

    Returns:
        `cu_seq_lens_q` and `cu_seq_lens_k`, [room + 1], int32, the starts and then the number of all tokens;
        `max_length_q` and `max_length_k`, a bound for the longest document.
    """
    total, width, device = position_ids.numel(), position_ids.shape[1], position_ids.device
    number = (position_ids.flatten() == 0).cumsum(0) - 1
    starts = torch.full((1 + (total if room is None else room),), total, dtype=torch.int64, device=device)
    starts.scatter_reduce_(0, number, torch.arange(total, device=device), "amin")
    starts = starts.to(torch.int32)
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": width, "max_length_k": width}


def has_kernel(device: torch.device, dtype: torch.dtype, config: PretrainedConfig) -> bool:
    """Whether the flash kernels of this torch compute a model's attention rightly on this device, in this dtype.

    Runs them once, forward and backward, on a few short documents with a window, and compares with the mask in fp32.
    """
    width = head_width(config)
    if device.type != "cuda" or dtype not in _HALVES or width is None or width > _WIDEST:
        return False
    return find_error(run_kernel, device, dtype, width) < TOLERANCE


def activate_flash_3(device: torch.device, dtype: torch.dtype, config: PretrainedConfig) -> bool:
    """Have the kernels be those of FlashAttention-3 in this process, if they compute a model's attention rightly.

    They need the package `flash_attn_interface` and a Hopper GPU, for which it is faster than torch's own version 2,
    and know no dropout. Returns whether they are active; `deactivate_flash_3` undoes it.
    """
    if device.type != "cuda" or has_dropout(config) or find_spec("flash_attn_interface") is None:
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        activate_flash_attention_impl("FA3")
    except Exception:  # a package that was built for another torch may fail in any way
        return False
    return has_kernel(device, dtype, config)


def deactivate_flash_3() -> None:
    """Have the kernels be torch's own again, if they are not."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def has_dropout(config: PretrainedConfig) -> bool:
    """Whether a model drops attention probabilities in training."""
    text = config.get_text_config(decoder=True)
    return any(getattr(text, name, 0) for name in ("attention_dropout", "attn_pdrop"))


def head_width(config: PretrainedConfig) -> int | None:
    """Return the width of a model's heads; None if it is not known, differs, or values have another than queries."""
    text = config.get_text_config(decoder=True)
    # Where layers differ, `transformers` refuses to read what differs from the config of all.
    widths = {_layer_width(layer) for layer in getattr(text, "per_layer_config", None) or (text,)}
    return widths.pop() if len(widths) == 1 else None


def _layer_width(config: PretrainedConfig) -> int | None:
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not heads or not hidden:
        return None
    width: int = getattr(config, "head_dim", None) or hidden // heads
    return width if getattr(config, "v_head_dim", width) == width else None


def find_error(
    attend: Any, device: torch.device, dtype: torch.dtype, width: int, reference: Any = None, stretch: int = 1
) -> float:
    """Return the largest relative error of the output and the gradients; infinite if the call fails.

    Args:
        attend: takes query, key, value, starts, window and scale; returns [batch, seq, heads, width].
        reference: computes the same in fp32; None for plain attention with a mask.
        stretch: the factor on the lengths of documents, 7 to 41.
    """
    heads, key_heads, length = 4, 2, 48 * stretch
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        shapes = [(2, heads, length, width), (2, key_heads, length, width), (2, key_heads, length, width)]
        inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
        gradient = torch.randn(2, length, heads, width, device=device)
    positions = torch.cat([torch.arange(stretch * share, device=device) for share in (20, 28, 7, 41)]).view(2, length)
    starts, errors = find_starts(positions, 8)["cu_seq_lens_q"], list[float]()
    for window in (None, 9 * stretch):
        exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
        query, key, value = exact
        expected = (reference or _attend_masked)(query, key, value, starts, window, width**-0.5)
        try:
            output = attend(*inputs, starts, window, width**-0.5)
            pairs = [(output.float(), expected)]
            grads = torch.autograd.grad((output.float() * gradient).sum(), inputs)
        except Exception:  # a release may lack an argument, a device a kernel
            return float("inf")
        exact_grads = torch.autograd.grad((expected * gradient).sum(), exact)
        pairs += [(grad.float(), other) for grad, other in zip(grads, exact_grads, strict=True)]
        errors += [((actual - other).norm() / other.norm()).item() for actual, other in pairs]
    return max(errors)


def run_kernel(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, window: int | None, scale: float) -> Tensor:
    """[batch, heads, seq, width] to [batch, seq, heads, width], by `varlen_attn`."""
    batch, length = query.shape[0], query.shape[2]
    queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    back = -1 if window is None else window - 1  # a window of n tokens reaches n - 1 back
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _ASKS_FOR_GROUPS else {}
    output = varlen_attn(
        queries, keys, values, starts, starts, length, length, scale=scale, window_size=(back, 0), **options
    )
    assert isinstance(output, Tensor)
    return output.view(batch, length, *output.shape[1:])


def _attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    window: int | None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The same with a mask. Queries may be fewer than keys; they are the last ones."""
    shared = query.shape[1] != key.shape[1]
    mask = find_visible(query, key, starts, window)
    output = scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale, enable_gqa=shared)
    return output.transpose(1, 2)


def find_visible(query: Tensor, key: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
    """Return which keys a query attends to, bool [batch, 1, queries, keys]; `starts` as of `find_starts`."""
    batch, length, device = query.shape[0], key.shape[2], query.device
    places = torch.arange(length, device=device)
    queries = places[length - query.shape[2] :]
    mask = (queries[:, None] >= places).expand(batch, 1, -1, -1)
    if window is not None:
        mask = mask & (queries[:, None] - places < window)
    if starts is not None:
        documents = number_documents(starts, batch, length)
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return mask


def number_documents(starts: Tensor, batch: int, length: int) -> Tensor:
    """Return the number of the document of each position, [batch, seq]; `starts` as of `find_starts`."""
    everything = torch.arange(batch * length, dtype=starts.dtype, device=starts.device)
    return torch.bucketize(everything, starts, right=True).view(batch, length)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that `transformers` calls. Without starts, each sequence is one document.

    Sinks and caps of scores are left out: on the small copy of `traits` they do not change which positions are attended
    to, and elsewhere models that have them do not get this implementation.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    starts, dtype, is_square = cu_seq_lens_q, autocast_dtype(query), query.shape[2] == key.shape[2]
    shared = query.shape[1] != key.shape[1]
    if attention_mask is not None or (starts is None and sliding_window is None and is_square):
        output = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, attention_mask is None, scale=scale, enable_gqa=shared
        )
        return output.transpose(1, 2), None
    fits = is_square and query.shape[-1] == value.shape[-1] <= _WIDEST and not dropout
    if query.device.type == "cuda" and dtype in _HALVES and fits:
        if starts is None:
            batch, length = query.shape[0], query.shape[2]
            starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        return run_kernel(query.to(dtype), key.to(dtype), value.to(dtype), starts, sliding_window, scale), None
    return _attend_masked(query, key, value, starts, sliding_window, scale, dropout), None


AttentionInterface.register(VARLEN, _attend)
