#!/usr/bin/env bash
# Makes the base image batonmq/base:local from packages of Debian, for machines without access to an image registry.
# Needs root, debootstrap and a Docker daemon. Then: make images BASE_IMAGE=batonmq/base:local
set -euo pipefail
if [[ ${1:-} == -* ]]; then sed -n '2,/^set /s/^# //p' "$0" >&2 && exit 2; fi

image=${1:-batonmq/base:local}
suite=${SUITE:-bookworm}
mirror=${MIRROR:-http://deb.debian.org/debian}
packages=python3,python3-venv,libstdc++6,ca-certificates

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include="$packages" "$suite" "$root" "$mirror"
# Remove build-time packages, and files that a container does not need.
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/doc/* \
  "$root"/usr/share/man/* "$root"/usr/share/locale/* "$root"/var/log/*
tar -C "$root" --numeric-owner -c . | docker import --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
  --change 'ENV LANG=C.UTF-8' - "$image"
