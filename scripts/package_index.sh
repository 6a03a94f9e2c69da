# shellcheck shell=sh
# Sourced by the scripts that install: where uv finds packages, and nothing else that would choose.
#
# Of pip's settings, uv is given the folders of wheels and the index, unless it has its own.
from_pip() { .venv/bin/python -m pip config get "$1" 2>/dev/null || true; }
links=${PIP_FIND_LINKS:-$(from_pip global.find-links)}
if [ -n "$links" ] && [ -z "${UV_FIND_LINKS:-}" ]; then
    UV_FIND_LINKS=$(echo $links | tr ' ' ',')
    export UV_FIND_LINKS
fi
index=${PIP_INDEX_URL:-$(from_pip global.index-url)}
if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}" ]; then
    export UV_DEFAULT_INDEX="$index"
fi
# These would choose other versions or builds than constraints/ does.
unset UV_TORCH_BACKEND UV_CONSTRAINT UV_OVERRIDE UV_EXCLUDE UV_EXCLUDE_NEWER UV_RESOLUTION \
    UV_PRERELEASE UV_NO_BINARY
