#!/usr/bin/env bash
# apply-secrets.sh CONTEXT FOLDER [SECRET...]: make a Secret of every folder of make-ca.sh, or of the given ones. The
# Secret of the operator, which has all permissions, is made only if it is given. Running pods load changed files within
# about a minute, when Kubernetes has updated the volume. NAMESPACE is the namespace; default: baton.
set -euo pipefail
if [[ $# -lt 2 || $1 == -* ]]; then sed -n '2,/^set /s/^# //p' "$0" >&2 && exit 2; fi
context=$1 folder=$2
shift 2
namespace=${NAMESPACE:-baton}
kube() { kubectl --context "$context" "$@"; }

if [ $# = 0 ]; then
  for cert in "$folder"/*/tls.crt; do
    name=$(basename "$(dirname "$cert")")
    [ "$name" = tls-operator ] || set -- "$@" "$name"
  done
fi
kube apply -f <(sed "s/^  name: baton\$/  name: $namespace/" "$(dirname "$0")/../base/namespace.yaml")
for name in "$@"; do
  kube create secret generic "$name" --namespace "$namespace" --from-file "$folder/$name" --dry-run=client \
    --output yaml | kube apply --server-side --force-conflicts -f - # server-side: no second copy in an annotation
done
