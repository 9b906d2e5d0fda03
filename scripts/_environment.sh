# shellcheck shell=sh
# Makes and reuses the virtual environment of a checkout.  Sourced by the other scripts, which
# set `root` (the folder of setup.cfg) first and then call `ensure_environment EXTRA`.  Where there
# is an NVIDIA driver, the extra with CuPy for it is installed too.
#
# $venv/osdp-stamp records what was installed.  While it matches, nothing is done; it is removed
# before an install and written after, so an install that failed is never taken for a good one.

venv=${root:?}/.venv

# use_torch X.Y: work in an environment beside .venv, with the newest PyTorch X.Y.Z in place of the pinned one.
torch=''
use_torch() {
    torch=$1 venv=$root/.venv-torch-$1
}

# Progress goes to stderr: stdout belongs to the command that comes after.
say() {
    printf 'osdp: %s\n' "$*" >&2
}

# fail WHAT TRY: say what is wrong and what to do, as the command line does, and exit.
fail() {
    printf 'osdp: %s\n  try: %s\n' "$1" "$2" >&2
    exit 2
}

# Print the version (X.Y.Z) of the Python given, or nothing if it does not run.
version_of() {
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true
}

# Whether version X.Y.Z is at least 3.11.
new_enough() {
    major=${1%%.*}
    minor=${1#*.}
    minor=${minor%%.*}
    [ "$major" -gt 3 ] || { [ "$major" -eq 3 ] && [ "$minor" -ge 11 ]; }
}

# Set `python` to one that is new enough and can make environments.  Of a version the distribution's comes first, if
# PATH has it: version managers usually build theirs without profile-guided optimization.
find_python() {
    too_old='' without_venv='' distributed=''
    case ":$PATH:" in *:/usr/bin:*) distributed=/usr/bin/ ;; esac
    for name in python3.13 python3.12 python3.11 python3; do
        for python in ${distributed:+"$distributed$name"} "$name"; do
            version=$(version_of "$python")
            if [ -z "$version" ]; then
                continue
            elif ! new_enough "$version"; then
                too_old=$version
            elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
                without_venv=$name
            else
                return 0
            fi
        done
    done
    if [ -n "$without_venv" ]; then
        fail "$without_venv cannot make virtual environments: its module venv or ensurepip is missing" \
            "apt-get install $without_venv-venv (on Debian and Ubuntu), then run this again"
    elif [ -n "$too_old" ]; then
        fail "Python 3.11 or newer is needed, and the python3 on PATH is $too_old" \
            'install Python 3.11, 3.12 or 3.13, put it on PATH, then run this again'
    else
        fail 'Python 3.11 or newer is needed, and PATH has no python3 that runs' \
            'apt-get install python3 python3-venv (on Debian and Ubuntu), then run this again'
    fi
}

