#!/bin/sh
# Lint, type check and tests: exit status 1 if anything fails. What is badly formed is not tested.
#
#     sh scripts/test.sh [OPTION OF pytest]...
#     sh scripts/test.sh --torch X.Y [OPTION OF pytest]...
#
# Makes .venv on the first run, as quickstart.sh does, with the tools of the tests.  With --torch, runs
# the tests alone, on the newest PyTorch X.Y.Z, in an environment of its own.
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

if [ "${1:-}" = --torch ]; then
    case ${2:-} in
    [0-9]*.[0-9]*) use_torch "$2" ;;
    *) fail "--torch takes a version of PyTorch, not '${2:-}'" 'sh scripts/test.sh --torch 2.11' ;;
    esac
    shift 2
fi
ensure_environment test
cd "$root"
# Tests start hundreds of processes: where Python is told not to write bytecode, each would compile what it imports.
unset PYTHONDONTWRITEBYTECODE
# Small tensors come and go by the million: glibc keeps the memory of those that went, which takes a tenth less time, and
# asks Linux for huge pages, which takes a twentieth less or more (glibc 2.35 or later; others ignore it).
export MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TOP_PAD_=16777216
export GLIBC_TUNABLES="${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1"
# PyTorch asks for the name of each peer of a store. Where the name server leaves some questions unanswered, a start of
# ranks waits 5 s for it now and then: here, one.
export RES_OPTIONS="${RES_OPTIONS:+$RES_OPTIONS }timeout:1"
if [ -n "$torch" ]; then
    stage pytest -n auto --dist loadfile --no-loadscope-reorder --durations=50 "$@"
    exit
fi
stage ruff check
stage ruff format --check
# Links, anchors and references of the documents; NO_MKDOCS_2_WARNING: material would tell of its successor.
NO_MKDOCS_2_WARNING=1 stage mkdocs build --quiet --strict --site-dir "$venv/site"
# mypy keeps one core busy for most of a minute, so tests run beside it.
say "mypy, beside the tests"
types=$venv/mypy-report
"$venv/bin/python" -m mypy >"$types" 2>&1 &
checking=$!
# Tests of one file may share what they have set up. tests/conftest.py says how many files at a time, in which order.
say "pytest $*"
status=0
"$venv/bin/python" -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=50 "$@" || status=1
[ "$status" = 0 ] || printf 'osdp: failed: pytest\n' >&2
if ! wait "$checking"; then
    status=1
    printf 'osdp: failed: mypy\n' >&2
fi
cat "$types"
exit "$status"
