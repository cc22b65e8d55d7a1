#!/usr/bin/env bash
set -euo pipefail
node=${NODE_RANK:-${TRAINSHED_NODE_RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-}}}}
attempt=${TRAINSHED_ATTEMPT:-}
[[ -n $attempt || ! ${SLURM_RESTART_COUNT:-0} =~ ^[0-9]+$ ]] || attempt=$((${SLURM_RESTART_COUNT:-0} + 1))
[[ $node =~ ^[0-9]+$ ]] || { echo "NODE_RANK is no number: ${node:-not set}" >&2; exit 2; }
[[ $attempt =~ ^[0-9]+$ ]] || { echo "TRAINSHED_ATTEMPT is no number: $attempt" >&2; exit 2; }
: "${MASTER_ADDR:?the address of node 0 is not set}" "${MASTER_PORT:?the port of node 0 is not set}"
folder=/store/runs/demo/1a2b3c4d/logs/$(printf 'attempt-%04d' "$((10#$attempt))")
mkdir -p "$folder"
file=$folder/$(printf 'node-%05d.log' "$((10#$node))")
export A=1
arguments=(
  --name
  'it'"'"'s $HOME'
)
late=$(cat /run/engine/data_prefix.txt)
arguments+=(++model.data.data_prefix="$late")
torchrun=
requested=
interrupted=
stop() {
  [[ -n $torchrun ]] || exit "$1"
  interrupted=1
  requested=$1
  local ranks
  ranks=$(cat "/proc/$torchrun/task/$torchrun/children" 2>/dev/null || true)
  # shellcheck disable=SC2086 # one word per rank
  kill -TERM ${ranks:-"$torchrun"} 2>/dev/null || true
}
trap 'stop 143' TERM
trap 'stop 138' USR1
exec {log}> >(trap "" TERM USR1 INT; exec tee -a "$file")
tee=$!
python3 \
  -m torch.distributed.run \
  --nnodes 2 \
  --node-rank "$node" \
  --master-addr "$MASTER_ADDR" \
  --master-port "$MASTER_PORT" \
  --nproc-per-node 8 \
  /opt/pretrain.py "${arguments[@]}" >&"$log" 2>&1 &
torchrun=$!
while true; do
  interrupted=
  code=0
  wait "$torchrun" || code=$?
  [[ -n $interrupted ]] || break
done
exec {log}>&-
wait "$tee" || true
exit "${requested:-$code}"
