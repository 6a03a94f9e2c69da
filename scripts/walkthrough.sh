# Begins a script that shows a whole run, and is called $name: quickstart.sh, tutorial.sh and
# agent_tutorial.sh source it.
cd "$(dirname "$0")/.."
began=$(date +%s)
scripts/setup.sh cpu
PATH="$PWD/.venv/bin:$PATH"
export PATH OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# An earlier run is kept: runs/NAME becomes runs/NAME.1, .2 and so on.
keep() {
    [ -e "$1" ] || return 0
    number=1
    while [ -e "$1.$number" ]; do number=$((number + 1)); done
    mv "$1" "$1.$number"
    echo "$name: moved the earlier $1 to $1.$number"
}

step() {
    echo
    echo "$ $*"
    "$@"
}

finished() {
    echo
    echo "$name: finished in $(($(date +%s) - began)) s; $*"
}
