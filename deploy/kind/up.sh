#!/usr/bin/env bash
# A cluster of kind with BatonMQ in it; SECURE=1: with TLS and access on. Needs docker, kind, kubectl and the images
# (make images).
set -euo pipefail
cd "$(dirname "$0")/../.."
for program in docker kind kubectl; do
  if ! command -v "$program" >/dev/null; then
    echo "$program is not here; docs/how-to/deploy.md says what is needed" >&2
    exit 1
  fi
done
tag=${TAG:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}

kind get clusters | grep -qx baton || kind create cluster --config deploy/kind/cluster.yaml --wait 180s
kind load docker-image --name baton "batonmq/services:$tag" "batonmq/demo:$tag"
deploy/k8s/scripts/apply.sh kind-baton "kind${SECURE:+-secure}"
