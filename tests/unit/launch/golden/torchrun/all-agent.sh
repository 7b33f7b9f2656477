#!/bin/bash
# agent.sh HOST starts this host's agent in the background, in its own session, so that it outlives ssh.
files='/mnt/a b/jobs/demo-20300102-030405'/host-$1
if [ "$2" != here ]; then
  setsid bash "$0" "$1" here < /dev/null > "$files.log" 2>&1 &
  # Its process id is its process group's too, which exists, and handles signals, once the file does.
  until [ -s "$files.pid" ] || ! kill -0 $! 2> /dev/null; do sleep 0.02; done
  exit
fi
trap 'echo $? > "$files.code"' EXIT
trap 'echo stopped before training began; exit 1' TERM INT USR1
echo $$ > "$files.pid"
cd '/mnt/a b' || exit 2
export ECHELON_GPUS='any launch.to=torchrun'
export GREETING='it'"'"'s $5
now'
trap 'echo "echelon: launch.setup failed with exit code $?: $BASH_COMMAND" >&2; exit 1' ERR
module load cuda
source "/opt/a b/activate"
trap - ERR
# This shell ignores signals, so that it can write the exit code of training.
trap : TERM INT USR1
timeout --foreground --preserve-status --signal=TERM 5400 '/opt/py 3/bin/python' -m echelon train '/mnt/a b/jobs/demo-20300102-030405/recipe.yaml' --nproc 8 --nodes 1:2 --rendezvous 10.0.0.7:1234 --interface ib0
