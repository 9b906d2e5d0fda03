#!/bin/sh
# Trains BERT sharded with groups: bert-large on GPUs, or without any a small one on four CPU ranks that stand for
# 2 machines of 2.
#
#     sh scripts/script_bert_training.sh [--fsdp_args group_sharding|communication_with_groups|none] \
#         [OPTION OF `osdp train`]...
#
# Options win over the configuration: --fsdp_type OSDP for a plan, --data FILE, --steps N.
# Makes .venv on the first run, as quickstart.sh does.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/scripts/_environment.sh"

ensure_environment ""
config=bert
if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    config=bert-large
fi
exec "$venv/bin/osdp" train "$root/configs/train/$config.yaml" "$@"
