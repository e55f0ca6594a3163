#!/usr/bin/env bash
# apply.sh CONTEXT OVERLAY: apply an overlay of deploy/k8s, and wait until every pod is ready. For an overlay with TLS,
# make the certificates of the services and of the identities `operator` and `demo` first, in build/tls. An existing
# cluster can't be changed to TLS, or back.
set -euo pipefail
if [[ $# -lt 2 || $1 == -* ]]; then sed -n '2,/^set /s/^# //p' "$0" >&2 && exit 2; fi
cd "$(dirname "$0")/../../.."
kube() { kubectl --context "$context" --namespace baton "$@"; }
context=$1 overlay=$2 tls=build/tls
export NAMESPACE=baton # the namespace of the overlays

scheme=http
if [[ $overlay == *-secure ]]; then scheme=https; fi
runs=$(kube get statefulset etcd --ignore-not-found \
  --output 'jsonpath={.spec.template.spec.containers[0].env[?(@.name=="SCHEME")].value}')
if [ "${runs:-$scheme}" != "$scheme" ]; then
  echo "etcd has $runs:// peer addresses, which can't be changed, and $overlay needs $scheme://; delete the cluster" \
    "first: make ${overlay%%-*}-down" >&2
  exit 1
fi
if [[ $overlay == *-secure ]]; then
  deploy/k8s/scripts/make-ca.sh "$tls" operator demo
  deploy/k8s/scripts/apply-secrets.sh "$context" "$tls"
fi
kube apply -k "deploy/k8s/overlays/$overlay"
for stateful in $(kube get statefulsets --output name); do
  kube rollout status "$stateful" --timeout 300s
done
kube get pods --output wide
echo "$overlay: applied and ready in $SECONDS s"
if [[ $overlay == *-secure ]]; then
  echo "baton context set $overlay --nameserver 127.0.0.1:30950 --ca-file $tls/ca.crt" \
    "--cert-file $tls/tls-operator/tls.crt --key-file $tls/tls-operator/tls.key"
fi
