"""The engines of echelon: the rows that its entry points of the group `echelon.engines` name. Imports no engine."""

from echelon.recipe.key_limits import OWN, Limit
from echelon.recipe.names import EngineRow

_WHOLE_COPIES = (
    Limit("sync.name", ("every_step",), "sums the gradients of all processes in every step"),
    Limit("sync.compress.method", ("none",), "sends gradients by its own library"),
    Limit("fault.on_lost_process", ("restart",), "cannot leave its process groups"),
)

_ONE_MODEL = "runs the whole model on every process"
DEEPSPEED = EngineRow(
    "echelon.foreign.deepspeed.zero_engine:build_deepspeed_engine",
    package="deepspeed",
    strategies=("ddp", "zero1", "zero2", "fsdp"),
    compiles=False,
    limits=(
        Limit("optim.name", ("adamw", "sgd", "lion"), "flattens parameters, and other optimizers need their shape"),
        *(Limit(f"parallel.{axis}", (1,), _ONE_MODEL) for axis in ("tp", "pp", "cp", "ep")),
        Limit("parallel.cpu_offload", (False,), "offloads by deepspeed.offload_optimizer and offload_parameters"),
        Limit("parallel.prefetch", (None,), "prefetches by zero_optimization.stage3_prefetch_bucket_size"),
        Limit("sync.name", ("every_step",), "reduces gradients in every step"),
        Limit("sync.compress.method", ("none",), "sends gradients as they are"),
        Limit("objective.name", ("causal_lm", OWN), "has no pass for a reference or for means over the batch"),
        Limit("adapter.method", ("full", "lora"), "casts all weights, so packed and rescaled ones do not work"),
        Limit("adapter.init", ("default",), "casts all weights, and this start changes the frozen ones"),
        Limit("train.precision", ("auto", "fp32", "bf16", "fp16"), "has no float8"),
        Limit("train.master_weights", ("fp32",), "keeps master weights in fp32"),
        Limit("train.compile", ("auto", False), "does not compile layers"),
        Limit("train.activation_offloading", (False,), "keeps activations on the device"),
        Limit("train.activation_checkpointing.mlp_tiles", (None,), "gathers and reduces weights by modules"),
        Limit("fault.on_lost_process", ("restart",), "cannot leave its process groups"),
        Limit("fault.verify_replicas_every", (None,), "has partitions, which have no copies to compare"),
        Limit("fault.verify_passes_every", (None,), "was not tested with it"),
    ),
    purpose="ZeRO by DeepSpeed: its config, its tuning, and offloading of the optimizer alone",
    instead="parallel: zero1, zero2 or fsdp on fully_shard, and parallel.cpu_offload for all states",
    check="echelon.planner.deepspeed_settings:check_settings",
)
NATIVE = EngineRow("echelon.learn.engines.native_build:build_native_engine", purpose="PyTorch's DDP and fully_shard")
HOROVOD = EngineRow(
    "echelon.foreign.horovod:build_horovod_engine",
    package="horovod",
    strategies=("ddp",),
    limits=_WHOLE_COPIES,
    purpose="clusters that have Horovod: its ring all-reduce, fusion and fp16 compression",
    instead="parallel: ddp, and sync.compress.method=fp16",
)
TENSORFLOW = EngineRow(
    "echelon.foreign.tensorflow.tensorflow_engine:build_tensorflow_engine",
    package="keras_hub",
    strategies=("ddp",),
    compiles=False,
    limits=(
        *_WHOLE_COPIES,
        Limit("adapter.method", ("full",), "trains all weights: keras-hub's backbones take no adapter of PEFT"),
        Limit("objective.name", ("causal_lm",), "computes the loss of next tokens only"),
        Limit("data.document_mask", ("auto", False), "cannot keep the documents of a sequence apart"),
        Limit("optim.name", ("adamw",), "has no kernel of it"),
        Limit("train.precision", ("auto", "fp32"), "computes in fp32"),
        Limit("train.master_weights", ("fp32",), "computes in fp32"),
        Limit("train.compile", ("auto", False), "does not use PyTorch's compiler"),
        Limit("train.activation_checkpointing", ("auto", "none"), "keeps all activations"),
        Limit("train.activation_offloading", (False,), "keeps all activations on the device"),
        Limit("train.deterministic", (False,), "does not check TensorFlow's kernels for it"),
        Limit("profile.steps", (None,), "is not seen by PyTorch's profiler"),
        Limit("evaluate.tasks", ((),), "computes the logits of one position of a text alone"),
        Limit("fault.verify_passes_every", (None,), "computes the logits of one position of a text alone"),
    ),
    purpose="people with a TensorFlow stack: its mirrored strategies, of a Llama on CPUs",
    instead="parallel: ddp",
    check="echelon.planner.engine_limits:check_tensorflow",
)
