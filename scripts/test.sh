#!/bin/sh
# Lint, type check and tests; stops at the first that fails, with exit status 1.
#
#     sh scripts/test.sh [OPTION OF pytest]...
#
# Makes .venv on the first run, as quickstart.sh does, with the tools of the tests.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/scripts/_environment.sh"

# stage COMMAND...: run a Python module's command.
stage() {
    say "$*"
    "$venv/bin/python" -m "$@" && return 0
    printf 'osdp: failed: %s\n' "$*" >&2
    exit 1
}

ensure_environment test
cd "$root"
stage ruff check
stage ruff format --check
stage mypy
# Tests of one file may share what they have set up. tests/conftest.py says how many files at a time, in which order.
stage pytest -n auto --dist loadfile --no-loadscope-reorder --durations=50 "$@"
