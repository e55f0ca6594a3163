#!/usr/bin/env bash
# A cluster of minikube with BatonMQ in it; SECURE=1: with TLS and access on. Needs minikube, kubectl and the images
# (make images).
set -euo pipefail
cd "$(dirname "$0")/../.."
for program in minikube kubectl; do
  if ! command -v "$program" >/dev/null; then
    echo "$program is not here; docs/how-to/deploy.md says what is needed" >&2
    exit 1
  fi
done
tag=${TAG:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}

minikube status --profile baton >/dev/null || minikube start --profile baton --nodes 3 --memory 3g --cni calico
# The volumes of the other provisioner belong to root on every node but the first.
minikube addons enable storage-provisioner-rancher --profile baton
for image in services demo; do
  minikube image load --profile baton "batonmq/$image:$tag"
done
deploy/k8s/scripts/apply.sh baton "minikube${SECURE:+-secure}"
