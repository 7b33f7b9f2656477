#!/bin/bash
# agent.sh HOST starts this host's agent in the background, in its own session, so that it outlives ssh.
files='/work dir/jobs/demo-20300102-030405'/host-$1
if [ "$2" != here ]; then
  setsid bash "$0" "$1" here < /dev/null > "$files.log" 2>&1 &
  # Its process id is its process group's too, which exists, and handles signals, once the file does.
  until [ -s "$files.pid" ] || ! kill -0 $! 2> /dev/null; do sleep 0.02; done
  exit
fi
trap 'echo $? > "$files.code"' EXIT
trap 'echo stopped before training began; exit 1' TERM INT USR1
echo $$ > "$files.pid"
cd '/work dir' || exit 2
export ECHELON_GPUS='any launch.to=torchrun'
# This shell ignores signals, so that it can write the exit code of training.
trap : TERM INT USR1
python3 -m echelon train '/work dir/jobs/demo-20300102-030405/recipe.yaml' --nodes 2 --rendezvous a:29400
