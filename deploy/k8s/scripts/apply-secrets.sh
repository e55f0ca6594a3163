#!/usr/bin/env bash
# apply-secrets.sh CONTEXT FOLDER [SECRET...]: a Secret of every folder that make-ca.sh has made, or of those that are
# named. That of the operator, who may do everything, is only made if it is named. What runs takes over what has
# changed, within the minute or so that Kubernetes needs to bring it there. NAMESPACE says where.
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
    --output yaml | kube apply --server-side --force-conflicts -f - # which keeps no second copy in an annotation
done
