#!/bin/bash
@DIRECTIVES@

@NAMES@
# Slurm signals this shell too when it ends the job; the shell ignores it, to write the exit code of training.
trap : TERM INT USR1
finish() {
    echo "$1" > "$job/exit_code.new" && mv "$job/exit_code.new" "$job/exit_code"
    exit "$1"
}
rm -f "$job/exit_code" "$job/bad_machines"
if [ -e "$job/cancelled" ]; then finish 3; fi
@IF unbound

# Each task uses all cores of its machine. srun would warn of the option where the site binds no tasks.
bind=(--cpu-bind=none)
if scontrol show config 2> /dev/null | grep -Eq '^TaskPlugin *= *(task/none|\(null\)) *$'; then bind=(); fi
@END

# Each machine says what it does not see; without this, the others would wait for it until they give up.
mapfile -t needed < "$job/needed.txt"
srun@BIND@ --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    @LOOK@ \
    bash -c 'for path; do
        [ -e "$path" ] || { echo "echelon: $SLURMD_NODENAME does not see $path, which all machines need; share" \
            "it, or leave this one out: launch.slurm.options={exclude: $SLURMD_NODENAME}" >&2; code=2; }
    done
    exit "${code:-0}"' look "$job/machine.sh" "${needed[@]}"
@IF fixed
if [ $? -eq 2 ]; then finish 2; fi
@END
if [ -e "$job/cancelled" ]; then finish 3; fi

# SageMaker HyperPod replaces a failed machine and runs the step again.
auto_resume=()
if [ -d /opt/sagemaker_cluster ]; then auto_resume=(--auto-resume=1); fi
@IF elastic

# The machines of an elastic job meet at the first one.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export ECHELON_RENDEZVOUS="${ECHELON_RENDEZVOUS:-$first:$((20000 + SLURM_JOB_ID % 10000))}"
@END

@IF many
# Each line of the output begins with the machine that printed it, in place of the number that srun gives its task.
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
name_lines() {
    trap '' TERM INT USR1
    while IFS= read -r line || [ "$line" ]; do
        if [[ $line =~ ^\ *([0-9]+):\ (.*)$ ]]; then
            line="${machines[10#${BASH_REMATCH[1]}]:-${BASH_REMATCH[1]}} | ${BASH_REMATCH[2]}"
        fi
        printf '%s\n' "$line"
    done
}

@END
# One task per machine, which starts the machine's processes. Their agents write which machines are lost or bad.
export ECHELON_BAD_MACHINES="$job/bad_machines"
srun "${auto_resume[@]}"@BIND@ --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    @TASK@@NAMED@
code=${PIPESTATUS[0]}
is_stopped() { tail -n 1 "$run/events.jsonl" | grep -q 'stopped by SIG\(TERM\|USR1\)'; }
@IF elastic

# A lost machine makes srun fail; outcome.json exists if the other machines finished the run.
if [ "$code" -gt 3 ] && [ -e "$run/outcome.json" ]; then code=0; fi
if [ "$code" -gt 3 ] && [ -e "$job/bad_machines" ] && is_stopped; then code=3; fi
@END

# 138 and 143: USR1 or TERM arrived before training began, so there was nothing to save.
early=
if [ "$code" -eq 138 ] || [ "$code" -eq 143 ]; then code=3 early=yes; fi
@IF requeue

# The machines that are lost or bad, after those that the request leaves out, if Slurm has enough others.
bad=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -Fxf <(sed 's/ .*//' "$job/bad_machines" 2> /dev/null))
excluded=
if [ "$bad" ] && [ "$code" -ne 0 ]; then
    excluded=$(scontrol --oneliner show job "$id" | sed -n 's/.* ExcNodeList=\([^ (]\S*\).*/\1,/p')${bad//$'\n'/,}
    if ! sbatch --test-only --exclude="$excluded" "$0" &> /dev/null; then
        echo "echelon: Slurm has no machines to take the place of ${bad//$'\n'/, }"
        excluded=
    fi
fi

# Requeue the job if a signal stopped training after a save, not a budget or `echelon cancel`, or because a machine
# was lost or bad and there is another one. If Slurm itself ends the job (scancel, preemption), its state is no longer
# RUNNING, and Slurm decides whether to requeue it.
most=0
if [ "$code" -eq 3 ] && { [ "$early" ] || is_stopped; }; then
    most=1
elif [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "$excluded" ] && grep -q ' ends$' "$job/bad_machines"; then
    most=@ROUNDS@
fi
if [ $most -gt 0 ] && [ ! -e "$job/cancelled" ] &&
    scontrol --oneliner show job "$id" | grep -q ' JobState=RUNNING '; then
    newest=$(find "$run/checkpoints" -maxdepth 1 -name 'step-*' 2> /dev/null | sort | tail -n 1)
    touch "$job/requeued"
    if [ "$(grep -cxF -- "$newest" "$job/requeued")" -ge $most ]; then
        echo "echelon: job $id is not requeued: no new checkpoint since the last requeue; see launch.max_hours"
    else
        echo "$newest" >> "$job/requeued"
        without=${excluded:+ without ${bad//$'\n'/, }}
        echo "echelon: job $id is requeued$without and will resume from ${newest:-the beginning}"
        if scontrol requeue "$id"; then
            # Slurm takes it once the job waits, and ends this shell's children meanwhile.
            if [ "$excluded" ]; then (trap '' TERM; scontrol update JobId="$id" ExcNodeList="$excluded"); fi
            exit 3
        fi
    fi
fi
@END

finish "$code"
