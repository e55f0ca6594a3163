#!/usr/bin/env bash
# make-ca.sh FOLDER [CLIENT...]: certificates for clusters without cert-manager, a folder for each Secret, such as
# FOLDER/tls-storage: of the services, of clients by the identity they are to have, and, by an authority of its own,
# of etcd. Whoever has a certificate of that one reads and writes everything. Needs openssl 3.
# What is there is kept, so run again it adds clients; RENEW=1 issues everything anew, but for the authorities.
# apply-secrets.sh makes the Secrets.
set -euo pipefail
folder=$1
shift
namespace=${NAMESPACE:-baton}
days=${DAYS:-365}
umask 077
mkdir -p "$folder"

authority() { # name
  [ -e "$folder/$1.crt" ] && return
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=$1" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout "$folder/$1.key" -out "$folder/$1.crt.new" 2>/dev/null
  mv "$folder/$1.crt.new" "$folder/$1.crt"
}

issue() { # authority secret name alternatives
  local to=$folder/$2
  [ -e "$to/tls.crt" ] && [ "${RENEW:-0}" != 1 ] && return
  rm -rf "$to.new"
  mkdir "$to.new"
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$3" \
    -keyout "$to.new/tls.key" -out "$to.new/request" 2>/dev/null
  openssl x509 -req -days "$days" -CA "$folder/$1.crt" -CAkey "$folder/$1.key" -in "$to.new/request" \
    -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$4") \
    -out "$to.new/tls.crt" 2>/dev/null
  rm "$to.new/request"
  cp "$folder/$1.crt" "$to.new/ca.crt"
  rm -rf "$to" # all or nothing: what is half done has another name
  mv "$to.new" "$to"
}

authority ca
authority etcd-ca
local=DNS:localhost,IP:127.0.0.1
for service in storage offsets lockmgr; do
  issue ca "tls-$service" "$service" "URI:service:$service,DNS:*.$service.$namespace.svc,$local"
done
issue ca tls-nameserver nameserver "URI:service:nameserver,DNS:*.nameserver-nodes.$namespace.svc,DNS:nameserver,\
DNS:nameserver.$namespace,DNS:nameserver.$namespace.svc,$local"
for client in "$@"; do
  issue ca "tls-$client" "$client" "URI:$client"
done
issue etcd-ca etcd-server etcd "DNS:etcd-0.etcd,DNS:etcd-1.etcd,DNS:etcd-2.etcd,DNS:*.etcd.$namespace.svc,$local"
issue etcd-ca etcd-client batonmq "DNS:batonmq"
