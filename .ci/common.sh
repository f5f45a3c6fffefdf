# Sourced by run and compat: steps with a name and a time, and a folder that is gone at the end.

unset PYTHONPATH PYTHONHOME TRITON_INTERPRET
for name in ${!PAGEDATTN_*}; do unset "$name"; done

work=$(mktemp -d)
current="setting up"
export PAGEDATTN_CACHE_DIR="$work/cache" # no verdict of an earlier run is believed

finish() {
  local status=$?
  jobs -p | xargs -r kill 2>/dev/null || true
  rm -rf "$work"
  if [ "$status" -ne 0 ]; then echo "FAILED in: $current (exit code $status)" >&2; fi
  exit "$status"
}
trap finish EXIT

step() { # step NAME COMMAND...
  current=$1
  shift
  local start=$SECONDS
  echo "=== $current"
  "$@"
  echo "--- $current: $((SECONDS - start)) s"
}

# A copy without what building and running leave behind, so that the checkout stays as it is and
# an old build/ cannot bring deleted modules back.
copy_tree() {
  mkdir -p "$work/tree"
  tar --exclude=./.git --exclude=./build --exclude=./dist --exclude='./*.egg-info' \
    --exclude=__pycache__ --exclude='./.venv*' --exclude='./.*_cache' --exclude=./.typing \
    -cf - . | tar -xf - -C "$work/tree"
  cd "$work/tree"
}

# A Python that runs: a pyenv shim is on PATH even where its version is not switched on.
find_python() { # find_python CONDITION CANDIDATE..., the condition in Python about `v`
  local condition=$1 candidate
  shift
  for candidate in "$@"; do
    if [ -n "$candidate" ] && "$candidate" -c "
import ensurepip, sys, venv
v = sys.version_info[:2]
sys.exit(not ($condition))" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python with $condition, venv and pip among: $*" >&2
  return 1
}

new_venv() { # new_venv NAME PYTHON: made, and first on PATH from here on
  "$2" -m venv "$work/$1"
  export PATH="$work/$1/bin:$plain_path"
}
plain_path=$PATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=2
