# Sourced by the other scripts. Makes .venv in the checkout when it is missing or out of date, and sets $root and $python.
# With extras=test it also has what the tests need.
# With versions=oldest or versions=newest it is .venv-oldest or .venv-newest, with other versions of torch and Ray.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
environment="$root/.venv${versions:+-$versions}"
python="$environment/bin/python"

say() {
    printf '== %s\n' "$*"
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    cat >&2 <<END
No Python 3.10 or newer that can make a virtual environment was found (looked for ${PYTHON:-python3} and python3.10 to python3.13).
Install one (Debian and Ubuntu: python3 and python3-venv), or name yours: PYTHON=/path/to/python $0
END
    return 1
}

# What pip says goes to a log; after a failure its end is shown.
pip_install() {
    local log="$environment/pip.log"
    "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" >"$log" 2>&1 || {
        grep -v '^WARNING: ' "$log" | tail -n 30 >&2
        echo "pip install $* failed; its whole log is $log" >&2
        return 1
    }
}

# The lower bound of a package in pyproject.toml, as a version to install.
lowest() {
    sed -n "s/^ *\"\($1\)>=\([0-9.]*\)\",$/\1==\2/p" "$root/pyproject.toml"
}

# The checkout's path counts too: the editable install points at it.
fingerprint() {
    { printf '%s\n' "$root" "${versions:-}"; cat "$root/pyproject.toml" "$root/constraints.txt"; } | cksum
}

make_environment() {
    local stamp="$environment/installed${extras:+-$extras}" base torch
    local -a wanted
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$(fingerprint)" ]] && "$python" -c '' 2>/dev/null; then
        return
    fi
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        base="$(find_python)"
        say "making ${environment##*/} with $("$base" --version)"
        "$base" -m venv --clear "$environment"
    fi
    rm -f "$environment/installed"*
    # torch alone and first: resolved together with the rest, another build of it could be chosen, gigabytes larger.
    case "${versions:-}" in
        oldest) torch="$(lowest torch)" wanted=("$(lowest torch)" "$(lowest 'ray\[default\]')") ;;
        newest) torch="torch" wanted=(--upgrade "ray[default]") ;;
        *) torch="$(grep '^torch==' "$root/constraints.txt")" wanted=(-c "$root/constraints.txt") ;;
    esac
    say "installing $torch, the largest part"
    pip_install "$torch"
    say "installing Ray and the package${extras:+, and what is needed for: $extras}"
    pip_install "${wanted[@]}" -e "$root${extras:+[$extras]}"
    fingerprint | tee "$environment/installed" > "$stamp"
}

make_environment
