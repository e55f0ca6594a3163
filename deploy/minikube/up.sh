#!/usr/bin/env bash
# Make a minikube cluster and apply BatonMQ; SECURE=1: with TLS and access control. Needs minikube, kubectl and the
# images (make images).
set -euo pipefail
cd "$(dirname "$0")/../.."
for program in minikube kubectl; do
  if ! command -v "$program" >/dev/null; then
    echo "$program was not found; docs/how-to/deploy.md lists the required programs" >&2
    exit 1
  fi
done
tag=${TAG:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}

minikube status --profile baton >/dev/null || minikube start --profile baton --nodes 3 --memory 3g --cni calico
# On all nodes but the first, the volumes of the default provisioner belong to root.
minikube addons enable storage-provisioner-rancher --profile baton
for image in services demo; do
  minikube image load --profile baton "batonmq/$image:$tag"
done
deploy/k8s/scripts/apply.sh baton "minikube${SECURE:+-secure}"
