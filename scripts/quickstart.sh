#!/bin/sh
# From a fresh clone to a plan: makes .venv, installs OSDP into it, plans GPT-2 1.5B for 8 GB.
#
#     sh scripts/quickstart.sh [OPTION OF `osdp plan`]...
#
# Options are passed on and win over the ones here.  A second run reuses the environment.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/scripts/_environment.sh"

ensure_environment ""
exec "$venv/bin/osdp" plan --model gpt2-1.5b --mem 8GB "$@"
