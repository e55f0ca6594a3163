#!/usr/bin/env bash
# Make a kind cluster and apply BatonMQ; SECURE=1: with TLS and access control. Needs docker, kind, kubectl and the
# images (make images).
set -euo pipefail
cd "$(dirname "$0")/../.."
for program in docker kind kubectl; do
  if ! command -v "$program" >/dev/null; then
    echo "$program was not found; docs/how-to/deploy.md lists the required programs" >&2
    exit 1
  fi
done
tag=${TAG:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}

kind get clusters | grep -qx baton || kind create cluster --config deploy/kind/cluster.yaml --wait 180s
kind load docker-image --name baton "batonmq/services:$tag" "batonmq/demo:$tag"
deploy/k8s/scripts/apply.sh kind-baton "kind${SECURE:+-secure}"
