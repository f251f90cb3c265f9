#!/bin/sh
# make_env.sh DIR: make the virtual environment DIR with CPython 3.12 or 3.13.
# make_env.sh --find: print the interpreter that would be used, nothing else.
#
# Order: $PYTHON, python3.13, python3.12, python3, pyenv's version directories
# (newest first), uv. Each candidate is run and asked: a pyenv shim can lie on
# PATH and still fail. An environment already in DIR is kept while it fits and
# $PYTHON, if given, is the interpreter that it was made with.
set -eu

# Prints "ok PREFIX EXECUTABLE", or what is wrong with the interpreter $1.
probe() {
    "$1" -c '
import platform, sys, sysconfig
found = platform.python_implementation() + " " + platform.python_version()
problem = ""
if "CPython" not in found or sys.version_info[:2] not in [(3, 12), (3, 13)]:
    problem = "is " + found
elif sysconfig.get_config_var("Py_GIL_DISABLED"):
    problem = "is a free-threaded " + found
else:
    try:
        import ensurepip, venv
    except ImportError:
        problem = "is " + found + " without venv and ensurepip"
print(problem or "\t".join(["ok", sys.base_prefix, sys.executable]))
' 2>/dev/null </dev/null || echo "does not run"
}

tab=$(printf '\t')
fits() { case "$1" in "ok$tab"*) return 0 ;; *) return 1 ;; esac; }
fail() { echo "make_env: $*" >&2; exit 1; }

pyenv_candidates() {
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        for python in "${root:-/nonexistent}"/versions/3.1[23].*/bin/python; do
            [ -x "$python" ] || continue
            version=${python%/bin/python}
            echo "${version##*/} $python"
        done
    done | sort -t. -k2,2nr -k3,3nr | cut -d' ' -f2-
}

# Prints the probe's line for the first interpreter that fits, or "uv".
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        found=$(probe "$PYTHON")
        fits "$found" || fail "PYTHON=$PYTHON $found;" \
            "CPython 3.12 or 3.13 with venv and ensurepip is needed"
        echo "$found"
        return
    fi
    looked=
    for python in python3.13 python3.12 python3; do
        if command -v "$python" >/dev/null; then
            found=$(probe "$python")
            if fits "$found"; then echo "$found"; return; fi
        else
            found="is not on PATH"
        fi
        looked="$looked$python $found, "
    done
    found=$(pyenv_candidates | while IFS= read -r python; do
        found=$(probe "$python")
        if fits "$found"; then echo "$found"; break; fi
    done)
    if [ -n "$found" ]; then echo "$found"; return; fi
    if command -v uv >/dev/null; then echo uv; return; fi
    fail "no CPython 3.12 or 3.13 with venv and ensurepip: ${looked}none fits" \
        "under pyenv, uv is not on PATH; name one with PYTHON=/path/to/python3.12"
}

[ $# -eq 1 ] || fail "usage: make_env.sh DIR | --find"
if [ "$1" = --find ]; then
    found=$(find_python)
    echo "${found##*"$tab"}"
    exit
fi

kept=$([ ! -x "$1/bin/pip" ] || probe "$1/bin/python" | cut -f1,2)
if [ -z "${PYTHON:-}" ] && fits "$kept"; then exit; fi
found=$(find_python)
if fits "$kept" && [ "$kept" = "$(echo "$found" | cut -f1,2)" ]; then exit; fi
if [ "$found" = uv ]; then
    uv venv --quiet --clear --seed --python 3.12 "$1" ||
        fail "uv could not make an environment with Python 3.12;" \
            "name an interpreter with PYTHON=/path/to/python3.12"
else
    "${found##*"$tab"}" -m venv --clear "$1"
fi
