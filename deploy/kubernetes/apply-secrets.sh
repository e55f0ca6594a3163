#!/usr/bin/env bash
# apply-secrets.sh CONTEXT FOLDER: a Secret of every folder that make-ca.sh has made. What runs takes over what has
# changed, within the minute or so that Kubernetes needs to bring it there.
set -euo pipefail
context=$1 folder=$2
kube() { kubectl --context "$context" "$@"; }

kube apply -f "$(dirname "$0")/../k8s/base/namespace.yaml"
for secret in "$folder"/*/; do
  name=$(basename "$secret")
  kube create secret generic "$name" --namespace baton --from-file "$secret" --dry-run=client --output yaml |
    kube apply --server-side --force-conflicts -f - # which keeps no second copy in an annotation
done
