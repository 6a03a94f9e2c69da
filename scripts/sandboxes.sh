#!/bin/sh
# Makes sure that there is what sandboxes on this machine need: bubblewrap, and a Python that every
# user can run. With `containers` also podman, over which the docker provider is tested, and ip, with
# which a run over several hosts is.
#
# What is there is used. Else Debian's or Ubuntu's packages are installed, which only root can do.
set -eu

is_there() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null 2>&1; }
missing=''
is_there bwrap || missing="$missing bubblewrap"
[ -x /usr/bin/python3 ] || [ -x /usr/local/bin/python3 ] || missing="$missing python3-minimal"
if [ "${1:-}" = containers ]; then
    is_there podman || missing="$missing podman"
    is_there runc || missing="$missing runc"
    is_there ip || missing="$missing iproute2"
fi
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "sandboxes: installing$missing"
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    if { apt-get update && apt-get install -y --no-install-recommends $missing; } \
        >"$log" 2>&1 </dev/null; then
        rm -f "$log"
        exit 0
    fi
    tail -n 20 "$log" >&2
fi
echo "sandboxes: what a model wrote is tested in sandboxes, which need$missing;" \
    "install it (as root on Debian or Ubuntu: apt-get install$missing)" >&2
exit 1
