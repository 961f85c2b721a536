#!/usr/bin/env bash
# One machine's part of a PyTorchJob: `bash launch/cluster/pod.sh RECIPE [key=value ...]`, with RUN, GPUS and
# what the operator sets. A failure that a new start may mend ends with code 201, which the operator starts again; no progress
# (93) and RUN/STOP (94) are final.
set -uo pipefail

nodes="$WORLD_SIZE" # the operator counts pods, and numbers them in RANK
index="$RANK"
unset WORLD_SIZE RANK
if [ "$index" = 0 ]; then MASTER_ADDR=localhost; fi # its own service may not answer yet
address="$(hostname -i | cut -d ' ' -f 1)"

if [ "$index" = 0 ]; then
    python -m launch chain "$RUN" --again
    code=$?
    if [ "$code" != 0 ]; then exit "$code"; fi
fi
python -m launch node --nodes "$nodes" --node "$index" --gpus "$GPUS" \
    --rendezvous "$MASTER_ADDR:29400" --job "$JOB" --address "$address" "$@" "run_dir=$RUN" &
child=$!
trap 'kill -TERM "$child"' TERM
wait "$child"
code=$?
if kill -0 "$child" 2> /dev/null; then # a signal ended the first wait
    wait "$child"
    code=$?
fi
if [ "$code" = 0 ]; then exit 0; fi
exit 201
