#!/usr/bin/env bash
# gateway-keys.sh CONTEXT: make the Secret gateway-keys for components/gateway, unless it exists: the key that signs
# receipt handles, and the one that seals the secrets of access keys. Back it up: without the sealing key no access key
# works, and handles of scheduled messages of another receipt key are refused. NAMESPACE is the namespace; default: baton.
set -euo pipefail
if [[ $# -ne 1 || $1 == -* ]]; then sed -n '2,/^set /s/^# //p' "$0" >&2 && exit 2; fi
namespace=${NAMESPACE:-baton}
kube() { kubectl --context "$1" --namespace "$namespace" "${@:2}"; }

if [ -n "$(kube "$1" get secret gateway-keys --ignore-not-found --output name)" ]; then
  echo "gateway-keys: the Secret exists, and is kept"
  exit
fi
kubectl --context "$1" apply -f <(sed "s/^  name: baton\$/  name: $namespace/" "$(dirname "$0")/../base/namespace.yaml")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
umask 077
for name in receipt sealing; do openssl rand -base64 32 >"$folder/$name.key"; done
kube "$1" create secret generic gateway-keys --from-file "$folder"
