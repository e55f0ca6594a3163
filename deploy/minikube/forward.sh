#!/usr/bin/env bash
# Forward the addresses that components/outside advertises from loopback of this machine, until Ctrl-C. After a pod is
# replaced, its port is forwarded again.
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
