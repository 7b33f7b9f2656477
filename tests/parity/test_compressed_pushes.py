"""Compressed pushes to parameter servers: the bytes, what is kept for the next push, and the losses."""

import pytest
import torch
import torch.distributed as dist

from echelon.learn.sync.pushes import PushCode, Pusher
from echelon.recipe.synchronization import CompressConfig
from tests.parity.push_oracle import add_up
from tests.parity.test_parameter_server import STEPS, alone, served
from tests.parity.training import check_exact_resume, losses_of, prepare, tensors_of, train

SHAPES = {"weight": (30, 20), "bias": (7,), "other": (300,)}
SIZES = [600, 7, 300]
BYTES = {"none": 4 * 907, "bf16": 2 * 907, "fp16": 2 * 907, "int8": 4 * 260, "topk": 8 * (60 + 1 + 30)}


def push_twice(rank, world_size, method):
    """Two pushes of the same gradients, as bytes, and what a server reads."""
    config = CompressConfig(method=method, **({"fraction": 0.1} if method == "topk" else {}))
    torch.manual_seed(1)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    pusher, code = Pusher(config, tensors, dist.group.WORLD), PushCode(config, SIZES)
    whole, sent = torch.cat([each.flatten() for each in tensors.values()]), []
    for _ in range(2):
        message = pusher.encode(tensors)
        assert (message.dtype, len(message)) == (torch.uint8, code.num_bytes)
        sent.append(code.decode(message))
        pusher.settle(torch.tensor(True))
    return code.num_bytes, whole, *sent


@pytest.mark.dist
@pytest.mark.parametrize("method", list(BYTES))
def test_a_server_reads_what_was_pushed(workers, method):
    [(num_bytes, whole, first, second)] = workers.run(push_twice, 1, method)
    assert num_bytes == BYTES[method]
    if method == "topk":
        corrected, expected = torch.zeros(907), []
        for _ in range(2):  # arXiv:1809.07599, for each tensor
            corrected = corrected + whole
            sent = torch.zeros(907)
            for part, into in zip(corrected.split(SIZES), sent.split(SIZES), strict=True):
                places = part.abs().sort(descending=True).indices[: max(1, int(0.1 * len(part)))]
                into[places] = part[places]
            corrected = corrected - sent
            expected.append(sent)
        assert torch.allclose(first, expected[0]) and torch.allclose(second, expected[1])
        assert not torch.equal(first, second)
    else:
        largest = torch.nn.functional.pad(whole.abs(), (0, 117)).view(4, 256).amax(1).repeat_interleave(256)[:907]
        bound = {"none": 0.0 * whole, "bf16": whole.abs() / 2**8, "fp16": whole.abs() / 2**10, "int8": largest / 254}
        near_zero = 0.0 if method == "none" else 1e-6
        assert torch.equal(first, second) and ((first - whole).abs() <= bound[method] * 1.001 + near_zero).all()


def round_to_bf16(gradients, kept):
    return {name: each.bfloat16().float() for name, each in gradients.items()}


def round_blocks(gradients, kept):
    """Each block of 256 numbers to 1/127 of its largest."""
    flat, rounded = torch.cat([each.flatten() for each in gradients.values()]), []
    for block in flat.split(256):
        unit = block.abs().max() / 127
        rounded.append(torch.round(block / unit) * unit if unit > 0 else block)
    parts = torch.cat(rounded).split([each.numel() for each in gradients.values()])
    return {name: part.view_as(each) for (name, each), part in zip(gradients.items(), parts, strict=True)}


def take_largest(gradients, kept):
    """Algorithm 1 of arXiv:1809.07599, for the largest 30 % of each tensor."""
    sent = {}
    for name, gradient in gradients.items():
        corrected = gradient + kept.get(name, 0)
        order = corrected.abs().flatten().argsort(descending=True)[: max(1, int(0.3 * gradient.numel()))]
        sent[name] = torch.zeros_like(corrected)
        sent[name].view(-1)[order] = corrected.flatten()[order]
        kept[name] = corrected - sent[name]
    return sent


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "compress", "tolerance"),
    [("bf16", round_to_bf16, 1e-4), ("int8", round_blocks, 1e-4), ("topk", take_largest, 1e-5)],
)
def test_losses_are_those_of_compressed_gradients_in_plain_torch(workers, text, tmp_path, method, compress, tolerance):
    sgd = {"optimizer": "sgd", "optim": {"momentum": 0.9, "learning_rate": 0.05, "weight_decay": 0.0}}
    fraction = {"fraction": 0.3} if method == "topk" else {}
    row = served(2, 1, **sgd, compress={"method": method, **fraction})
    found = losses_of(train(workers, row, tmp_path / "servers", text, STEPS))
    path, plan = prepare(alone(row), tmp_path / "alone", text, STEPS)
    assert found == pytest.approx(workers.run(add_up, 1, str(path), plan, 2, compress)[0], abs=tolerance)
    plain = workers.run(add_up, 1, str(path), plan, 2, send_whole)[0]
    assert found != pytest.approx(plain, abs=tolerance), "the compression makes a difference"


def send_whole(gradients, kept):
    return gradients


@pytest.mark.dist
@pytest.mark.slow
def test_asynchronous_workers_learn_with_compressed_pushes(workers, text, tmp_path):
    row = served(2, 2, max_staleness=2, compress={"method": "topk", "fraction": 0.3})
    found = losses_of(train(workers, row, tmp_path, text, STEPS))
    assert found[-1] < found[0] - 1


@pytest.mark.dist
@pytest.mark.slow
def test_what_was_not_pushed_is_in_the_checkpoint(workers, text, tmp_path):
    row = served(2, 2, compress={"method": "topk", "fraction": 0.1})
    check_exact_resume(lambda *args, **kw: train(workers, row, *args, **kw), tmp_path, text, 6)
    saved = tensors_of(tmp_path / "straight/run", 6)
    ours, theirs = (saved[f"rank-000{rank}.residual.lm_head.weight"] for rank in range(2))
    assert ours.abs().sum() > 0 and not torch.equal(ours, theirs)
