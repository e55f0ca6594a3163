#!/usr/bin/env bash
# The addresses that components/outside advertises, on loopback of this machine, until Ctrl-C.
set -euo pipefail
forward() { kubectl --context baton --namespace baton port-forward "pod/$1" "$2" & }
trap 'kill $(jobs -p)' EXIT
forward storage-a-0 30910:10911
forward offsets-0 30930:10912
forward lockmgr-0 30940:10913
forward nameserver-0 30950:9876
wait
