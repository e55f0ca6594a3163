#!/usr/bin/env bash
set -euo pipefail
minikube delete --profile baton
