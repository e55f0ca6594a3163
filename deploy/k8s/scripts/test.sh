#!/usr/bin/env bash
# test.sh CONTEXT OVERLAY: run the demo in the cluster, then delete every pod in turn under traffic. Fails if a message
# is lost, or repeated without the redelivered flag.
set -euo pipefail
if [[ $# -lt 2 || $1 == -* ]]; then sed -n '2,/^set /s/^# //p' "$0" >&2 && exit 2; fi
cd "$(dirname "$0")/../../.."
context=$1 overlay=$2
kube() { kubectl --context "$context" --namespace baton "$@"; }
jobs=deploy/k8s/jobs
if [[ $overlay == *-secure ]]; then jobs=deploy/k8s/jobs-secure; fi

start() { # job: start it, with the account that all jobs need
  kubectl kustomize "$jobs" | kube apply -f - --selector "batonmq/job in ($1,account)"
}

finished() { # job seconds: wait for its end and print its log; fail if it failed
  local state=
  for _ in $(seq 0 5 "$2"); do
    state=$(kube get "job/$1" --output 'jsonpath={.status.conditions[*].type}')
    if [[ $state =~ Complete|Failed ]]; then break; fi
    sleep 5
  done
  kube logs "job/$1" --tail 20 || true
  if [[ $state != *Complete* ]]; then
    kube describe pod --selector "batonmq/job=$1" >&2
    echo "$1: ${state:-not done after $2 s}" >&2
    return 1
  fi
}

counts() { # option...: print the counts that the traffic logs every second, without its other lines
  kube logs job/traffic "$@" | { grep '^{"sent": [0-9]*, "handled": [0-9]*}$' || true; } | tr -dc '0-9 \n'
}

flows() { # count: wait until this many more messages are handled
  local before='' now
  for _ in $(seq 180); do
    now=$(counts | awk 'END { print $2 }')
    before=${before:-$now}
    if [ -n "$now" ] && ((now >= before + $1)); then return; fi
    sleep 1
  done
  kube describe pod --selector batonmq/job=traffic >&2
  echo "timed out: fewer than $1 messages were handled in 180 s" >&2
  return 1
}

stalled() { # time: print the longest time since then in which no message was handled, in seconds
  counts --since-time "$1" |
    awk '{ run = $2 == last ? run + 1 : 0; last = $2; if (run > worst) worst = run } END { print worst + 0 }'
}

kube delete job demo traffic grants --ignore-not-found --timeout 240s
if [[ $overlay == *-secure ]]; then
  # The key of the operator is in the cluster only while a job needs it.
  trap 'kube delete secret tls-operator --ignore-not-found' EXIT
  NAMESPACE=baton deploy/k8s/scripts/apply-secrets.sh "$context" build/tls tls-operator
  start grants
  finished grants 120
  kube delete job grants
  kube delete secret tls-operator
fi
start demo
finished demo 900

start traffic
kube wait job/traffic --for 'jsonpath={.status.ready}=1' --timeout 120s # the pod is created after the job
flows 1000
for pod in $(kube get pods --selector 'app.kubernetes.io/part-of=batonmq,!batonmq/client' --output name); do
  since=$(date -u +%FT%TZ) began=$SECONDS
  kube delete "$pod" --timeout 180s
  kube wait "$pod" --for create --timeout 120s >/dev/null
  kube wait "$pod" --for condition=Ready --timeout 300s >/dev/null
  ready=$((SECONDS - began))
  flows 1000
  echo "$pod: ready again after $ready s, nothing handled for $(stalled "$since") s"
done
kube exec job/traffic -- sh -c 'kill 1'
finished traffic 300
echo "OK: $overlay: every pod was deleted in turn; nothing lost, nothing twice."
