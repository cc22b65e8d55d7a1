#!/usr/bin/env bash
set -euo pipefail
node=${NODE_RANK:-${TRAINSHED_NODE_RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-}}}}
attempt=${TRAINSHED_ATTEMPT:-}
[[ -n $attempt || ! ${SLURM_RESTART_COUNT:-0} =~ ^[0-9]+$ ]] || attempt=$((${SLURM_RESTART_COUNT:-0} + 1))
[[ $node =~ ^[0-9]+$ ]] || { echo "NODE_RANK is not a number: ${node:-not set}" >&2; exit 2; }
[[ $attempt =~ ^[0-9]+$ ]] || { echo "TRAINSHED_ATTEMPT is not a number: $attempt" >&2; exit 2; }
: "${MASTER_ADDR:?the address of node 0 is not set}" "${MASTER_PORT:?the port of node 0 is not set}"
folder=/store/runs/demo/1a2b3c4d/logs/$(printf 'attempt-%04d' "$((10#$attempt))")
health=/store/runs/demo/1a2b3c4d/health/${folder##*/}
mkdir -p "$folder" "$health"
export TRAINSHED_RUN_FOLDER=/store/runs/demo/1a2b3c4d
file=$folder/$(printf 'node-%05d.log' "$((10#$node))")
rm -f "${file%.log}.exit-code"
{ stat -c %s "$file" 2>/dev/null || echo 0; } >"${file%.log}.began"
export A=1
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE-2000}"
export TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE-2000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT-1}"
export TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE-$health/nccl-rank-}"
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE-$health/nccl-rank-}"
export TORCH_NCCL_DEBUG_INFO_PIPE_FILE="${TORCH_NCCL_DEBUG_INFO_PIPE_FILE-${TMPDIR:-/tmp}/trainshed-$$-}"
nccl=
if [[ -f /job/network.json && -z ${NCCL_DEBUG:-}${NCCL_DEBUG_FILE:-} ]]; then
  nccl=${TMPDIR:-/tmp}/trainshed-nccl-$$-
  export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET NCCL_DEBUG_FILE="$nccl%p.log"
fi
arguments=(
  --name
  'it'"'"'s $HOME'
)
late=$(cat /run/engine/data_prefix.txt)
arguments+=(++model.data.data_prefix="$late")
# Further arguments of whoever runs this script come last.
arguments+=("$@")
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
watch=
watcher=/store/runs/demo/1a2b3c4d/engine/watch/watch_node.py
if [[ -f $watcher ]]; then
  python3 \
    "$watcher" \
    --run /store/runs/demo/1a2b3c4d \
    --attempt "$((10#$attempt))" \
    --node "$((10#$node))" \
    --nodes 2 \
    --ranks-per-node 8 \
    --torchrun "$torchrun" \
    --quiet-seconds 1800 \
    --network /job/network.json \
    --nccl-log "$nccl" \
    {log}>&- &
  watch=$!
fi
while true; do
  interrupted=
  code=0
  wait "$torchrun" || code=$?
  [[ -n $interrupted ]] || break
done
if [[ -n $nccl ]]; then
  [[ $code == 0 || -n $requested ]] || grep -hF 'NCCL WARN' "$nccl"*.log 2>/dev/null | tail -n 20 >&"$log" || true
  rm -f "$nccl"*.log
fi
exec {log}>&-
[[ -z $watch ]] || kill "$watch" 2>/dev/null || true
rm -f "${TMPDIR:-/tmp}/trainshed-$$-"*.pipe
tenths=$((code == 0 ? 600 : 50))
while ((tenths--)) && kill -0 "$tee" 2>/dev/null; do
  sleep 0.1
done
if kill -0 "$tee" 2>/dev/null; then
  killed=
  for fd in /proc/[0-9]*/fd/*; do
    pid=${fd#/proc/}
    pid=${pid%%/*}
    if [[ $pid != "$tee" && $pid != "$killed" && $fd -ef /proc/$tee/fd/0 ]] && kill -KILL "$pid" 2>/dev/null; then
      echo "trainshed: process $pid outlived the ranks and was killed" >&2
      killed=$pid
    fi
  done
fi
wait "$tee" || true
if [[ $code != 0 && -z $requested ]]; then
  own=$(tail -c "+$(($(cat "${file%.log}.began" 2>/dev/null || echo 0) + 1))" "$file" | tail -c 1000000)
  root=$(grep -oE '^ +rank +: [0-9]+' <<<"$own" | tail -n 1 | grep -oE '[0-9]+' || true)
  errors='[A-Za-z_.]*(Error|Exception)(:.*)?$'
  why=$(grep -E "^\[rank$root\]: $errors" <<<"$own" | tail -n 1 || true)
  [[ -n $why ]] || why=$(grep -E "^$errors" <<<"$own" | grep -v ChildFailedError | tail -n 1 || true)
  [[ -z $why ]] || echo "trainshed: $why" >&2
fi
[[ -n $requested ]] || echo "$code" >"${file%.log}.exit-code"
exit "${requested:-$code}"
