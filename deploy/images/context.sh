#!/usr/bin/env bash
# Fills build/images, the build context of the images, with wheels for the version of $PYTHON (default: that of .venv);
# the base image must have the same version. Checks the hash of every package against the lock files. `--spark` adds the
# wheels of the Spark jobs.
set -euo pipefail

cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
context=build/images
wheel=("$python" -m pip wheel --quiet --disable-pip-version-check --no-deps)

fetch() { "${wheel[@]}" --require-hashes -r "deploy/images/$1.lock" -w "$context/$1"; }

rm -rf "$context"/{services,spark}/batonmq*.whl
fetch services
for project in . services; do
  "$python" -m build --wheel --no-isolation --outdir "$context/services" "$project" >/dev/null
done
fetch demo
if [ "${1:-}" = --spark ]; then
  fetch spark
  for project in . spark-jobs; do
    "$python" -m build --wheel --no-isolation --outdir "$context/spark" "$project" >/dev/null
  done
  cp deploy/images/spark-entrypoint.sh "$context"
fi
