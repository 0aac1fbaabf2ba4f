# Sourced by scripts/test and scripts/quickstart from the clone's folder: `install EXTRA` makes
# .venv there with the tested versions and puts its programs first in PATH.

# Some machines switch byte code off for all; then every start of a rank compiles torch again (4 s).
unset PYTHONDONTWRITEBYTECODE

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        # Run it: version switchers leave names in PATH that only print an error.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python" >&2
    return 1
}

install() {
    local stamp=".venv/installed-$1" quiet=() python wanted
    wanted="$PWD $(cat pyproject.toml constraints.txt | cksum)"
    if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
        echo "installing into $PWD/.venv (torch is large; a minute on a fast connection)"
        if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
            python=$(find_python)
            "$python" -m venv --clear .venv
        fi
        [[ -t 1 ]] || quiet=(--quiet)
        # Byte code for everything would take another minute. What a training imports takes ten
        # seconds and is made here by one step of it, so that three ranks need not do it at once.
        .venv/bin/python -m pip install "${quiet[@]}" --no-input --no-compile \
            --disable-pip-version-check --constraint constraints.txt --editable ".[$1]"
        .venv/bin/python - <<'PYTHON'
import aiohttp, rich, sklearn.datasets, torch, torch.distributed, torch.nn.parallel, zeroconf

layer = torch.nn.Linear(1, 1)
layer(torch.ones(1)).backward()
torch.optim.Adam(layer.parameters()).step()
PYTHON
        echo "$wanted" >"$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}
