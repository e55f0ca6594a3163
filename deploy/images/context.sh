#!/usr/bin/env bash
# Fills build/images, the context of the images, for the Python that runs it: the base image has to have the
# same one. Every package's hash is checked against the lock files here. `--spark` adds those of the jobs.
set -euo pipefail

cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
context=build/images
wheel=("$python" -m pip wheel --quiet --disable-pip-version-check --no-deps)

fetch() { "${wheel[@]}" --require-hashes -r "deploy/images/$1.lock" -w "$context/$1"; }

rm -rf "$context/source" "$context/jobs" "$context"/{services,spark}/batonmq-*.whl
mkdir -p "$context/source"
cp -r batonmq services gen spark-jobs pyproject.toml README.md "$context/source"
# What tests are written with has no place in an image.
rm -rf "$context/source/batonmq/testing"
fetch services
"${wheel[@]}" --no-build-isolation "./$context/source" -w "$context/services"
fetch demo
if [ "${1:-}" = --spark ]; then
  fetch spark
  cp "$context"/services/batonmq-*.whl "$context/spark"
  cp -r spark-jobs/jobs deploy/images/spark-entrypoint.sh "$context"
fi
rm -rf "$context/source"
