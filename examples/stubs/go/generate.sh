#!/usr/bin/env bash
# generate.sh: make the package `rocketmq` of this module from protos/apache. It needs protoc, or PROTOC="python -m
# grpc_tools.protoc"; it installs the pinned plugins of Go into bin/.
set -euo pipefail
cd "$(dirname "$0")"
export GOBIN=$PWD/bin
go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.0
options=(--go_opt=module=baton.example/stub --go-grpc_opt=module=baton.example/stub)
for file in admin definition service; do
  for plugin in go go-grpc; do
    options+=("--${plugin}_opt=Mapache/rocketmq/v2/$file.proto=baton.example/stub/rocketmq")
  done
done
PATH=$GOBIN:$PATH ${PROTOC:-protoc} -I ../../../protos --go_out=. --go-grpc_out=. "${options[@]}" \
  apache/rocketmq/v2/{admin,definition,service}.proto
