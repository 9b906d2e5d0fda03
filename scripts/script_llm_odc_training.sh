#!/bin/sh
# Trains a small Llama on samples of uneven length, by FSDP and by ODC side by side, on ranks of this machine.
#
#     sh scripts/script_llm_odc_training.sh [--packing none|ffd|kk] [--timeline out.png] [--help] ...
#
# Makes .venv on the first run, as quickstart.sh does.  --timeline needs matplotlib: the extra `plot`.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/scripts/_environment.sh"

ensure_environment ""
exec "$venv/bin/python" "$root/examples/train_llm_odc.py" "$@"
