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
local="${TRAINSHED_LOCAL_FOLDER:-/var/tmp/trainshed}"

# Our code: an archive in the store, or a folder of pieces that ConfigMaps hold. The image needs only what it depends on.
if [ -n "${TRAINSHED_CODE:-}" ]; then
    if [ ! -e "$local/code/.complete" ]; then
        "$python" - "$TRAINSHED_CODE" "$TRAINSHED_CODE_SHA256" "$local/code" <<'EOF' || exit 1
import hashlib, io, os, sys, tarfile

source, sha256, folder = sys.argv[1:]
try:
    pieces = sorted(name for name in os.listdir(source) if name.startswith("piece-")) if os.path.isdir(source) else [""]
    data = b"".join(open(os.path.join(source, name) if name else source, "rb").read() for name in pieces)
except OSError as error:
    sys.exit("error: our code cannot be read: %s\n  `trainshed submit` puts it there; `render --out DIR` writes it" % error)
if hashlib.sha256(data).hexdigest() != sha256:
    sys.exit("error: %s is not the code that this job was written with (sha256 %s)" % (source, sha256))
os.makedirs(folder, exist_ok=True)
with tarfile.open(fileobj=io.BytesIO(data)) as archive:
    if hasattr(tarfile, "data_filter"):  # Python 3.12 warns without it
        archive.extraction_filter = tarfile.data_filter
    archive.extractall(folder)
EOF
        touch "$local/code/.complete"
    fi
    export PYTHONPATH="$local/code${PYTHONPATH:+:$PYTHONPATH}"
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
