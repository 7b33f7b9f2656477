#!/bin/bash
cd '/home/me/it'"'"'s $HOME' || exit 2
export ECHELON_GPUS='8 launch.nproc_per_node=8'
export GREETING='it'"'"'s $HOME'
trap 'echo "echelon: launch.setup failed with exit code $?: $BASH_COMMAND" >&2; exit 1' ERR
module load cuda
trap - ERR
exec '/opt/a b/bin/python' -m echelon train '/home/me/it'"'"'s $HOME/jobs/demo-1/recipe.yaml' --nproc 8 --nodes "2:$SLURM_STEP_NUM_NODES" --rendezvous "$ECHELON_RENDEZVOUS"
