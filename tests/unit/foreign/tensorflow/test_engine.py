"""What engine=tensorflow refuses as it starts, before anything of TensorFlow is needed."""

import numpy as np
import pytest
import torch

from echelon.foreign.tensorflow.tensorflow_engine import TensorflowEngine, build_tensorflow_engine
from echelon.ground.errors import ConfigError
from echelon.learn.data.loader import Microbatch
from echelon.learn.engines import EngineSpec
from echelon.learn.objectives.causal_lm import CausalLM


def test_documents_in_one_sequence_are_refused() -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    documents = torch.tensor([[0, 0, 1, 1]])
    packed = Microbatch(ids, ids, np.zeros(1, np.int64), np.zeros(1, np.int64), documents, documents)
    with pytest.raises(
        ConfigError, match=r"several in one; set data\.packing=false for instructions, or data\.document"
    ):
        TensorflowEngine(None, None, []).rehearse(packed, 1, CausalLM())  # type: ignore[arg-type]


def test_a_gpu_is_refused() -> None:
    spec = EngineSpec(None, None, None, None, torch.device("cuda"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="trains on CPUs only, and this process has a GPU"):
        build_tensorflow_engine(spec)
