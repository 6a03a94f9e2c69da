#!/bin/bash
#SBATCH --job-name=telescope
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=telescope-%j.log
#
# Trains on all nodes of a Slurm job: sbatch deploy/slurm.sh run.toml [flags of telescope train]
# TELESCOPE_HOME is the checkout with .venv, on a file system that all nodes share. The same command
# with --resume continues a run whose job was ended.
set -euo pipefail
if [ $# -eq 0 ]; then
    echo "usage: sbatch deploy/slurm.sh run.toml [flags of telescope train]" >&2
    exit 2
fi
: "${TELESCOPE_HOME:?set it to the checkout of Telescope that all nodes share}"
export PATH="$TELESCOPE_HOME/.venv/bin:$PATH"

# Ray asks for a token. srun hands the variables of this script to all nodes.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{ print $1 }')
# Jobs that share a node would share a port otherwise.
port=$((20000 + SLURM_JOB_ID % 10000))
cluster=$address:$port

pids=()
finish() {
    if [ ${#pids[@]} -gt 0 ]; then
        kill "${pids[@]}" 2>/dev/null || true
        wait "${pids[@]}" 2>/dev/null || true
    fi
}
trap finish EXIT

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --block --node-ip-address "$address" --port "$port" &
pids+=($!)
if [ ${#nodes[@]} -gt 1 ]; then
    others=$(IFS=,; echo "${nodes[*]:1}")
    count=$((${#nodes[@]} - 1))
    # Each node waits for the head by itself.
    srun --overlap --nodes="$count" --ntasks="$count" --nodelist="$others" \
        bash -c 'for try in {1..60}; do
            ray start --address "$1" --block && exit
            sleep 2
        done; exit 1' join "$cluster" &
    pids+=($!)
fi

# Room for servers and ranks is waited for (ray_placement_timeout_s), so the other nodes may come
# later than the head.
tries=0
until srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" ray health-check --address "$cluster"; do
    tries=$((tries + 1))
    if [ "$tries" -ge 60 ]; then
        echo "Ray did not start on $head within two minutes; what it said is above" >&2
        exit 1
    fi
    sleep 2
done

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    telescope train "$@" --ray_address "$cluster"
