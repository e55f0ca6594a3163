#!/usr/bin/env bash
# test.sh CONTEXT OVERLAY: the demo in the cluster; then every pod is deleted in turn while messages flow. Fails if
# one is lost, or comes twice.
set -euo pipefail
cd "$(dirname "$0")/../.."
context=$1 overlay=$2
kube() { kubectl --context "$context" --namespace baton "$@"; }
jobs=deploy/k8s/jobs
if [[ $overlay == *-secure ]]; then jobs=deploy/k8s/jobs-secure; fi

start() { # One of the jobs, and what all of them need.
  kubectl kustomize "$jobs" | kube apply -f - --selector "batonmq/job in ($1,account)"
}

finished() { # Wait for a job; its log, and whether it went well.
  until kube get "job/$1" --output 'jsonpath={.status.conditions[*].type}' | grep -qE 'Complete|Failed'; do
    sleep 2
  done
  kube logs "job/$1" --tail 20
  kube wait "job/$1" --for condition=complete --timeout 1s
}

handled() { # How many messages the traffic has handled: once a second it says so.
  kube logs job/traffic --tail 1 | sed -n 's/.*"handled": \([0-9]*\).*/\1/p'
}

flows() { # Until so many more are handled.
  local goal
  goal=$(($(handled) + $1))
  for _ in $(seq 180); do
    sleep 1
    if [ "$(($(handled)))" -ge "$goal" ]; then return; fi
  done
  echo "nothing is handled any more" >&2
  return 1
}

stood() { # The longest time since then in which nothing was handled, in seconds.
  kube logs job/traffic --since-time "$1" |
    awk -F '[:,}]' '{ run = $4 == last ? run + 1 : 0; last = $4; if (run > worst) worst = run } END { print worst + 0 }'
}

kube delete job demo traffic grants --ignore-not-found
if [[ $overlay == *-secure ]]; then
  start grants
  finished grants
fi
start demo
finished demo

start traffic
kube wait pod --selector batonmq/job=traffic --for condition=Ready --timeout 120s
flows 1000
for pod in $(kube get pods --selector 'app.kubernetes.io/part-of=batonmq,!batonmq/client' --output name); do
  since=$(date -u +%FT%TZ) began=$SECONDS
  kube delete "$pod" --wait
  kube wait "$pod" --for create --timeout 120s >/dev/null
  kube wait "$pod" --for condition=Ready --timeout 300s >/dev/null
  ready=$((SECONDS - began))
  flows 1000
  echo "$pod: ready again after $ready s, nothing handled for $(stood "$since") s"
done
kube exec job/traffic -- sh -c 'kill 1'
finished traffic
echo "OK: $overlay: every pod was deleted in turn; nothing lost, nothing twice."
