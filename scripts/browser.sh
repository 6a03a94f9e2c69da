#!/bin/sh
# Makes sure that there is a Chromium, in which the pages of telescope ui and of the registry server are
# tested.
#
# One that is there is used. Else Debian's or Ubuntu's is installed, which only root can do.
set -eu

if [ -n "${TELESCOPE_CHROMIUM:-}" ]; then
    command -v "$TELESCOPE_CHROMIUM" >/dev/null 2>&1 && exit 0
    echo "browser: TELESCOPE_CHROMIUM is '$TELESCOPE_CHROMIUM', which cannot be run; set it to the" \
        "path of a Chromium or Chrome, or unset it" >&2
    exit 1
fi
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "browser: installing chromium, in which pages are tested"
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    if { apt-get update && apt-get install -y --no-install-recommends chromium; } \
        >"$log" 2>&1 </dev/null; then
        rm -f "$log"
        exit 0
    fi
    tail -n 20 "$log" >&2
fi
echo "browser: pages are tested in a real browser, and there is none;" \
    "install chromium (as root: apt-get install chromium), or set TELESCOPE_CHROMIUM to the path" \
    "of a Chromium or Chrome" >&2
exit 1
