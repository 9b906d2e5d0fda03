#!/bin/sh
# Trains GPT-2 under a plan: GPT-2 1.5B within 8 GB of each GPU, or a small one on CPU ranks without GPUs.
#
#     sh scripts/script_gpt2_training.sh [OPTION OF `osdp train`]...
#
# Options win over the configuration: --fsdp_type FSDP (or DDP) to compare with, --data FILE, --steps N.
# Makes .venv on the first run, as quickstart.sh does.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/scripts/_environment.sh"

ensure_environment ""
config=gpt2
if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    config=gpt2-1.5b
fi
exec "$venv/bin/osdp" train "$root/configs/train/$config.yaml" "$@"
