#!/usr/bin/env bash
# apply.sh CONTEXT OVERLAY: apply an overlay of deploy/k8s, and wait until every pod is ready.
set -euo pipefail
cd "$(dirname "$0")/../.."
kube() { kubectl --context "$context" --namespace baton "$@"; }
context=$1 overlay=$2

kube apply -k "deploy/k8s/overlays/$overlay"
for stateful in $(kube get statefulsets --output name); do
  kube rollout status "$stateful" --timeout 300s
done
kube get pods --output wide
