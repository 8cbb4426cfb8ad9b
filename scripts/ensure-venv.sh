#!/bin/sh
# Creates .venv in the current folder with Python 3.11 or newer; does nothing if a working one exists.
# PYTHON=... chooses the interpreter. As root with apt-get it installs Debian's venv module if that is missing.
set -eu

say() { printf '%s\n' "$*" >&2; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

if [ -x .venv/bin/python ] && is_new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    exit 0
fi

python=
for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python3.12 python3.13; do
    if is_new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    say "python: Cutline needs Python 3.11 or newer, and none was found on the PATH."
    say "Install it, or give its path: make setup PYTHON=/path/to/python3.11"
    exit 1
fi

if ! has_venv "$python" && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    say "python: the venv module is missing, installing python3-venv with apt-get"
    apt-get update -qq >&2 || say "python: apt-get update failed, continuing with the present package lists"
    apt-get install -y -qq --no-install-recommends python3-venv >&2 || say "python: apt-get could not install it"
fi
if ! has_venv "$python"; then
    say "python: $python has no venv module. On Debian and Ubuntu: sudo apt-get install python3-venv"
    exit 1
fi

say "python: creating .venv with $("$python" --version)"
"$python" -m venv --clear .venv
