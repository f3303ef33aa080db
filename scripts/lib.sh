# Shared by scripts/demo and scripts/test; sourced, not run.

set -euo pipefail
if [[ ${1-} == -h || ${1-} == --help ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit
fi

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

PYTHON=$ROOT/.venv/bin/python
BOOTSTRAP_PYTHON=${OUTRIDER_PYTHON:-python3}
MODEL=build/models/SmolLM2-135M-Instruct.Q4_1.gguf
export HF_HUB_OFFLINE=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# stage TITLE COMMAND…: runs it, says how long it took, ends the script where it fails.
# (Bash ignores `set -e` inside: functions run as a stage return 1 themselves.)
stage() {
    local title=$1 start=$SECONDS
    shift
    say "── $title"
    "$@" || die "$title: failed after $((SECONDS - start)) s"
    say "   done in $((SECONDS - start)) s"
}

fingerprint() { # of stdin
    "$BOOTSTRAP_PYTHON" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# need_environment EXTRAS: .venv with the pinned packages, installed only where they changed.
need_environment() {
    local stamp=$ROOT/.venv/outrider-$1.stamp wanted
    need_python
    wanted=$(cat pyproject.toml constraints.txt | fingerprint)
    if [[ -x $PYTHON && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        say "── environment ($1): up to date"
        return
    fi
    [[ -x $PYTHON ]] || stage "environment: making .venv" "$BOOTSTRAP_PYTHON" -m venv "$ROOT/.venv"
    stage "packages ($1): one to five minutes where they are new" install_packages "$1"
    printf '%s\n' "$wanted" >"$stamp"
}

need_python() {
    "$BOOTSTRAP_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$BOOTSTRAP_PYTHON: received $("$BOOTSTRAP_PYTHON" --version 2>&1)." \
            "Expected Python 3.11 or later; name one in OUTRIDER_PYTHON."
}

install_packages() {
    mkdir -p build
    "$PYTHON" -m pip install --retries 5 -c constraints.txt -e ".[$1]" >build/install.log 2>&1 && return
    tail -n 30 build/install.log >&2
    return 1
}