# Make $venv, unless one that works is there; one that was left half made is made again.
make_venv() {
    version=$(version_of "$venv/bin/python")
    if [ -n "$version" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        new_enough "$version" || fail "$venv holds Python $version, and 3.11 or newer is needed" \
            'delete or move that folder, then run this again'
        return 0
    fi
    find_python
    if [ -e "$venv" ]; then
        say "$venv is not complete: making it again with Python $version"
    else
        say "making $venv with Python $version"
    fi
    "$python" -m venv --clear "$venv" >&2 || fail "$python could not make $venv" \
        "read its message above, mend that or delete $venv, then run this again"
}

# What pip writes where there is no way to its index.
unreachable='NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError'
unreachable="$unreachable|RemoteDisconnected|Connection refused|Network is unreachable|Temporary failure"

# pip_install ARGUMENTS: with progress bars on a terminal, and elsewhere silent unless it fails.  Python compiles the few
# modules that are imported; pip would compile all of them, one after the other.
pip_install() {
    log=$venv/osdp-install.log
    rm -f "$log"
    set -- --disable-pip-version-check "$@"
    if [ -t 1 ] && [ -t 2 ]; then
        "$venv/bin/python" -m pip install --no-compile --log "$log" "$@" && return 0
    else
        "$venv/bin/python" -m pip install --no-compile --quiet --progress-bar off "$@" >"$log" 2>&1 && return 0
        say "pip failed; the end of its output, which is in $log:"
        tail -n 20 "$log" | sed 's/^/    /' >&2
    fi
    if [ -n "${PIP_NO_INDEX:-}" ] || grep -q -E "$unreachable" "$log"; then
        fail 'pip cannot reach its package index; this machine seems to be offline' \
            'check the network, the proxy and the settings of pip (pip config list), then run this again'
    fi
    fail 'pip could not install OSDP and what it needs' 'read the message of pip above, then run this again'
}

# Set `cupy` to the extra for this machine's NVIDIA driver, or to nothing, and then `no_cupy` to why
# if there is a driver.  An nvidia-smi that fails has no driver to talk to.
find_cupy() {
    cupy='' no_cupy='' cuda=''
    if command -v nvidia-smi >/dev/null; then
        smi=$(nvidia-smi 2>/dev/null) || return 0
        # CUDA Version: 13.0; newer ones write CUDA UMD Version.
        cuda=$(printf '%s\n' "$smi" | sed -n '/CUDA [A-Z ]*Version/{ s/.*CUDA [A-Z ]*Version: *\([0-9][0-9]*\)\..*/\1/p; q; }')
    elif [ -r /proc/driver/nvidia/version ]; then
        # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
        driver=$(sed -n 's/^NVRM version:.*  \([0-9][0-9]*\)\.[0-9.]* .*/\1/p' /proc/driver/nvidia/version)
        # The first drivers of CUDA 13 and 12.
        if [ "${driver:-0}" -ge 580 ]; then cuda=13; elif [ "${driver:-0}" -ge 525 ]; then cuda=12; fi
    else
        return 0
    fi
    # A driver runs what was built for an older CUDA.
    if [ "${cuda:-0}" -ge 13 ]; then
        cupy=cuda13
    elif [ "${cuda:-0}" -eq 12 ]; then
        cupy=cuda12
    else
        no_cupy="the NVIDIA driver is for CUDA ${cuda:-of an unknown version}, and CuPy is installed for 12 and 13"
    fi
}

# Print the stamp of an environment of Python version $1 with extras $2 (with commas; empty for none).
stamp_for() {
    printf '%s\npython %s\nsetup %s\nextras %s\n' \
        "$root" "$1" "$(cat "$root/setup.cfg" "$root/constraints.txt" | cksum)" "$2"
}

# is_ready [EXTRA]...: whether all of these are installed already.
is_ready() {
    version=$(version_of "$venv/bin/python")
    [ -n "$version" ] && [ -x "$venv/bin/osdp" ] && [ -f "$venv/osdp-stamp" ] || return 1
    installed=$(sed -n 's/^extras //p' "$venv/osdp-stamp")
    [ "$(cat "$venv/osdp-stamp")" = "$(stamp_for "$version" "$installed")" ] || return 1
    for extra in "$@"; do
        case ",$installed," in *",$extra,"*) ;; *) return 1 ;; esac
    done
}

# ensure_environment EXTRA: leave $venv with the checkout, that extra (empty for none) and CuPy, or exit 2.
ensure_environment() {
    find_cupy
    if is_ready ${1:+"$1"} ${cupy:+"$cupy"}; then
        return 0
    fi
    make_venv
    rm -f "$venv/osdp-stamp"
    # What an earlier install may have left: this distribution under its old name, CuPy for another driver.
    old=osdp
    case $cupy in cuda12) old="osdp cupy-cuda13x" ;; cuda13) old="osdp cupy-cuda12x" ;; esac
    # shellcheck disable=SC2086 # these are words
    "$venv/bin/python" -m pip --disable-pip-version-check uninstall --yes $old >/dev/null 2>&1 || true
    say 'installing OSDP and what it needs, PyTorch included; the first time this takes minutes'
    [ -z "$no_cupy" ] || say "going on without CuPy: $no_cupy"
    extras=$1${1:+${cupy:+,}}$cupy
    constraints=$root/constraints.txt
    if [ -n "$torch" ]; then
        constraints=$venv/constraints.txt
        sed "s/^torch==.*/torch==$torch.*/" "$root/constraints.txt" >"$constraints"
    fi
    pip_install -c "$constraints" -e "$root${extras:+[$extras]}"
    stamp_for "$(version_of "$venv/bin/python")" "$extras" >"$venv/osdp-stamp"
    say "ready: $venv"
}
