#!/usr/bin/env bash
# test.sh CONTEXT OVERLAY: the demo in the cluster; then every pod is deleted in turn while messages flow. Fails if
# one is lost, or comes twice.
set -euo pipefail
cd "$(dirname "$0")/../.."
context=$1 overlay=$2
kube() { kubectl --context "$context" --namespace baton "$@"; }

start() { # One of the jobs, and what all of them need.
  kubectl kustomize deploy/k8s/jobs | kube apply -f - --selector "batonmq/job in ($1,account)"
}

finished() { # Wait for a job; its log, and whether it went well.
  until kube get "job/$1" --output 'jsonpath={.status.conditions[*].type}' | grep -qE 'Complete|Failed'; do
    sleep 2
  done
  kube logs "job/$1" --tail 20
  kube wait "job/$1" --for condition=complete --timeout 1s
}

kube delete job demo traffic --ignore-not-found
start demo
finished demo

start traffic
kube wait pod --selector batonmq/job=traffic --for condition=Ready --timeout 120s
until [ "$(kube logs job/traffic --tail 1 | sed -n 's/.*"handled": \([0-9]*\).*/\1/p')" -gt 0 ] 2>/dev/null; do
  sleep 1
done
for pod in $(kube get pods --selector 'app.kubernetes.io/part-of=batonmq,!batonmq/client' --output name); do
  echo "deleting $pod"
  kube delete "$pod" --wait
  kube wait "$pod" --for create --timeout 120s
  kube wait "$pod" --for condition=Ready --timeout 300s
  sleep 5
done
kube exec job/traffic -- sh -c 'kill 1'
finished traffic
echo "OK: $overlay: every pod was deleted in turn; nothing lost, nothing twice."
