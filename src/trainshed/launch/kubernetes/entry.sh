#!/usr/bin/env bash
# What every container of a job starts with: our code in its place, the fabric's variables set, the first node found
# by name, and then the command that follows. Values come from the environment, never from this text.
set -euo pipefail

TRAINSHED_BEGAN="$(date +%s.%N)"

say() { printf 'trainshed: %s\n' "$*" >&2; }

# The site's own lines, before anything of ours; what they export is there for whatever follows.
if [ -n "${TRAINSHED_SETUP:-}" ]; then
    # shellcheck disable=SC1090
    . "$TRAINSHED_SETUP"
fi

python="${TRAINSHED_PYTHON:-python3}"
pieces="${TRAINSHED_CODE_FOLDER:-/etc/trainshed/code}"
local="${TRAINSHED_LOCAL_FOLDER:-/var/tmp/trainshed}"

# Our code travels in pieces that ConfigMaps hold; the image needs only what it depends on.
if [ -n "${TRAINSHED_CODE:-}" ]; then
    unpacked="$local/code"
    if [ ! -e "$unpacked/.complete" ]; then
        mkdir -p "$unpacked"
        cat "$pieces"/piece-* >"$local/$TRAINSHED_CODE"
        "$python" -m tarfile -e "$local/$TRAINSHED_CODE" "$unpacked"
        touch "$unpacked/.complete"
    fi
    export PYTHONPATH="$unpacked${PYTHONPATH:+:$PYTHONPATH}"
fi

TRAINSHED_INSTALLED="$(date +%s.%N)"
export TRAINSHED_BEGAN TRAINSHED_INSTALLED # the agent's record of how long starting took

# A PyTorchJob says RANK and means the pod; those of the processes are the agent's to set.
export TRAINSHED_NODE_RANK="${TRAINSHED_NODE_RANK:-${JOB_COMPLETION_INDEX:-${RANK:-0}}}"
export NODE_RANK="$TRAINSHED_NODE_RANK"
unset RANK WORLD_SIZE LOCAL_RANK

# How the other pods reach this one: by the same kind of name as node 0.
if [ -n "${MASTER_ADDR:-}" ] && [ -z "${TRAINSHED_HOST:-}" ]; then
    first="${MASTER_ADDR%%.*}"
    case "$first:$TRAINSHED_NODE_RANK" in
        *:0) TRAINSHED_HOST="$MASTER_ADDR" ;;
        *-master-0:*) TRAINSHED_HOST="${first%-master-0}-worker-$((TRAINSHED_NODE_RANK - 1))" ;;
        *) TRAINSHED_HOST="${first%-0}-$TRAINSHED_NODE_RANK${MASTER_ADDR#"$first"}" ;;
    esac
    export TRAINSHED_HOST
fi

# Libraries, the vendor's script and the variables of the network between nodes; scripts of vendors are not strict.
if [ -n "${TRAINSHED_FABRIC:-}" ]; then
    set +eu
    # shellcheck disable=SC1090
    . "$TRAINSHED_FABRIC" || {
        say "the fabric's script failed: was its plugin installed?"
        exit 1
    }
    set -eu
fi

# A headless service knows a pod only after it has an address, which may be long after this one started.
if [ -n "${MASTER_ADDR:-}" ] && [ "$TRAINSHED_NODE_RANK" != 0 ]; then
    waited=0
    until getent hosts "$MASTER_ADDR" >/dev/null; do
        if [ "$waited" -ge "${TRAINSHED_DNS_SECONDS:-900}" ]; then
            say "node 0 ($MASTER_ADDR) has no address after $waited s: is its pod placed?"
            exit 1
        fi
        [ "$((waited % 60))" -ne 0 ] || say "waits for node 0 ($MASTER_ADDR)"
        sleep 2
        waited="$((waited + 2))"
    done
fi

# Pods of a PyTorchJob share no name for this start: node 0 gives them its own.
if [ -n "${TRAINSHED_MEET:-}" ]; then
    TRAINSHED_START="$("$python" -P -m trainshed kubernetes meet)"
    export TRAINSHED_START
fi

exec "$@"
