#!/bin/bash
# Trains a job of raypar on the nodes that Slurm gives:  sbatch cluster/slurm.sh jobs/quickstart.yaml [--set plan.stages=4 ...]
# Run it in the folder with the job's functions, in the environment in which raypar is installed. Both, RAYPAR_RUN_DIR and $HOME
# must be on storage that all nodes share.
# When the time is nearly over or the nodes are wanted, the run is saved and the job queued again; it goes on from there.
#
#SBATCH --job-name=raypar
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=raypar-%j.log
set -euo pipefail

job_file="${1:?usage: sbatch cluster/slurm.sh JOB.yaml [options of raypar train]}"
shift
run_dir="${RAYPAR_RUN_DIR:-$PWD/runs}"
nodes="${SLURM_JOB_NUM_NODES:?not inside a Slurm job: use sbatch}"
cpus="${SLURM_CPUS_PER_TASK:-1}"
head_node="$(hostname)"                # the batch script runs on the first node of the job
head_ip="${RAYPAR_HEAD_IP:-$(hostname -I | cut -d' ' -f1)}"
port="$((20000 + SLURM_JOB_ID % 20000))"   # jobs may share a node
address="$head_ip:$port"

# Whoever knows the token may run code in the cluster: it is made for this job, and only this user can read it.
umask 077
state="$HOME/.raypar/slurm-$SLURM_JOB_ID"
mkdir -p "$state"
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$state/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$state/token" RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS

steps=()
trainer=""
stopped=""
# shellcheck disable=SC2329  # called by a trap
stop_trainer() {
    stopped=yes
    if [[ -n "$trainer" ]]; then kill -TERM "$trainer" 2>/dev/null || true; fi
}
# shellcheck disable=SC2329  # called by a trap
end_cluster() {
    for ((i = ${#steps[@]} - 1; i >= 0; i--)); do   # the head last: nodes that leave tell it
        kill -TERM "${steps[i]}" 2>/dev/null || true
        wait "${steps[i]}" 2>/dev/null || true
    done
    rm -rf "$state"
}
trap stop_trainer TERM
trap end_cluster EXIT

# Ports other than the head's are any free ones. A node that fails takes neither the job nor the other nodes' step with it.
any_ports=(--min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0 --num-cpus="$cpus" --block)
head_ports=(--port="$port")
if python -c 'import grpc' 2>/dev/null; then   # with it Ray serves clients, at one port for all clusters unless told otherwise
    head_ports+=(--ray-client-server-port="$((port + 1))")
fi
srun --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --overlap --nodelist="$head_node" \
    ray start --head --node-ip-address="$head_ip" "${head_ports[@]}" --include-dashboard=false \
    --temp-dir="/tmp/ray-$SLURM_JOB_ID" "${any_ports[@]}" &
steps+=("$!")

deadline="$((SECONDS + ${RAYPAR_HEAD_WAIT_S:-180}))"
until ray health-check --address "$address" >/dev/null 2>&1; do
    if ((SECONDS > deadline)) || ! kill -0 "${steps[0]}" 2>/dev/null; then
        echo "Ray's head did not start at $address" >&2
        exit 1
    fi
    sleep 1
done

if ((nodes > 1)); then
    srun --nodes="$((nodes - 1))" --ntasks="$((nodes - 1))" --cpus-per-task="$cpus" --overlap --exclude="$head_node" \
        --no-kill --wait=0 --kill-on-bad-exit=0 \
        ray start --address="$address" "${any_ports[@]}" &
    steps+=("$!")
fi

status=0
if [[ -z "$stopped" ]]; then
    python -m raypar train "$job_file" --resume --address "$address" --set "run_dir=$run_dir" "$@" &
    trainer="$!"
    wait "$trainer" || status="$?"
    while kill -0 "$trainer" 2>/dev/null; do   # a signal has ended `wait`: the run is still being saved
        status=0
        wait "$trainer" || status="$?"
    done
fi
if [[ -n "$stopped" && "$status" != 0 ]]; then
    echo "stopped by Slurm and saved; job $SLURM_JOB_ID is queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
