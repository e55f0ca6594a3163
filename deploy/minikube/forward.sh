#!/usr/bin/env bash
# The addresses that components/outside advertises, on loopback of this machine, until Ctrl-C. A pod that is
# replaced is found again.
set -euo pipefail
kube() { kubectl --context "${CONTEXT:-baton}" --namespace baton "$@"; }

forward() ( # pod outside:inside
  trap 'kill "$!" 2>/dev/null; exit' TERM
  while true; do
    kube port-forward "pod/$1" "$2" &
    wait "$!" || true
    sleep 1
  done
)

pod='{.spec.selector.statefulset\.kubernetes\.io/pod-name}'
ports='{.spec.ports[0].nodePort}:{.spec.ports[0].port}'
ways=$(kube get services --output jsonpath="{range .items[?(@.spec.type==\"NodePort\")]}$pod $ports{\"\n\"}{end}")
trap 'kill $(jobs -p) 2>/dev/null' EXIT
while read -r pod ports; do
  if kube get pod "$pod" >/dev/null 2>&1; then forward "$pod" "$ports" & fi
done <<<"$ways"
wait
