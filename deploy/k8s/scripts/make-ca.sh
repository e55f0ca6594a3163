#!/usr/bin/env bash
# make-ca.sh FOLDER [CLIENT...]: make certificates for clusters without cert-manager, in one folder for each Secret,
# such as FOLDER/tls-storage: for the services, for each CLIENT (an identity), and for etcd. etcd has an authority of
# its own: a client with a certificate of it can read and write everything. Needs openssl 3.
# Certificates that are valid for another 30 days, with the same names, are kept, so a second run adds clients and renews
# expiring certificates; RENEW=1 renews all certificates except those of the authorities. NAMESPACE is the namespace of the
# services (default: baton), DAYS the validity (default: 365). DNS_NAMES are further names, separated by commas, under
# which clients outside of the cluster reach the services, such as *.mq.example.com. apply-secrets.sh makes the Secrets.
set -euo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then sed -n '2,/^set /s/^# //p' "$0" >&2 && exit 2; fi
folder=${1%/}
shift
namespace=${NAMESPACE:-baton}
days=${DAYS:-365}
services="storage offsets lockmgr nameserver gateway scaler"
label='[a-z0-9]([a-z0-9-]*[a-z0-9])?'

fail() {
  echo "make-ca.sh: $*" >&2
  exit 1
}

umask 077
mkdir -p "$folder"
mine=$(find "$folder" -path "$folder/tls-*/tls.crt" | sed 's|.*/tls-\(.*\)/tls.crt$|\1|')
clients=$(printf '%s\n' "$mine" | grep -vxE "${services// /|}" || true) # clients of earlier runs are renewed, too
for client in $clients "$@"; do
  [[ $client =~ ^$label(\.$label)*$ && ${#client} -le 64 ]] ||
    fail "$client: an identity has up to 64 characters of a-z, 0-9, - and ., as the name of a Secret"
  [[ " $services " != *" $client "* ]] || fail "$client: a client can't have the name of a service"
done

outside=
while read -r name; do
  [[ $name =~ ^(\*\.)?$label(\.$label)*$ ]] || fail "$name: a DNS name has a-z, 0-9, - and ., and may begin with *."
  outside+=,DNS:$name
done < <(tr , '\n' <<<"${DNS_NAMES:-}" | sed '/^$/d')

new=$(mktemp -d "$folder/.new.XXXXXX") # holds incomplete files until all are written
trap 'rm -rf "$new"' EXIT
an_hour_ago=$(($(date +%s) - 3600)) # clocks of machines differ
begin=$(date -u -d "@$an_hour_ago" +%Y%m%d%H%M%SZ 2>/dev/null || date -u -r "$an_hour_ago" +%Y%m%d%H%M%SZ)

quietly() { # command: print its errors only if it fails
  "$@" 2>"$new/errors" || fail "$(cat "$new/errors")"
}

request() { # name key request
  quietly openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" -keyout "$2" -out "$3"
}

sign() { # days request certificate extensions options...
  local days=$1 request=$2 cert=$3
  printf '%s\n' "[ca]" "default_ca=this" "[this]" "new_certs_dir=$new" "database=$new/index" "rand_serial=yes" \
    "default_md=sha256" "policy=policy" "x509_extensions=extensions" "unique_subject=no" "[policy]" \
    "commonName=supplied" "[extensions]" "subjectKeyIdentifier=hash" "$4" >"$new/config"
  shift 4
  : >"$new/index"
  quietly openssl ca -batch -notext -config "$new/config" -startdate "$begin" -days "$days" -in "$request" \
    -out "$cert" "$@"
}

authority() { # name
  [ -e "$folder/$1.crt" ] && return
  request "$1" "$new/$1.key" "$new/request"
  sign 3650 "$new/request" "$new/$1.crt" \
    "$(printf '%s\n' basicConstraints=critical,CA:TRUE keyUsage=critical,keyCertSign,cRLSign)" \
    -selfsign -keyfile "$new/$1.key"
  mv "$new/$1.key" "$new/$1.crt" "$folder" # the key first: the certificate marks both as complete
}

names() { # certificate: print its alternative names as they are requested
  openssl x509 -noout -ext subjectAltName -in "$1" 2>/dev/null | tail -n 1 | sed 's/ //g; s/IPAddress:/IP:/g'
}

valid() { # authority secret alternatives: whether the certificate has these names and is valid for another 30 days
  [ "$(names "$folder/$2/tls.crt")" = "$3" ] &&
    cmp -s "$folder/$1.crt" "$folder/$2/ca.crt" &&
    openssl x509 -checkend 2592000 -noout -in "$folder/$2/tls.crt" >/dev/null 2>&1 &&
    openssl verify -CAfile "$folder/$1.crt" "$folder/$2/tls.crt" >/dev/null 2>&1
}

issue() { # authority secret name alternatives
  [ "${RENEW:-0}" != 1 ] && valid "$1" "$2" "$4" && return
  [ -e "$folder/$1.key" ] || fail "can't issue $2: $folder/$1.key, the key of the authority, is missing"
  mkdir "$new/$2"
  request "$3" "$new/$2/tls.key" "$new/request"
  sign "$days" "$new/request" "$new/$2/tls.crt" "$(printf '%s\n' authorityKeyIdentifier=keyid \
    basicConstraints=CA:FALSE extendedKeyUsage=serverAuth,clientAuth "subjectAltName=$4")" \
    -cert "$folder/$1.crt" -keyfile "$folder/$1.key"
  cp "$folder/$1.crt" "$new/$2/ca.crt"
  rm -rf "${folder:?}/$2"
  mv "$new/$2" "$folder/$2"
}

authority ca
authority etcd-ca
local=DNS:localhost,IP:127.0.0.1
for service in storage offsets lockmgr; do
  issue ca "tls-$service" "$service" "URI:service:$service,DNS:*.$service.$namespace.svc,$local$outside"
done
issue ca tls-nameserver nameserver "URI:service:nameserver,DNS:*.nameserver-nodes.$namespace.svc,DNS:nameserver,\
DNS:nameserver.$namespace,DNS:nameserver.$namespace.svc,$local$outside"
issue ca tls-gateway gateway "URI:service:gateway,DNS:*.gateway-nodes.$namespace.svc,DNS:gateway,\
DNS:gateway.$namespace,DNS:gateway.$namespace.svc,$local$outside"
issue ca tls-scaler scaler "URI:scaler,DNS:scaler,DNS:scaler.$namespace,DNS:scaler.$namespace.svc,$local"
for client in $(printf '%s\n' "$clients" "$@" | sort -u); do
  issue ca "tls-$client" "$client" "URI:$client"
done
issue etcd-ca etcd-server etcd "DNS:etcd-0.etcd,DNS:etcd-1.etcd,DNS:etcd-2.etcd,DNS:*.etcd.$namespace.svc,$local"
issue etcd-ca etcd-client batonmq "DNS:batonmq"
