"""Pretends to be one H100: inductor generates, and Triton compiles, kernels for sm_90 on a machine without a GPU.

Needs a CUDA build of torch and a C compiler. Tensors must be fake: nothing can run. `install` changes this process for
good, and must be called before torch is imported.

torch's autograd asks the driver which GPUs have a context, before it looks at any tensor. A library that takes the
driver's place answers: none.
"""

import collections
import contextlib
import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace

# What torch's libcaffe2_nvrtc names of the driver; it is loaded only if all of them exist.
_UNUSED = """CtxGetCurrent CtxSetCurrent DeviceGet DeviceGetAttribute DevicePrimaryCtxRetain FuncGetAttribute
FuncSetAttribute FuncSetCacheConfig GetErrorString LaunchCooperativeKernel LaunchKernel LinkAddData_v2 LinkComplete
LinkCreate_v2 ModuleGetFunction ModuleLoad ModuleLoadData ModuleLoadDataEx ModuleUnload
OccupancyMaxActiveBlocksPerMultiprocessor PointerGetAttribute TensorMapEncodeTiled"""
# 100 is CUDA_ERROR_NO_DEVICE. torch's own count of devices is replaced too, once its device guard is: the guard of a
# build without GPUs says that there are many devices. From the properties of the device, SDPA chooses its kernel: it
# reads the capability, which is at byte 360 of CUDA 13's struct.
_SOURCE = """
signed char counted = 0;
signed char _ZN3c104cuda12device_countEv(void) { return counted; }
struct { char before[360]; int major, minor; char after[4096]; } device = {.major = 9, .minor = 0};
void *_ZN2at4cuda26getCurrentDevicePropertiesEv(void) { return &device; }
int cuInit(unsigned flags) { return 100; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
""" + "".join(f"int cu{name}(void) {{ return 100; }}\n" for name in _UNUSED.split())
_MANY = 127

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=85_000_000_000,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20, gcnArchName="", is_integrated=False,
)  # fmt: skip


class Compiled:
    """What has been compiled: the `kernels` by name, those that failed, and the `code` that calls them."""

    def __init__(self):
        self.kernels = collections.Counter()
        self.failures = []
        self.code = []


def install(folder: Path) -> Compiled:
    """Make this process believe in one H100; `folder` gets the library in the driver's place."""
    (folder / "driver.c").write_text(_SOURCE)
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, folder / "driver.c"]
    subprocess.run(command, check=True)
    driver = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # global: it comes before torch's own libraries

    import torch

    torch._C._ensureCUDADeviceGuardSet()
    ctypes.c_int8.in_dll(driver, "counted").value = _MANY
    _replace_torch_cuda(torch)
    return _watch_compilation(torch)


def _replace_torch_cuda(torch):
    """Answer what inductor and the models ask about the device."""
    from torch._dynamo.device_interface import CudaInterface

    answers = {
        "is_available": True, "current_device": 0, "device_count": 1, "get_device_properties": H100,
        "get_device_capability": (9, 0), "get_device_name": H100.name, "_lazy_init": None, "is_bf16_supported": True,
        "synchronize": None, "set_device": None, "set_rng_state": None, "_exchange_device": -1,
        "_maybe_exchange_device": -1, "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, _answering(answer))
    torch.cuda.default_generators = (_build_generator(torch),)
    for owner, names in {
        CudaInterface: {"is_available": True, "get_device_properties": H100, "get_compute_capability": 90,
                        "current_device": 0, "get_raw_stream": 0, "synchronize": None},
        CudaInterface.Worker: {"get_device_properties": H100, "current_device": 0},
    }.items():  # fmt: skip
        for name, answer in names.items():
            setattr(owner, name, staticmethod(_answering(answer)))
    torch._C._cuda_getCurrentRawStream = _answering(0)
    torch._subclasses.fake_tensor.init_gpu_context = _answering(None)


def _build_generator(torch):
    """The device's random numbers, of which attention keeps the state for when it is recomputed."""

    class Generator(torch.Generator):
        clone_state = graphsafe_get_state = lambda self: self
        graphsafe_set_state = lambda self, state: self  # noqa: E731
        device = torch.device("cuda", 0)

    return Generator()


def _answering(answer):
    return lambda *arguments, **options: answer


def _watch_compilation(torch):
    """Have Triton compile for sm_90 without loading, and note what it compiles."""
    import torch._inductor.config as config
    import torch._inductor.runtime.triton_helpers as helpers
    import triton
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction, MockTensor

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(_answering(0))
        get_current_stream = staticmethod(_answering(0))
        get_device_capability = staticmethod(_answering((9, 0)))
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
        is_active = staticmethod(_answering(True))

    triton.runtime.driver.set_active(Driver())
    helpers.set_driver_to_gpu = _answering(None)
    config.compile_threads, config.fx_graph_cache, config.max_autotune = 1, False, False
    config.triton.cudagraphs = False
    compiled, precompile, launch = Compiled(), CachingAutotuner.precompile, JITFunction.run

    @contextlib.contextmanager
    def noting(kernel):
        try:
            yield
            compiled.kernels[kernel.__name__] += 1
        except Exception as error:
            compiled.failures.append(f"{kernel.__name__}: {error!r:.300}")

    def compile_alone(self, warm_cache_only=False, **options):
        with noting(self.fn):
            precompile(self, warm_cache_only=True)

    def compile_launched(self, *arguments, warmup, **options):
        """For kernels that are called outside inductor: Triton needs no more of a tensor than its dtype."""
        given = [each.dtype if isinstance(each, torch.Tensor) else each for each in arguments]
        with noting(self):
            launch(self, *map(MockTensor.wrap_dtype, given), warmup=True, **options)

    CachingAutotuner.precompile, JITFunction.run = compile_alone, compile_launched
    GraphLowering.save_output_code = staticmethod(compiled.code.append)
    return compiled


@contextlib.contextmanager
def fake_tensors():
    """A context in which every new tensor is fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
