#!/usr/bin/env bash
# make-ca.sh FOLDER [CLIENT...]: an authority of its own and the certificates that components/tls wants, for clusters
# without cert-manager. Existing files are kept: run again, it adds clients. Needs openssl 3. Then, as it says:
#   kubectl --namespace baton create secret generic tls-storage --from-file FOLDER/storage ...
set -euo pipefail
folder=$1
shift
namespace=${NAMESPACE:-baton}
days=${DAYS:-365}
umask 077
mkdir -p "$folder"

if [ ! -e "$folder/ca.key" ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=baton" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" \
    -keyout "$folder/ca.key" -out "$folder/ca.crt" 2>/dev/null
fi

issue() { # name names
  [ -e "$folder/$1/tls.crt" ] && return
  mkdir -p "$folder/$1"
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
    -keyout "$folder/$1/tls.key" 2>/dev/null |
    openssl x509 -req -days "$days" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" \
      -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$2") \
      -out "$folder/$1/tls.crt" 2>/dev/null
  cp "$folder/ca.crt" "$folder/$1/ca.crt"
}

local=DNS:localhost,IP:127.0.0.1
for service in storage offsets lockmgr; do
  issue "$service" "URI:service:$service,DNS:*.$service.$namespace.svc,$local"
done
issue nameserver "URI:service:nameserver,DNS:*.nameserver-nodes.$namespace.svc,DNS:nameserver,\
DNS:nameserver.$namespace,DNS:nameserver.$namespace.svc,$local"
for client in "$@"; do
  issue "$client" "URI:$client"
done

for service in storage offsets lockmgr nameserver; do
  echo "kubectl --namespace $namespace create secret generic tls-$service --from-file $folder/$service"
done
