"""The engine `horovod`: the native engine, whose gradients Horovod sums."""

from echelon.foreign.horovod_ranks import find_group_bytes, start_horovod
from echelon.ground.sizes import render_bytes
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.engines.engine import EngineSpec
from echelon.learn.engines.native import NativeEngine
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.parallel.data_parallel import autocast_scope
from echelon.learn.parallel.horovod_sum import HorovodSum
from echelon.learn.parallel.protocol import DataParallel
from echelon.planner.plan import ParallelPlan


def build_horovod_engine(spec: EngineSpec) -> NativeEngine:
    """Start Horovod over the ranks of the job, and build the native engine around its sums. Collective.

    Raises ConfigError if Horovod is not installed, and LaunchError if its ranks are not those of the job.
    """
    variables = spec.recipe.launch.env
    hvd = start_horovod(variables)
    group_bytes, in_fp16 = find_group_bytes(variables), spec.recipe.horovod.compression == "fp16"

    def sum_by_horovod(module: ObjectiveModule, plan: ParallelPlan, meshes: Meshes, seed: int) -> DataParallel:
        return HorovodSum(module, autocast_scope(plan, meshes.device_type), hvd, group_bytes, in_fp16)

    sends = f"horovod: gradients are summed in groups of at most {render_bytes(group_bytes)}"
    lossy = ", in fp16; lossy: the losses are not those of horovod.compression: none" if in_fp16 else ""
    return build_native_engine(spec, parallelize=sum_by_horovod, description=[sends + lossy])
